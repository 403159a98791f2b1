"""The tokens of an episode as they were said, and the trajectory they make.

Token in, token out: what was generated stays as it was sampled, and later text is put after it, so
every log-probability belongs to the token beside it.
"""

from __future__ import annotations

import numpy as np
import torch

from areal.api.io_struct import ModelResponse


class Transcript:
    """Grows by text the model reads and replies it writes; `ids` is the whole so far.

    transcript = Transcript(prompt_ids)
    transcript.add_reply(await generate(transcript.ids))
    transcript.add_text(feedback_ids)
    transcript.add_reply(await generate(transcript.ids))
    trajectory = transcript.trajectory(reward=1.0)
    """

    def __init__(self, prompt_ids: list[int]) -> None:
        self.ids: list[int] = []
        self.num_turns = 0
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._turn_ids: list[int] = []
        self._cut = False
        self.add_text(prompt_ids)

    def add_text(self, ids: list[int]) -> None:
        """Text the model did not write, so it is not trained on."""
        self.ids += ids
        self._logprobs += [0.0] * len(ids)
        self._versions += [-1] * len(ids)
        self._turn_ids += [-1] * len(ids)

    def add_reply(self, response: ModelResponse) -> None:
        """A reply to exactly the tokens so far."""
        assert len(response.input_tokens) == len(self.ids), "a reply to other tokens"
        self.ids += response.output_tokens
        self._logprobs += response.output_logprobs
        self._versions += response.output_versions
        self._turn_ids += [self.num_turns] * response.output_len
        self._cut = response.stop_reason == "length"
        self.num_turns += 1

    def trajectory(self, reward: float) -> dict[str, torch.Tensor]:
        """A batch of one, as `api/io_struct.py` says. `seq_no_eos` is that of the last reply."""
        turn_ids = _row(self._turn_ids, np.int32)
        return {
            "input_ids": _row(self.ids, np.int32),
            "attention_mask": torch.ones(turn_ids.shape, dtype=torch.bool),
            "loss_mask": (turn_ids >= 0).int(),
            "logprobs": _row(self._logprobs, np.float32),
            "versions": _row(self._versions, np.int32),
            "turn_ids": turn_ids,
            "rewards": torch.tensor([reward], dtype=torch.float32),
            "seq_no_eos": torch.tensor([self._cut]),
        }


def _row(values: list[float], dtype: type) -> torch.Tensor:
    # By way of numpy: five times faster than torch.tensor on a list of thousands.
    return torch.from_numpy(np.array([values], dtype))
