"""Several turns with a reward of your own: an answer that is close is worth something too.

python examples/multi_turn_math/train_multi_turn.py examples/multi_turn_math/arithmetic_grpo.yaml
"""

import sys

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.reward.answer_text import last_number
from areal.utils.tokenizer import load_hf_tokenizer


def closeness(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """1 for the right number, less the further off, and 0 (so: try again) from 10 on."""
    given = last_number(completions)
    if given is None or len(given) > 6:
        return 0.0
    return max(0.0, 1 - abs(float(given.replace(",", "")) - float(answer)) / 10)


def main(argv: list[str]) -> None:
    from areal import PPOTrainer  # here, so that processes that score do not import torch

    config, _ = load_expr_config(argv, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train = get_custom_dataset("train", config.train_dataset, tokenizer)
    valid = get_custom_dataset("test", config.valid_dataset, tokenizer)
    with PPOTrainer(config, train, valid) as trainer:
        trainer.train(
            workflow="areal.workflow.multi_turn.MultiTurnWorkflow",
            workflow_kwargs={
                "reward_fn": closeness,
                "gconfig": config.gconfig,
                "tokenizer": tokenizer,
                "max_turns": 3,
                "turn_discount": 0.8,
            },
        )


if __name__ == "__main__":
    main(sys.argv[1:])
