"""Countdown with a reward and a filter of your own.

python examples/countdown/train_countdown.py examples/countdown/countdown_grpo.yaml
"""

import sys

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.reward.countdown import countdown_reward_fn
from areal.utils.tokenizer import load_hf_tokenizer


def brief_countdown(prompt, completions, prompt_ids, completion_ids, **data) -> float:
    """The shipped reward, less a little for every character."""
    reward = countdown_reward_fn(prompt, completions, prompt_ids, completion_ids, **data)
    return reward - 0.001 * len(completions)


def not_solved_by_all(trajectory) -> bool:
    """Train on a prompt only while some of its samples still fail."""
    return bool((trajectory["rewards"] < 0.5).any())


def main(argv: list[str]) -> None:
    from areal import PPOTrainer  # here, so that processes that score do not import torch

    config, _ = load_expr_config(argv, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train = get_custom_dataset("train", config.train_dataset, tokenizer)
    valid = get_custom_dataset("test", config.valid_dataset, tokenizer)
    with PPOTrainer(config, train, valid) as trainer:
        trainer.train(
            workflow_kwargs={"reward_fn": brief_countdown}, dynamic_filter_fn=not_solved_by_all
        )


if __name__ == "__main__":
    main(sys.argv[1:])
