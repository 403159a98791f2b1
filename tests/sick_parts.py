"""Parts of a training that are wrong in one way each, for tests of the doctor."""

from __future__ import annotations

import torch

from areal.api.routed_experts import ROUTED_KEY
from areal.engine.native.local_engine import NativeLocalEngine
from areal.trainer.rl_trainer import PPOTrainer
from areal.workflow.rlvr import RLVRWorkflow


class HotWorkflow(RLVRWorkflow):
    """Samples at a temperature of its own."""

    def __init__(self, gconfig, **options):
        super().__init__(gconfig=gconfig.new(temperature=0.5), **options)


class ChangingWorkflow(RLVRWorkflow):
    """Changes what a group returns."""

    async def arun_group(self, engine, data, num_samples):
        result = await super().arun_group(engine, data, num_samples)
        self.change(result.trajectory)
        return result


class EarlyMask(ChangingWorkflow):
    def change(self, trajectory):
        for key in ("loss_mask", "turn_ids"):
            trajectory[key] = trajectory[key].roll(-1, 1)


class CutPrompt(ChangingWorkflow):
    """Forgets the first token of the prompt."""

    def change(self, trajectory):
        for key, value in trajectory.items():
            if value.dim() > 1:
                trajectory[key] = value[:, 1:]


class LateLogprobs(ChangingWorkflow):
    """Log-probabilities of the token before."""

    def change(self, trajectory):
        trajectory["logprobs"] = trajectory["logprobs"].roll(1, 1)


class NextVersion(ChangingWorkflow):
    """Names weights that did not exist yet."""

    def change(self, trajectory):
        trajectory["versions"] = trajectory["versions"] + 1


class OtherSample(ChangingWorkflow):
    """Each sample has the reward of the one before, of the same prompt."""

    def change(self, trajectory):
        trajectory["rewards"] = trajectory["rewards"].roll(1)


class OneSeed(RLVRWorkflow):
    """Draws all samples of a group with the same seed."""

    async def arun_episode(self, engine, data):
        return await super().arun_episode(_OneSeedEngine(engine), data)


class _OneSeedEngine:
    def __init__(self, engine):
        self._engine = engine

    async def agenerate(self, req):
        options = req.gconfig.with_seed(3)
        return await self._engine.agenerate(type(req)(input_ids=req.input_ids, gconfig=options))


class NarrowWorkflow(RLVRWorkflow):
    """Samples from half of the distribution."""

    def __init__(self, gconfig, **options):
        super().__init__(gconfig=gconfig.new(top_p=0.5), **options)


class OtherExperts(ChangingWorkflow):
    """The experts on record are those of the token before."""

    def change(self, trajectory):
        trajectory[ROUTED_KEY] = trajectory[ROUTED_KEY].roll(1, 1)


class LateGrader(RLVRWorkflow):
    """Grades with the row of the group before."""

    _row = None

    async def arun_group(self, engine, data, num_samples):
        row, self._row = self._row or data, data
        graded = {**row, "messages": data["messages"]}
        return await super().arun_group(engine, graded, num_samples)


class ForgetfulTrainer(PPOTrainer):
    """Counts versions and sends no weights."""

    def publish_weights(self, version):
        self.engine.set_version(version)


class LukewarmEngine(NativeLocalEngine):
    """Ignores the temperature of requests."""

    async def agenerate(self, req):
        reply = await super().agenerate(
            type(req)(input_ids=req.input_ids, gconfig=req.gconfig.new(temperature=1.0))
        )
        reply.input_tokens = req.input_ids
        return reply


def wrong_sign(inputs):
    return inputs.advantages_T * (inputs.logprobs_T - inputs.prox_logp_T).exp()


def detached(inputs):
    """Depends on the model in form only: its gradient is 0."""
    return -inputs.advantages_T * (inputs.logprobs_T.detach() + 0 * inputs.logprobs_T)


def swap_tensors(model) -> None:
    """The query projections of the first two layers."""
    first, second = (model.layers[i].attention.wq.weight for i in "01")
    with torch.no_grad():
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


def shuffle_experts(model) -> None:
    """The router of the first layer names the next expert in place of each."""
    router = model.layers["0"].feed_forward.router
    router.register_forward_hook(lambda _, __, out: (out[0], (out[1] + 1) % router.num_experts))
