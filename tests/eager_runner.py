"""The CUDA runner less streams and graphs: the device program, one kernel after another."""

from __future__ import annotations

import numpy as np
import torch

from areal.engine.native.cuda.program import DeviceProgram
from areal.engine.native.runner import Computed


class Outputs:
    def __init__(self, tokens_KR: torch.Tensor, logprobs_KR: torch.Tensor) -> None:
        self._tokens, self._logprobs = tokens_KR.T.tolist(), logprobs_KR.T.tolist()

    def read(self):
        return self._tokens, self._logprobs


class EagerRunner:
    """In place of `make_runner`'s."""

    steps_per_launch = 3
    launches_ahead = 1
    max_prefill_tokens = 20
    shared_launches = 0

    def __init__(self, model, table, adapters, *, max_prefill_tokens, num_states, **program):
        self._model = model
        options = {"max_rows": len(table.num_tokens), "num_states": num_states, **program}
        self._program = DeviceProgram(model, table, adapters, **options)
        self.adapted_weights = self._program.adapters.weights

    def look(self, images):
        return self._model.look(images)

    def prefill(self, chunks):
        return self._program.prefill(chunks)

    def draw(self, slots, hidden):
        self._program.update(slots)
        program = self._program
        outputs = program.new_outputs(1, len(slots))
        program.begin()
        program.draw(program.slots.upload(slots.astype(np.int32)), torch.stack(hidden), *outputs)
        return Outputs(*outputs)

    def decode(self, slots, num_steps):
        program = self._program
        adapted = program.update(slots)
        padded = np.append(slots, program.slots.scratch).astype(np.int32)  # one row of padding
        outputs = program.new_outputs(num_steps, len(padded))
        shared, plan = None, program.share_prompts(slots, len(padded))
        if plan is not None:
            shared = program.new_shared(len(padded))
            shared.flat.copy_(torch.from_numpy(plan))
        self.shared_launches += plan is not None
        program.begin()
        for _ in range(num_steps):
            program.step(program.slots.upload(padded), *outputs, shared, adapted=adapted)
        return Outputs(*(x[:, : len(slots)] for x in outputs))

    def draft_length(self, num_rows):
        return 3 if num_rows <= 4 and self._model.args.delta is None else 0

    def draft_cost(self, slots, length):
        return 1.1

    def verify(self, slots, drafts):
        program = self._program
        adapted = program.update(slots)
        rows = np.full((len(slots) + 1, 4), -1, np.int32)  # one row of padding
        rows[:, 0] = [*slots, program.slots.scratch]
        for row, draft in zip(rows, drafts, strict=False):
            row[1 : 1 + len(draft)] = draft
        tokens, logprobs = program.new_outputs(*rows.shape)
        slot_B, drafts_BL = program.slots.upload(rows).split([1, 3], dim=1)
        count_B = torch.zeros_like(slot_B[:, 0])
        program.verify(slot_B[:, 0], drafts_BL, tokens, logprobs, count_B, adapted=adapted)
        counts = count_B.tolist()[: len(slots)]
        return Computed(
            [row[:count] for row, count in zip(tokens.tolist(), counts, strict=False)],
            [row[:count] for row, count in zip(logprobs.tolist(), counts, strict=False)],
        )

    def copy_pages(self, sources, targets):
        self._program.copy_pages(sources, targets)

    def copy_states(self, sources, targets):
        self._program.copy_states(sources, targets)

    def routed_experts(self, pages, num_tokens):
        return self._program.routed_experts(pages, num_tokens)

    def load(self, weights):
        for name, tensor in weights:
            self._model.load_hf_tensor(name, tensor)
