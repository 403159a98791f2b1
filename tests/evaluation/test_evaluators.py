"""lm-eval and inspect-ai, unmodified, against `areal serve`.

`make test-eval` makes their environment, .venv-eval, and runs this.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from tiny import write_tiny_model
from tiny_tokenizer import VOCAB_SIZE, write_byte_tokenizer

from areal.engine.remote.native import launch_native_server

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests/data/evaluators"
BIN = ROOT / ".venv-eval/bin"
TOKEN = "token-of-this-run"
pytestmark = pytest.mark.evaluators

COLOURS = ["red", "green", "blue", "yellow"]
ROWS = [
    {"question": f"The {thing} is", "choices": COLOURS, "gold": number % 4}
    for number, thing in enumerate(["sky", "grass", "sun", "rose", "sea", "leaf", "lemon", "wall"])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, vocab_size=VOCAB_SIZE, max_position_embeddings=2048)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    child, address = launch_native_server(folder, token=TOKEN, num_pages=800, setup_timeout_s=60)
    yield address
    child.terminate()


def run(*command: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def test_lm_eval_scores_choices_as_transformers_does(folder, address, tmp_path):
    """Which choice is likeliest, by echoed log-probabilities."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    shutil.copy(FILES / "colours.yaml", tmp_path)
    options = f"base_url=http://{address}/v1/completions,model={folder},num_concurrent=2"
    run(
        *(BIN / "lm_eval", "run", "--model", "local-completions", "--model_args", options),
        *("--tasks", "colours", "--include_path", tmp_path, "--output_path", tmp_path / "out"),
        *("--log_samples", "--batch_size", "4"),
        cwd=tmp_path,
        OPENAI_API_KEY=TOKEN,
        HF_HOME=str(tmp_path / "home"),
    )
    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = {}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        found[sample["doc_id"]] = [float(answer[0]) for answer in sample["filtered_resps"]]
    expected = _likelihoods(folder)
    for number, likelihoods in enumerate(expected):
        assert found[number] == pytest.approx(likelihoods, abs=1e-3)
    right = [max(range(4), key=row.__getitem__) for row in expected]
    accuracy = sum(r == row["gold"] for r, row in zip(right, ROWS, strict=True)) / len(ROWS)
    assert json.loads(results.read_text())["results"]["colours"]["acc,none"] == accuracy


def _likelihoods(folder: Path) -> list[list[float]]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def likelihood(question: str, choice: str) -> float:
        whole = tokenizer(f"{question} {choice}", return_tensors="pt")["input_ids"]
        start = len(tokenizer(question)["input_ids"])
        with torch.no_grad():
            logprobs = model(whole).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, whole[0, 1:, None])[start - 1 :].sum().item()

    return [[likelihood(row["question"], choice) for choice in COLOURS] for row in ROWS]


def test_inspect_runs_a_task_to_its_end(folder, address, tmp_path):
    """Every epoch of every sample has an answer of the model, and none has an error."""
    shutil.copy(FILES / "sums.py", tmp_path)
    run(
        *(BIN / "inspect", "eval", "sums.py", "--model", "openai-api/areal/tiny"),
        *("--log-dir", tmp_path / "logs", "--log-format", "json", "--display", "plain"),
        *("--max-tokens", "8", "--seed", "1", "--temperature", "1"),
        cwd=tmp_path,
        AREAL_API_KEY=TOKEN,
        AREAL_BASE_URL=f"http://{address}/v1",
        XDG_DATA_HOME=str(tmp_path / "data"),
    )
    (file,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(file.read_text())
    assert log["status"] == "success" and log["results"]["completed_samples"] == 12
    assert all(sample.get("error") is None for sample in log["samples"])
    texts = [sample["output"]["choices"][0]["message"]["content"] for sample in log["samples"]]
    assert len(texts) == 12 and any(texts)
    tokens = log["stats"]["model_usage"]["openai-api/areal/tiny"]["output_tokens"]
    assert 12 <= tokens <= 12 * 8
