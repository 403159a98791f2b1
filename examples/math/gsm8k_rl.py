"""GRPO on GSM8K: the script form of the recipe beside it.

python examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo.yaml scheduler.type=local

Overrides follow the file: actor.path=Qwen/Qwen2.5-0.5B-Instruct, scheduler.type=ray, ...
"""

import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.utils.tokenizer import load_hf_tokenizer


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    train_dataset = get_custom_dataset(
        split=config.train_dataset.split, dataset_config=config.train_dataset, tokenizer=tokenizer
    )
    valid_dataset = get_custom_dataset(
        split=config.valid_dataset.split, dataset_config=config.valid_dataset, tokenizer=tokenizer
    )
    workflow_kwargs = {
        "reward_fn": config.reward_fn,
        "gconfig": config.gconfig,
        "tokenizer": config.tokenizer_path,
    }
    with PPOTrainer(config, train_dataset, valid_dataset) as trainer:
        trainer.train(
            workflow="areal.workflow.rlvr.RLVRWorkflow",
            workflow_kwargs=workflow_kwargs,
            eval_workflow="areal.workflow.rlvr.RLVRWorkflow",
            eval_workflow_kwargs={**workflow_kwargs, "gconfig": config.eval_gconfig},
        )


if __name__ == "__main__":
    main(sys.argv[1:])
