"""Supervised fine-tuning on chats of your own.

python examples/sft/train_sft.py examples/sft/arithmetic_sft.yaml
"""

import sys

from areal import SFTTrainer
from areal.api.cli_args import SFTConfig, load_expr_config
from areal.dataset.chat_rows import sft_rows, user_says
from areal.utils.tokenizer import load_hf_tokenizer


def my_chats(numbers: range) -> list:
    """(chat, reply): the digits of a number in reverse."""
    return [(user_says(f"reverse {n}: "), str(n)[::-1]) for n in numbers]


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, SFTConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train = sft_rows(my_chats(range(1000, 9000)), tokenizer, max_length=None)
    valid = sft_rows(my_chats(range(9000, 9500)), tokenizer, max_length=None)
    with SFTTrainer(config, train, valid) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
