"""Router replay: a token is trained through the experts that computed it when it was sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine.train.archon_world import loss_fn, make_batch, open_engine, train
from gloo_ranks import run_ranks
from tiny import tiny_config, tiny_model, write_tiny_model
from tiny_run import grpo_config

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import ModelRequest
from areal.engine.native.local_engine import NativeLocalEngine
from areal.engine.train.fit import check_models
from areal.models.common.moe import Router, replay_experts, routers_of
from areal.trainer.ppo.batch import collect, token_outputs
from areal.workflow.transcript import Transcript

NOT_RECORDED = 255


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe"))


def replayed_batch(seed=0) -> dict[str, torch.Tensor]:
    """Experts nobody would choose: drawn for each token, two different ones of four."""
    batch = make_batch()
    gen = torch.Generator().manual_seed(seed)
    scores = torch.rand(*batch["input_ids"].shape, 2, 4, generator=gen)
    return {**batch, "routed_experts": scores.topk(2).indices.to(torch.uint8)}


def test_a_router_weighs_given_experts_by_its_own_probabilities():
    router = tiny_model("qwen3_moe").layers["0"].feed_forward.router
    x_TD = torch.randn(3, 32)
    own_weights, own_experts = router(x_TD)
    given = torch.tensor([[2, 0], [NOT_RECORDED, NOT_RECORDED], [1, 3]], dtype=torch.uint8)
    replay_experts(router, given[:, None])
    weights, experts = router(x_TD)
    assert experts[[0, 2]].tolist() == given[[0, 2]].tolist()
    assert torch.equal(experts[1], own_experts[1]) and torch.equal(weights[1], own_weights[1])
    probs_TE = (x_TD @ router.weight.T).softmax(-1)
    chosen = probs_TE[0, [2, 0]]
    torch.testing.assert_close(weights[0], chosen / chosen.sum())
    replay_experts(router, None)
    assert torch.equal(router(x_TD)[1], own_experts)


def test_only_the_given_experts_and_the_router_learn(folder):
    engine = open_engine(folder, "archon:d1")
    batch = replayed_batch()
    batch["routed_experts"][..., 0, :] = torch.tensor([1, 3])  # of the first layer
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    engine.train_batch(batch, loss_fn, lambda mb: mb["loss_mask"].sum())
    moe = engine.model.layers["0"].feed_forward
    changed = moe.experts.w1 != before["layers.0.feed_forward.experts.w1"]
    assert changed.flatten(1).any(1).tolist() == [False, True, False, True]
    assert not torch.equal(moe.router.weight, before["layers.0.feed_forward.router.weight"])
    assert all(router.given_TK is None for router in routers_of(engine.model))


@pytest.mark.parametrize(
    "changes", [{"gradient_checkpointing": True}, {"enable_tree_training": True}]
)
def test_other_ways_to_compute_replay_too(folder, changes):
    """A forward that is computed again in the backward pass, and shared prefixes."""
    weight = lambda mb: mb["loss_mask"].sum()  # noqa: E731
    plain, other = open_engine(folder, "archon:d1"), open_engine(folder, "archon:d1", **changes)
    batch = replayed_batch()
    losses = [engine.train_batch(batch, loss_fn, weight)["loss"] for engine in (plain, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for mine, theirs in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def rank_losses(folder: str, layouts: list[str]) -> list[list[float]]:
    """Losses of two steps; the second shows that the first changed the right weights."""
    found = []
    for layout in layouts:
        engine = open_engine(folder, layout)
        found.append([train(engine, replayed_batch(seed))["loss"] for seed in range(2)])
    return found


def test_ranks_replay_their_own_tokens(folder):
    """Of rows, of parts of a sequence (which are padded), and with experts elsewhere."""
    layouts = ["archon:d2e2", "archon:c2e2"]
    expected = rank_losses(folder, ["archon:d1"])[0]
    target = "engine.train.test_router_replay:rank_losses"
    for found in run_ranks(2, target, folder, layouts):
        assert found == [pytest.approx(expected, rel=1e-5)] * len(layouts)


async def generate(folder: str, num_samples: int) -> list[dict[str, torch.Tensor]]:
    engine = NativeLocalEngine(folder, num_pages=200, return_routed_experts=True)
    engine.initialize()
    gconfig = GenerationHyperparameters(max_new_tokens=9, ignore_eos=True)
    trajectories = []
    for seed in range(num_samples):
        transcript = Transcript([3, 1 + seed, 4])
        for turn in range(2):
            ids = list(transcript.ids)
            sent = ModelRequest(input_ids=ids, gconfig=gconfig.new(seed=10 * seed + turn))
            transcript.add_reply(await engine.agenerate(sent))
            if turn == 0:
                transcript.add_text([7, 8])
        trajectories.append(transcript.trajectory(reward=1.0))
    engine.destroy()
    return trajectories


async def test_replayed_logprobs_are_the_engines(folder):
    """Two turns. With the engine's arithmetic they are its bits. Of other routers only those
    replayed are close."""
    data = collect(await generate(folder, num_samples=4))
    routed = data["routed_experts"]
    assert routed.dtype == torch.uint8 and (routed[:, -1] == NOT_RECORDED).all()
    assert (routed[:, :-1] < 4).all()
    mask = data["loss_mask"]
    for replay in (True, False):  # equal weights choose the same experts
        engine = open_engine(folder, "archon:d1", batch_invariant=True)
        found = token_outputs(engine, data, replay=replay)
        assert torch.equal(found[mask], data["logprobs"][mask])
    engine = open_engine(folder, "archon:d1")
    found = token_outputs(engine, data, replay=True)
    torch.testing.assert_close(found[mask], data["logprobs"][mask], atol=2e-6, rtol=0)
    with torch.no_grad():
        for router in routers_of(engine.model):
            # The order of all experts is turned around; the weights of two are nearly the same.
            router.weight.mul_(-1e-3)
    gaps = [
        (token_outputs(engine, data, replay=replay) - data["logprobs"])[mask].abs().mean()
        for replay in (True, False)
    ]
    assert gaps[0] < 0.8 * gaps[1]


@pytest.mark.parametrize(
    ("family", "overrides", "says"),
    [
        ("qwen3_moe", ["actor.backend=fsdp:d1"], "use actor.backend archon"),
        ("qwen3_moe", ["actor.backend=archon:t2"], "tensor or pipeline parallelism"),
        ("qwen3", [], "this qwen3 has no experts"),
        ("qwen3_moe", ["rollout.backend=vllm:d1"], "use rollout.backend native"),
    ],
)
def test_what_cannot_replay_is_refused_before_a_run(family, overrides, says, tmp_path):
    config = grpo_config(tmp_path, "rollout.return_routed_experts=true", *overrides)
    with pytest.raises(ValueError, match=r"rollout\.return_routed_experts: .*" + says):
        check_models(config, {"actor": tiny_config(family)})


def test_a_dense_model_refuses_a_batch_with_experts(tmp_path):
    engine = open_engine(str(write_tiny_model(tmp_path, "qwen3")), "archon:d1")
    with pytest.raises(ValueError, match="this qwen3 has no experts"):
        engine.forward_batch(replayed_batch())


def test_a_turn_keeps_the_experts_of_the_reply_that_read_it_first():
    from areal.api.io_struct import ModelResponse
    from areal.api.routed_experts import experts_of_tokens

    def reply(num_in, num_out, expert):
        routed = np.full((num_in + num_out - 1, 1, 2), expert, np.uint8)
        fields = ([0] * num_out, [0.0] * num_out, [0] * num_out)
        return ModelResponse([0] * num_in, *fields, "stop", routed_experts=routed)

    routed = experts_of_tokens([reply(2, 2, 0), reply(5, 2, 1)], 7)
    assert routed is not None
    assert routed[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1, NOT_RECORDED]
    assert experts_of_tokens([ModelResponse([1], [2], [0.0], [0], "stop")], 2) is None


def test_routers_are_found_in_the_order_of_the_layers():
    model = tiny_model("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    expected = [model.layers[i].feed_forward.router for i in ("0", "2")]
    assert all(isinstance(router, Router) for router in expected)
    assert [id(router) for router in routers_of(model)] == [id(router) for router in expected]
