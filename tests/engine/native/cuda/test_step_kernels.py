"""The device's bookkeeping of decode steps against the same in plain Python."""

from __future__ import annotations

import pytest
import torch

from areal.engine.native.cuda.step_kernels import finish_decode, prepare_decode

PAGE = 16


def ints(values, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_prepare_decode(device):
    slots = ints([2, 0, 1, 3, 4, 4], device)  # two rows that only fill the batch
    last_token = ints([10, 11, 12, 13, 0], device)
    num_tokens = ints([1, 16, 17, 65, 1], device)  # slot 3 has outgrown its four pages
    page_table = ints([[5, 0, 0, 0], [6, 0, 0, 0], [7, 9, 0, 0], [1, 2, 3, 4], [0] * 4], device)
    tokens, positions, write = (torch.full((6,), -1, device=device).int() for _ in range(3))
    prepare_decode(slots, last_token, num_tokens, page_table, PAGE, tokens, positions, write)
    assert tokens.tolist() == [12, 10, 11, 13, 0, 0]
    assert positions.tolist() == [16, 0, 15, 64, 0, 0]
    assert write.tolist() == [9 * PAGE, 5 * PAGE, 6 * PAGE + 15, 0, 0, 0]


@pytest.mark.parametrize("num_rows", [1, 130, 1024])
def test_prepare_decode_of_many_rows(num_rows, device):
    num_slots, width = num_rows + 3, 9
    slots = torch.randperm(num_slots - 1)[:num_rows].int()
    last_token = torch.randint(0, 150_000, (num_slots,)).int()
    num_tokens = torch.randint(1, width * PAGE + 1, (num_slots,)).int()
    page_table = torch.randint(1, 10_000, (num_slots, width)).int()
    on_device = [x.to(device) for x in (slots, last_token, num_tokens, page_table)]
    outputs = [torch.full((num_rows,), -1, device=device).int() for _ in range(3)]
    prepare_decode(*on_device, PAGE, *outputs)
    slot = slots.long()
    position = num_tokens[slot] - 1
    assert torch.equal(outputs[0].cpu(), last_token[slot])
    assert torch.equal(outputs[1].cpu(), position)
    page = page_table[slot, position.long() // PAGE]
    assert torch.equal(outputs[2].cpu(), page * PAGE + position % PAGE)


@pytest.mark.parametrize("num_rows", [1, 40, 1500])
def test_finish_decode_over_several_steps(num_rows, device):
    num_slots, context, ring, num_steps = num_rows + 5, 4, 3, 5
    scratch = num_slots - 1
    num_tokens = torch.randint(1, 50, (num_slots,)).int()
    num_output = torch.randint(0, 3, (num_slots,)).int()
    state = [torch.full((num_slots,), -1).int(), num_tokens, num_output]
    history = torch.full((num_slots, context), -1).int()
    # The ring is wider than this batch: other batches are larger.
    out_tokens = torch.full((ring, num_rows + 2), -1).int()
    out_logprobs = torch.full((ring, num_rows + 2), torch.nan)
    on_device = [x.clone().to(device) for x in (*state, history, ints([0], "cpu"))]
    rings = [out_tokens.clone().to(device), out_logprobs.clone().to(device)]

    for step in range(num_steps):
        slots = torch.randperm(num_slots - 1)[:num_rows].int()
        if num_rows > 2:
            slots[-2:] = scratch
        tokens = torch.randint(0, 150_000, (num_rows,)).int()
        logprobs = -torch.rand(num_rows)
        rows = [x.to(device) for x in (slots, tokens, logprobs)]
        finish_decode(*rows, *on_device, *rings)
        out_tokens[step % ring, :num_rows] = tokens
        out_logprobs[step % ring, :num_rows] = logprobs
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if slot == scratch:
                continue
            state[0][slot] = token
            if num_output[slot] < context:
                history[slot, num_output[slot]] = token
            num_tokens[slot] += 1
            num_output[slot] += 1

    assert on_device[-1].item() == num_steps
    for found, expected in zip(on_device, (*state, history), strict=False):
        assert torch.equal(found.cpu(), expected)
    assert torch.equal(rings[0].cpu(), out_tokens)
    torch.testing.assert_close(rings[1].cpu(), out_logprobs, rtol=0, atol=0, equal_nan=True)


def test_finish_decode_takes_int64_tokens(device):
    last_token, num_tokens, num_output = (ints([0, 1], device) for _ in range(3))
    history = torch.zeros(2, 2, dtype=torch.int32, device=device)
    out_tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    out_logprobs = torch.zeros(1, 1, device=device)
    finish_decode(
        ints([0], device), torch.tensor([7], device=device), torch.tensor([-0.5], device=device),
        last_token, num_tokens, num_output, history, ints([0], device), out_tokens, out_logprobs,
    )  # fmt: skip
    assert (last_token.tolist(), history[0].tolist(), out_tokens.item()) == ([7, 1], [7, 0], 7)


@pytest.mark.gpu
def test_captured_steps_advance_on_every_replay(device):
    num_slots, ring = 33, 8
    slots = torch.arange(32, device=device).int()
    state = [torch.ones(num_slots, dtype=torch.int32, device=device) for _ in range(3)]
    history = torch.zeros(num_slots, 64, dtype=torch.int32, device=device)
    page_table = torch.ones(num_slots, 4, dtype=torch.int32, device=device)
    count = ints([0], device)
    out_tokens = torch.zeros(ring, 32, dtype=torch.int32, device=device)
    out_logprobs = torch.zeros(ring, 32, device=device)
    tokens, positions, write = (torch.zeros(32, dtype=torch.int32, device=device) for _ in "tpw")
    logprobs = torch.zeros(32, device=device)

    def step():
        prepare_decode(slots, state[0], state[1], page_table, PAGE, tokens, positions, write)
        token = tokens + 1
        finish_decode(slots, token, logprobs, *state, history, count, out_tokens, out_logprobs)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        graph.replay()
    assert count.item() == 21
    assert state[0].tolist() == [22] * 32 + [1]
    assert positions.tolist() == [20] * 32
    assert out_tokens[:, 0].tolist() == [18, 19, 20, 21, 22, 15, 16, 17]
