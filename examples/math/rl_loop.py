"""Asynchronous GRPO in one file: what `areal train` does, without the parts that keep a run alive.

    prompts -> NativeLocalEngine (groups of samples) -> rewards -> advantages -> loss
                      ^------------- new weights <------------- ArchonEngine

Generation runs up to `--max-staleness` versions ahead of training, in a thread of its own. A killed
loop starts over; `areal train` has the ledger, recover points, statistics and servers.

python examples/math/rl_loop.py --steps 100     # on a CPU, with the model of `areal demo`
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from areal import RolloutController
from areal.algorithm.advantage import shift_left
from areal.algorithm.loss import LossInputs, ppo_clip_loss
from areal.algorithm.normalization import normalize
from areal.api.cli_args import (
    DatasetConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    TrainEngineConfig,
)
from areal.api.io_struct import FinetuneSpec, WeightUpdateMeta
from areal.dataset import get_custom_dataset
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.train.archon import ArchonEngine
from areal.utils.data import concat_batch
from areal.utils.tokenizer import load_hf_tokenizer
from areal.workflow import RLVRWorkflow


def answer_reward(prompt, completions, prompt_ids, completion_ids, answer, **data) -> float:
    """1 if the text after the last `>` is the answer. Runs in a process of its own."""
    return float(completions.split(">")[-1].strip() == answer)


def make_batch(groups):
    """The samples of all groups as one padded batch [B, S], with an advantage for every token.

    Log-probabilities at position t are of the token at t + 1, so what belongs to tokens moves left.
    """
    batch, meta = concat_batch(groups)
    rewards_B = batch["rewards"]
    advantages_B = normalize(
        rewards_B, group_sizes=meta.traj_group_sizes, mean_level="group", std_level="group"
    )
    mask_BS = shift_left(batch["loss_mask"]).bool()
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "loss_mask": mask_BS,
        "logprobs": shift_left(batch["logprobs"]),
        "versions": shift_left(batch["versions"], fill=-1),
        "advantages": advantages_B[:, None] * mask_BS,
    }, rewards_B.mean().item()


def grpo_loss(logprobs_T, entropy_T, mb):
    """On one packed micro-batch [T]; the ratio is to the policy that sampled the token."""
    inputs = LossInputs(logprobs_T, mb["logprobs"], mb["advantages"], mb["loss_mask"])
    loss, _ = ppo_clip_loss(inputs, eps_clip=0.2, eps_clip_higher=0.28)
    return loss


def num_loss_tokens(mb):
    return mb["loss_mask"].sum()


def train(args):
    torch.manual_seed(args.seed)  # the order of the prompts
    tokenizer = load_hf_tokenizer(args.model)
    section = DatasetConfig(path="arithmetic", type="rl", batch_size=args.prompts)
    rows = get_custom_dataset("train", section, tokenizer)
    prompts = DataLoader(rows, batch_size=args.prompts, shuffle=True, collate_fn=list)

    # Warmed up: early steps are large, and the samples they learn from are old already.
    optimizer = OptimizerConfig(lr=args.lr, warmup_steps_proportion=0.04, beta2=0.95)
    actor = ArchonEngine(TrainEngineConfig(path=args.model, optimizer=optimizer))
    actor.initialize(FinetuneSpec(args.steps, len(rows), args.prompts, max_train_steps=args.steps))
    rollout = RolloutController(
        NativeLocalEngine(args.model),
        InferenceEngineConfig(max_head_offpolicyness=args.max_staleness),
        seed=args.seed,
    )
    rollout.initialize()
    actor.connect_engine(rollout, WeightUpdateMeta(type="direct"))
    gconfig = GenerationHyperparameters(max_new_tokens=10)
    episode = {"reward_fn": args.reward, "gconfig": gconfig, "tokenizer": tokenizer}
    try:
        for step in range(args.steps):
            groups = rollout.prepare_batch(prompts, RLVRWorkflow, episode, group_size=args.samples)
            batch, reward = make_batch(groups)
            stats = actor.train_batch(batch, grpo_loss, num_loss_tokens)
            actor.step_lr_scheduler()
            rollout.pause()  # no new episodes while the weights change
            actor.update_weights(step + 1)
            rollout.set_version(step + 1)
            rollout.resume()
            age = (step - batch["versions"][batch["loss_mask"]]).float().mean().item()
            print(
                f"step {step + 1}/{args.steps} | reward {reward:.3f} | loss {stats['loss']:.4f} | "
                f"gradient {stats['grad_norm']:.3f} | staleness {age:.2f}",
                flush=True,
            )
    finally:
        rollout.destroy()
        actor.destroy()


def main(argv):
    parser = argparse.ArgumentParser(description="Trains a model by GRPO to add numbers.")
    parser.add_argument("--model", default="runs/demo/arithmetic/sft/model", help="a folder")
    parser.add_argument("--reward", default=answer_reward, help="a name, or an import path")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--max-staleness", type=int, default=2, help="0: strictly on-policy")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if not Path(args.model).is_dir():
        parser.error(f"--model: {args.model} is no folder; run `areal demo` once, or name another")
    train(args)


if __name__ == "__main__":
    main(sys.argv[1:])
