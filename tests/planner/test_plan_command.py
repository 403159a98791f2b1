"""`areal plan` and `areal check --device` on the command line: no torch, clear errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_config
from tiny_vision import tiny_vision_config

from areal.api.cli_args import load_experiment
from areal.cli.check import check_memory
from areal.cli.main import main
from areal.planner.devices import find_device, known_devices, load_device, num_gpus
from areal.utils.hub import Found

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
experiment_name: plan
trial_name: a
total_train_steps: 100
train_dataset: {path: arithmetic, batch_size: 64}
gconfig: {n_samples: 8, max_new_tokens: 1024}
rollout: {backend: "native:d4", max_head_offpolicyness: 2}
actor:
  path: Qwen/Qwen2.5-7B-Instruct
  backend: archon:d4
  gradient_checkpointing: true
  mb_spec: {max_tokens_per_mb: 16384}
  reward_norm: {mean_level: group, std_level: group}
  optimizer: {lr: 1e-6}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def plan(*argv: str) -> int:
    return main(["plan", "run.yaml", *argv])


def test_a_plan_loads_no_torch(project):
    code = (
        "import json, sys\n"
        "from areal.cli.main import main\n"
        "assert main(['plan', 'run.yaml', '--device', 'h200', '--simulate']) == 0\n"
        "assert main(['plan', '--scale']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Of a model with 28 query heads, 4 of keys and values, and 28 layers.
IMPOSSIBLE = {
    "rollout.backend=native:d1t3": "num_key_value_heads of the model's config.json",
    "rollout.backend=vllm:d1t3": "num_attention_heads of its config.json must be a multiple of 3",
    "rollout.backend=sglang:d1t8": "got 28; choose another t",
    "rollout.backend=vllm:d1p29": "num_hidden_layers of its config.json is 28",
    "actor.backend=archon:d1t8": "t8 cannot cut this model",
    "actor.backend=archon:d1p100": "28 layers into 200 stages, some of 0 layers",
    "actor.backend=fsdp:d1t3": "t3 cannot cut this model",
    "actor.backend=megatron:d1t8": "num_attention_heads of its config.json must be a multiple of 8",
}


@pytest.mark.parametrize("override", IMPOSSIBLE)
def test_a_layout_that_cannot_cut_the_model_is_refused(capsys, override):
    assert plan(override, "--device", "h200") == 2
    key, _, value = override.partition("=")
    error = capsys.readouterr().err
    assert error.startswith(f"areal: error: {key}: '{value}' with "), error
    assert IMPOSSIBLE[override] in error


def test_check_refuses_the_same_without_a_hub(tmp_path):
    """The config.json of a known model need not be there."""
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "empty")}
    command = [sys.executable, "-m", "areal.cli.main", "check", "run.yaml"]
    done = subprocess.run(
        [*command, "rollout.backend=native:d1t3"],
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert "num_key_value_heads of the model's config.json" in done.stderr


def test_ranks_of_sglang_may_hold_whole_heads(capsys):
    more = ["rollout.backend=sglang:d1t8", "sglang.extra_args=[--enable-dp-attention]"]
    assert plan(*more, "--device", "h200") == 0


def test_sft_is_refused_too(project, capsys):
    text = CONFIG.partition("gconfig")[0] + "trainer: sft\nactor: {path: Qwen/Qwen2.5-7B-Instruct, "
    (project / "run.yaml").write_text(text + "backend: 'archon:d1t3', optimizer: {lr: 1e-6}}\n")
    assert plan("--device", "h200") == 2
    assert "actor.backend: 'archon:d1t3'" in capsys.readouterr().err


def test_images_of_a_model_that_sees(project, capsys):
    (project / "seer").mkdir()
    (project / "seer" / "config.json").write_text(json.dumps(tiny_vision_config("qwen3_vl")))
    seer = ["actor.path=seer", "--device", "h200", "--json", "--prompt-tokens", "512"]
    plans = []
    for more in ([], ["--image-tokens", "400"]):
        assert plan(*seer, *more) == 0
        plans.append(json.loads(capsys.readouterr().out))
    without, shown = ("prompts without images" in json.dumps(one) for one in plans)
    assert without and not shown
    assert plan(*seer, "--image-tokens", "513") == 2
    assert "--image-tokens must be from 0 to the 512 tokens" in capsys.readouterr().err
    assert plan("--device", "h200", "--image-tokens", "10") == 2
    assert "--image-tokens: actor.path has no vision tower" in capsys.readouterr().err


def test_a_plan_in_words(capsys):
    assert plan("--device", "h200", "--simulate") == 0
    text = capsys.readouterr().out
    for part in (
        "memory of a device",
        "tokens/s trained",
        "largest loss",
        "100 steps:",
        "simulated",
    ):
        assert part in text
    assert "assumed: prompts of 256 tokens; outputs of 512 tokens on average" in text


def test_a_plan_as_json_is_the_same_each_time(capsys):
    argv = ("--device", "h200", "--json", "--simulate", "--prompt-tokens", "100", "--steps", "7")
    assert plan(*argv) == 0
    first = capsys.readouterr().out
    assert plan(*argv) == 0
    assert capsys.readouterr().out == first
    found = json.loads(first)
    assert found["fits"] and found["duration_s"] == pytest.approx(7 * found["step_s"])
    (memory,) = [place for place in found["memory"] if place["name"] == "actor"]
    phases = memory["processes"][0]["phases"].values()
    assert memory["peak"] == max(sum(parts.values()) for parts in phases)


def test_what_cannot_fit_has_exit_code_2_and_the_numbers(capsys):
    assert main(["plan", "run.yaml", "actor.backend=archon:d1", "--device", "a100"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"error: actor needs 1\d\d\.\d GiB of each NVIDIA A100", error), error


OFFLINE = {
    "sft": ("64 sequences of 500 tokens", {}),
    "dpo": ("128 sequences of 500 tokens", {}),
    "rw": ("128 sequences of 500 tokens", {"actor.is_critic": "true"}),
}


@pytest.mark.parametrize("trainer", OFFLINE)
def test_trainers_without_generation_are_planned(project, capsys, trainer):
    text = CONFIG.replace("\n", f"\ntrainer: {trainer}\n", 1)
    for line in ("gconfig:", "rollout:", "  reward_norm:"):
        text = re.sub(rf"(?m)^{line}.*\n", "", text)
    (project / "offline.yaml").write_text(text)
    sequences, keys = OFFLINE[trainer]
    config = ["offline.yaml", *(f"{key}={value}" for key, value in keys.items())]
    lengths = ["--prompt-tokens", "200", "--output-tokens", "300"]
    assert main(["plan", *config, "--device", "h200", *lengths]) == 0
    told = capsys.readouterr().out
    assert f"a step: {sequences}" in told and "100 steps:" in told
    assert ("ref (x 4)" in told) == (trainer == "dpo")
    assert main(["plan", *config, "--device", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["duration_s"] == pytest.approx(100 * found["step_s"])
    small = [*config, "actor.backend=archon:d1", "--device", "a100"]
    assert main(["plan", *small]) == 2
    assert "GiB of each NVIDIA A100 SXM 80 GB, which has 78.0" in capsys.readouterr().err
    assert main(["plan", *config, "--device", "h200", "--simulate"]) == 2
    assert "--simulate: a run of this trainer generates nothing" in capsys.readouterr().err


def test_a_teacher_on_servers_has_devices_of_its_own(capsys):
    def planned(*options: str) -> dict:
        assert plan(*options, "--device", "h200", "--json") == 0
        return json.loads(capsys.readouterr().out)

    served = ["teacher.path=Qwen/Qwen2.5-32B-Instruct", "gconfig.temperature=1"]
    served += ["teacher.engine_type=rollout", "teacher.backend=native:d1t2"]
    alone, one = planned(), planned(*served)
    more = planned(*served, "teacher.backend=native:d2t2")
    assert (alone["gpus"], one["gpus"], more["gpus"]) == (8, 10, 12)
    (teacher,) = (place for place in one["memory"] if place["name"] == "teacher")
    assert teacher["devices"] == 2 and teacher["peak"] > 32e9  # half of 32B weights in bfloat16
    # Training waits for the scores, of which two servers each compute a half.
    waits = [made["times"]["forward"] - alone["times"]["forward"] for made in (one, more)]
    assert waits[0] == pytest.approx(2 * waits[1]) and waits[1] > 0
    assert plan(*served, "--device", "h200", "--gpus", "9") == 2
    assert "fewer than the 10 of the layouts, 2 of them for the servers of the teacher" in (
        capsys.readouterr().err
    )


def test_an_offloaded_model_counts_while_it_is_on_the_device(project, capsys):
    text = re.sub(r"(?m)^(gconfig:|rollout:|  reward_norm:).*\n", "", CONFIG)
    (project / "offline.yaml").write_text(text.replace("\n", "\ntrainer: dpo\n", 1))
    beside = "ref.scheduling_strategy={type: colocation, target: actor}"

    def peak(*offloaded: str) -> float:
        keys = [f"{role}.offload=true" for role in offloaded]
        assert main(["plan", "offline.yaml", beside, *keys, "--device", "h200", "--json"]) == 0
        (place,) = json.loads(capsys.readouterr().out)["memory"]
        return place["peak"]

    both, alone = peak(), peak("ref")
    assert peak("actor", "ref") == pytest.approx(alone)  # as if there were the actor alone
    assert alone < peak("actor") < both  # the weights of ref stay


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["run.yaml", "--device", "b300"],
            "--device: no profile 'b300'; known are a100, cpu, h100",
        ),
        (["run.yaml", "--device", "h200", "--gpus", "0"], "--gpus must be at least 1, got 0"),
        (["run.yaml", "--device", "h200", "--gpus", "3"], "--gpus: 3 are fewer than the 8"),
        (["run.yaml", "--device", "h200", "--output-tokens", "2000"], "from 1 to the 1024 of"),
        (["run.yaml", "--device", "h200", "--length-spread", "9"], "between 0 and 3, got 9"),
        (["run.yaml", "--device", "h200", "--environment-seconds", "-1"], "must be 0 or more"),
        (["run.yaml", "--device", "h200", "--failures-per-hour", "nan"], "between 0 and 60"),
        (
            ["run.yaml", "train_dataset.batch_size=1000000", "--device", "h200", "--simulate"],
            "--simulate follows at most 60,000 samples in flight",
        ),
        (["run.yaml"], "--device: no known GPU is in this machine"),
        (["run.yaml", "actor.path=org/unknown", "--device", "h200"], "org/unknown"),
        (["run.yaml", "actor.path=./none", "--device", "h200"], "actor.path: folder"),
        ([], "name a config file"),
        (["--measure", "here.txt"], "--measure: the file of a profile ends in .json"),
    ],
)
def test_mistakes_are_named(argv, message, capsys):
    if argv == ["run.yaml"] and find_device() is not None:
        pytest.skip("this machine has a known GPU")
    assert main(["plan", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("name", known_devices())
def test_profiles_say_where_each_number_is_from(name):
    content = json.loads((ROOT / f"areal/planner/devices/{name}.json").read_text())
    known = ("measured", "data sheet", "fitted", "taken from", "assumed", "counted", "one CPU")
    for key, entry in content["values"].items():
        assert entry["source"].startswith((*known, "none")), key
    assert load_device(name).memory_bytes > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": 3}, "expected an object `values`"),
        ({"kind": "tpu"}, "kind must be cuda or cpu"),
        ({"values": {"colour": {"value": 1, "source": "measured"}}}, "unknown key 'colour'"),
        ({"values": {}}, "no value for 'attention_half_length'"),
    ],
)
def test_a_damaged_profile_is_named(change, message, project, capsys):
    content = json.loads((ROOT / "areal/planner/devices/h200.json").read_text())
    (project / "mine.json").write_text(json.dumps(content | change))
    assert plan("--device", "mine.json") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", [True, "1", None, -1, 0, float("inf")])
def test_a_number_that_is_none_is_named(value, project, capsys):
    content = json.loads((ROOT / "areal/planner/devices/h200.json").read_text())
    content["values"]["memory_gib"] = {"value": value, "source": "measured"}
    (project / "mine.json").write_text(json.dumps(content))
    assert plan("--device", "mine.json") == 2
    assert "mine.json: memory_gib must" in capsys.readouterr().err


def test_the_driver_tells_the_device(project):
    folder = project / "driver" / "0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1\n")
    assert find_device(project / "driver") == "h100"
    assert num_gpus(project / "driver") == 1
    (folder / "information").write_text("Model: \t\t NVIDIA GeForce RTX 3090\n")
    assert find_device(project / "driver") is None
    assert find_device(project / "nothing") is None


def test_a_measured_profile_can_be_planned_with(project, capsys):
    assert main(["plan", "--measure", "here.json"]) == 0
    content = json.loads((project / "here.json").read_text())
    assert content["values"]["matrix_tflops"]["source"] == "measured: areal plan --measure"
    assert content["values"]["row_us"]["source"].startswith("taken from")
    assert load_device("here.json").matrix_tflops > 0


def write_model(folder: Path, **shape) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen2") | shape))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))


def test_check_refuses_what_cannot_fit_where_the_device_is_known(project, capsys):
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    write_model(project / "tiny", max_position_embeddings=4096)
    write_model(project / "large", max_position_embeddings=4096, **large)
    both = ["check", "run.yaml", "--device", "h100"]
    assert main([*both[:2], "actor.path=./tiny", *both[2:]]) == 0
    assert main([*both[:2], "actor.path=./large", *both[2:]]) == 2
    assert re.search(r"actor needs \d+\.\d GiB of each NVIDIA H100", capsys.readouterr().err)
    if find_device() is None:
        assert main(["check", "run.yaml", "actor.path=./large"]) == 0


def test_models_that_the_planner_knows_are_refused_without_their_hub(project):
    config, _ = load_experiment(["run.yaml", "actor.path=Qwen/Qwen2.5-72B-Instruct"])
    unreached = Found("unknown", why="nobody answers")
    found = dict.fromkeys(config.all_models(), unreached)
    with pytest.raises(ValueError, match=r"actor needs \d+\.\d GiB of each NVIDIA H100"):
        check_memory(config, found, "h100")


def test_the_table_of_the_documentation_is_what_the_planner_says(capsys):
    assert main(["plan", "--scale"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
    rows = {tuple(cell.strip() for cell in line.split("|")) for line in page.splitlines()}
    for line in said:
        if "---" not in line:
            assert tuple(cell.strip() for cell in line.split("|")) in rows, line


def test_fitted_rows_are_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import planner

    rows = {row.name: row for row in (*planner.training_rows(), *planner.generation_rows())}
    held_out = [row for row in rows.values() if not row.is_fitted]
    assert len(held_out) >= 12
    assert [row.name for row in held_out if not row.is_met] == []
    memory = [row for row in planner.memory_rows() if not row.is_met]
    assert memory == []
