"""DPO on pairs of your own: a better and a worse reply to the same chat.

python examples/alignment/train_dpo.py examples/alignment/arithmetic_dpo.yaml
"""

import sys

from areal import DPOTrainer
from areal.api.cli_args import DPOConfig, load_expr_config
from areal.dataset.chat_rows import pair_rows, user_says
from areal.utils.tokenizer import load_hf_tokenizer


def my_pairs(numbers: range) -> list:
    """(chat, better reply, worse reply): doubling, done right and done wrong."""
    return [(user_says(f"{n}+{n}="), str(2 * n), str(2 * n + 1)) for n in numbers]


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, DPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train = pair_rows(my_pairs(range(0, 900)), tokenizer, max_length=None)
    valid = pair_rows(my_pairs(range(900, 999)), tokenizer, max_length=None)
    with DPOTrainer(config, train, valid) as trainer:
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1:])
