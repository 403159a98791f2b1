"""Speeds by hand, and what a plan says of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from tiny_vision import image_row, tiny_vision_config, tiny_vision_model
from torch.utils.flop_counter import FlopCounterMode

from areal.models.vision.tower import Images
from areal.planner.devices import load_device
from areal.planner.engines import Servers, Trainer
from areal.planner.layouts import best_split
from areal.planner.memory import ServerRank, TrainingRank
from areal.planner.plan import Setup, plan_setup, refusal
from areal.planner.scale import known_models
from areal.planner.shapes import Shape
from areal.planner.simulate import Spec, simulate
from areal.planner.speed import Generation, Layout, Training
from areal.planner.towers import tower_pairs, tower_products
from areal.planner.workload import Workload

H200 = load_device("h200")
# Round numbers, nothing but operations and bytes.
PLAIN = replace(
    H200,
    matrix_tflops=1.0,
    matrix_share=1.0,
    bandwidth_tbs=0.001,
    read_share=1.0,
    attention_tflops=1.0,
    attention_half_length=0.0,
    traffic_eager=0.0,
    layer_us_few=0.0,
    layer_us_many=0.0,
    train_op_us=0.0,
)
ONE = Layout()
LOAD = Workload(prompts=8, samples=4, prompt=64, output=100, max_output=400, staleness=2)


def tiny_shape() -> Shape:
    return Shape(tiny_model("qwen3").args)


def large_shape() -> Shape:
    from areal.models import decoder_args

    return Shape(decoder_args(known_models()["Qwen/Qwen2.5-7B-Instruct"]))


def test_a_micro_batch_by_hand():
    shape = tiny_shape()
    args = shape.args
    # A CPU: narrow heads and products cost no more there.
    seconds = Training(shape=shape, device=replace(PLAIN, kind="cpu")).micro_batch_s([10, 20])
    products = 2 * 30 * (3 * shape.used_by_token + 4 * shape.head_weights) / 1e12
    # Half of the 100 + 400 pairs, 4 operations for each number of a query, forward and backward.
    attention = 3 * 4 * args.n_layers * args.n_heads * args.head_dim * 250 / 1e12
    logits = 24 * 30 * args.vocab_size / 1e9
    assert seconds == pytest.approx(products + attention + logits)


def test_adapters_save_a_third_of_the_products_and_small_steps_wait_for_the_host():
    shape = large_shape()
    whole = Training(shape=shape, device=H200).micro_batch_s([4096])
    lora = Training(shape=shape, device=H200, has_adapters=True).micro_batch_s([4096])
    assert whole / 2 < lora < whole
    slow = Training(shape=tiny_shape(), device=replace(H200, train_op_us=1e6))
    # 50 operations of a block forward, twice as many backward.
    assert slow.micro_batch_s([10]) == pytest.approx(3 * 50 * tiny_shape().num_layers)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_5", "qwen3_vl"])
def test_products_of_a_tower_are_counted_as_it_computes_them(family):
    config = tiny_vision_config(family)
    model = tiny_vision_model(family)
    row = image_row(config, [(4, 6)], seed=0)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sight = model.look(Images(row.pixels, row.grids))
    found = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in found.items() if "mm" in str(op))
    assert products == 2 * len(sight) * tower_products(model.args.vision)


def test_pairs_of_patches_by_hand():
    windows = tiny_vision_model("qwen2_5_vl").args.vision  # of two by two tokens, one layer without
    assert tower_pairs(windows, 6) == (6 * 4) ** 2 + 2 * (6 * 4) * (4 * 4)
    fixed = tiny_vision_model("gemma3").args.vision  # images of 36 patches, 9 tokens; two of them
    assert tower_pairs(fixed, 18) == 2 * 3 * 36**2


def test_images_take_time_once_for_each_prompt():
    shape = Shape(tiny_vision_model("qwen3_vl").args)
    load = Workload(prompts=4, samples=8, prompt=64, image=32, output=16, max_output=16, spread=0)
    assert load.distinct_prompts(32) == 4 and load.distinct_prompts(1) == 1
    trainer = Trainer(
        Training(shape=shape, device=H200),
        TrainingRank(shape=shape, device=H200, tokens=1),
        max_tokens=None,
        min_micro_batches=1,
    )
    text = replace(load, image=0)
    look_s = trainer.training.look_s(4, 32, trains=True)
    assert look_s > 0
    assert trainer.train_s(load) - trainer.train_s(text) == pytest.approx(look_s)
    assert trainer.memory(load, "a").peak > trainer.memory(text, "a").peak
    both = {"shape": shape, "device": H200}
    servers = Servers(Generation(**both), ServerRank(**both), 1, recomputes_cache=False)
    seen_s = servers.generation.look_s(32)
    assert servers.steady_s(load) - servers.steady_s(text) == pytest.approx(4 * seen_s)
    assert servers.whole_s(load) - servers.whole_s(text) == pytest.approx(4 * seen_s)


def test_a_decode_step_reads_weights_and_cache():
    shape = tiny_shape()
    args = shape.args
    engine = Generation(shape=shape, device=replace(PLAIN, matrix_tflops=1e9))
    read = 2 * (shape.used_by_token + shape.head_weights)
    cache = 100 * 2 * args.n_layers * args.n_kv_heads * args.head_dim * 2
    rows = 1.5 * shape.kept("compiled") * 2 + 15 * args.vocab_size
    assert engine.step_s(1, 100) == pytest.approx((read + cache + rows) / 1e9)


def test_two_ranks_halve_the_work_of_a_sequence():
    shape = large_shape()
    device = replace(H200, link_gbs=1e9)  # nothing is lost between them
    one = Training(shape=shape, device=device).micro_batch_s([4096])
    for layout in (Layout(tp=2), Layout(cp=2), Layout(pp=2)):
        both = Training(shape=shape, device=device, layout=layout)
        assert both.micro_batch_s([4096]) == pytest.approx(one / 2, rel=0.01)


def test_a_pipeline_fills_and_drains():
    engine = Training(shape=tiny_shape(), device=H200, layout=Layout(pp=4))
    assert engine.bubble(4) == 1.75
    assert engine.bubble(12) == 1.25


@given(
    output=st.floats(1, 1000),
    spread=st.floats(0, 2),
    count=st.integers(1, 300),
    room=st.floats(1, 8),
)
@settings(max_examples=80, deadline=None)
def test_lengths_have_the_mean_and_stay_below_the_bound(output, spread, count, room):
    most = max(int(output * room) + 1, 2)
    load = replace(LOAD, output=output, max_output=most, spread=spread)
    lengths = load.outputs(count)
    assert lengths == sorted(lengths) and lengths[0] >= 1 and lengths[-1] <= most
    assert sum(lengths) / count == pytest.approx(output, abs=1.0)
    assert load.draw(0.0) >= 1 and load.draw(1.0) <= most


def setup_of(shape: Shape, *, servers: int = 1, layout: Layout = ONE, device=H200) -> Setup:
    both = {"shape": shape, "device": device}
    trainer = Trainer(
        Training(**both, layout=layout),
        TrainingRank(**both, layout=layout, tokens=1, mode="selective"),
        max_tokens=16384,
        min_micro_batches=1,
    )
    return Setup(
        trainers={"actor": trainer},
        groups=[["actor"]],
        servers=Servers(Generation(**both), ServerRank(**both), servers, recomputes_cache=False),
        asks_actor=False,
        update_mode="xccl",
        takes_turns=False,
    )


def test_what_is_slower_sets_the_pace_and_the_other_idles():
    # Four ranks train about as fast as one server can make answers of 2048 tokens.
    long = replace(LOAD, prompts=256, output=2048, max_output=4096)
    few = plan_setup(setup_of(large_shape(), layout=Layout(dp=4)), long)
    assert few.bound == "generation" and few.generation_idle == pytest.approx(0)
    many = plan_setup(setup_of(large_shape(), servers=64, layout=Layout(dp=4)), long)
    assert many.bound == "training" and many.training_idle == pytest.approx(0)
    assert many.step_s < few.step_s and many.staleness == 2
    assert {loss.what for loss in many.losses} >= {"servers wait for training"}


def test_without_staleness_the_halves_take_turns():
    plan = plan_setup(setup_of(large_shape()), replace(LOAD, staleness=0))
    times = plan.times
    together = times.generate + times.train + times.publish + times.stall
    assert plan.step_s == pytest.approx(together)
    assert plan.staleness == 0


def test_one_gpu_for_both_holds_both():
    setup = setup_of(large_shape())
    plan = plan_setup(setup, LOAD, gpus=1)
    (place,) = plan.memory
    assert place.name == "actor + rollout" and plan.shares_devices
    assert place.peak == sum(process.peak for process in place.processes)
    with pytest.raises(ValueError, match="2 are fewer than the 5 of the layouts"):
        plan_setup(setup_of(large_shape(), layout=Layout(dp=4)), LOAD, gpus=2)


def test_what_cannot_fit_is_refused_with_the_numbers():
    small = replace(H200, memory_gib=40.0)
    why = refusal(plan_setup(setup_of(large_shape(), device=small), LOAD).memory, small)
    assert why is not None
    # 7.6 billion weights at 14 bytes, activations and the head.
    assert "actor needs 118.8 GiB" in why and "which has 39.0 GiB" in why
    assert "shard it over more ranks (d, t or p of actor.backend)" in why
    assert refusal(plan_setup(setup_of(tiny_shape(), device=small), LOAD).memory, small) is None


def test_a_better_split_is_faster_and_fits():
    setup = setup_of(large_shape(), servers=7, layout=Layout(dp=1))
    load = replace(LOAD, prompts=64)
    plan = plan_setup(setup, load)
    best = best_split(setup, load, 8)
    assert best is not None and best.plan.tokens_per_s > plan.tokens_per_s
    assert not best.plan.too_large()
    assert best.servers * best.server_tp + best.actor.world == 8


@settings(max_examples=25, deadline=None)
@given(
    staleness=st.integers(0, 3),
    servers=st.integers(1, 3),
    train_s=st.floats(0.01, 5),
    environment_s=st.floats(0, 2),
    failures=st.sampled_from([0.0, 60.0]),
    seed=st.integers(0, 1000),
    beside=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_simulated_time_is_conserved(
    staleness, servers, train_s, environment_s, failures, seed, beside
):
    spec = Spec(
        load=replace(LOAD, staleness=staleness, environment_s=environment_s),
        num_servers=servers,
        max_running=16,
        step_s=lambda rows: 0.005 + 0.0001 * rows,
        prefill_s=0.01,
        recompute_s=0.001,
        train_s=train_s,
        publish_s=0.05,
        stall_s=0.02,
        generates_at=beside,
        failures_per_hour=failures,
    )
    found = simulate(spec, steps=6, seed=seed)
    assert sum(found.training.values()) == pytest.approx(1)
    assert sum(found.generation.values()) == pytest.approx(1)
    assert min(*found.training.values(), *found.generation.values()) >= 0
    assert 0 <= found.staleness <= staleness
    assert found.step_s >= 0.05
    assert simulate(spec, steps=6, seed=seed) == found


def test_a_simulation_of_equal_samples_is_the_sum_of_its_parts():
    spec = Spec(
        load=replace(LOAD, output=100, spread=0.0, staleness=0),
        num_servers=1,
        max_running=1000,
        step_s=lambda rows: 0.01,
        prefill_s=0.25,
        recompute_s=0.0,
        train_s=3.0,
        publish_s=0.5,
        stall_s=0.125,
    )
    found = simulate(spec, steps=5, seed=1)
    # A stall, 8 prompts, 100 steps; then 3 s of training and half a second of publication.
    assert found.step_s == pytest.approx(0.125 + 8 * 0.25 + 100 * 0.01 + 3.5)
    assert found.tokens_per_s == pytest.approx(32 * 164 / found.step_s)


def test_failures_cost_time():
    spec = Spec(
        load=replace(LOAD, staleness=1),
        num_servers=2,
        max_running=64,
        step_s=lambda rows: 0.2,
        prefill_s=0.01,
        recompute_s=0.0,
        train_s=1.0,
        publish_s=0.0,
        stall_s=0.0,
    )
    sound = simulate(spec, steps=8, seed=3)
    broken = simulate(replace(spec, failures_per_hour=60.0), steps=8, seed=3)
    assert broken.failures > 0 and broken.generation["down"] > 0
    assert broken.tokens_per_s < sound.tokens_per_s
