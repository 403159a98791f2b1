"""The script form of `areal train`: the place to bring your own data, reward or workflow.

python examples/math/train_grpo.py examples/math/arithmetic_grpo.yaml total_train_steps=20
"""

import sys

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.utils.tokenizer import load_hf_tokenizer


def shorter_is_better(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """A reward of your own: right answers score 1, and up to 0.1 more for being short."""
    right = completions.split(">")[-1].strip() == str(answer)
    return float(right) + 0.1 * right / max(len(completion_ids), 1)


def main(argv: list[str]) -> None:
    from areal import PPOTrainer  # here, so that processes that score do not import torch

    config, _ = load_expr_config(argv, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train = get_custom_dataset("train", config.train_dataset, tokenizer)
    valid = get_custom_dataset("test", config.valid_dataset, tokenizer)
    with PPOTrainer(config, train, valid) as trainer:
        trainer.train(
            workflow="areal.workflow.rlvr.RLVRWorkflow",
            workflow_kwargs={
                "reward_fn": shorter_is_better,
                "gconfig": config.gconfig,
                "tokenizer": tokenizer,
            },
        )


if __name__ == "__main__":
    main(sys.argv[1:])
