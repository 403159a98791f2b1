"""A reward by a trained reward model, such as RWTrainer saves: its score of prompt and answer.

`reward_fn: reward_model` takes the model's folder from `reward_kwargs.options.path`; in a script
`RewardModel(path)` is a reward function itself. The text is tokenised as the reward model was
trained, with its own tokenizer and chat template, so the policy may have another vocabulary. Each
reward process loads the model once, with the first call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from areal.utils.model_files import read_hf_config
from areal.utils.tokenizer import Messages, chat_prompt_ids, load_hf_tokenizer, replies_ids


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Call it as a reward function: the score at the last token, which has no bounds.

    The prompt is the row's `messages`, where it has them, else the text of the prompt. An answer
    that was cut off is scored as if it had ended there.
    """

    path: str
    device: str = "cpu"

    def __call__(
        self,
        prompt: str,
        completions: str,
        prompt_ids: Any = None,
        completion_ids: Any = None,
        *,
        messages: Messages | None = None,
        **data: Any,
    ) -> float:
        scorer = _load(self.path, self.device)
        tokenizer = scorer.tokenizer
        if messages is None:
            begin = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        else:
            begin = chat_prompt_ids(messages, tokenizer)
        return scorer.score(begin + replies_ids([completions], tokenizer)[0])


class _Scorer:
    """A classifier of one label and its tokenizer."""

    def __init__(self, path: str, device: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        _check_is_scorer(path)
        self._device = torch.device(device)
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        model = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, trust_remote_code=False
        )
        self._model = model.to(self._device).eval()
        self.tokenizer = load_hf_tokenizer(path)

    def score(self, token_ids: list[int]) -> float:
        import torch

        ids_1T = torch.tensor([token_ids], device=self._device)
        with torch.inference_mode():
            # Not the classifier's own pooling: that looks for the last token that is no padding,
            # and the end token may be the padding token.
            hidden_1TD = self._model.base_model(ids_1T).last_hidden_state
            return self._model.score(hidden_1TD[:, -1]).float().item()


def _check_is_scorer(path: str) -> None:
    config = read_hf_config(path)
    kinds = config.get("architectures") or []
    is_classifier = any(kind.endswith("ForSequenceClassification") for kind in kinds)
    labels = len(config.get("id2label") or ("two", "by default"))
    if not is_classifier or labels != 1:
        raise ValueError(
            f"{path} is no reward model: its config.json has architectures {kinds} and {labels} "
            "labels; expected a sequence classifier of one label, which `trainer: rw` saves"
        )


@lru_cache(maxsize=4)
def _load(path: str, device: str) -> _Scorer:
    return _Scorer(path, device)


def reward_model_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    *,
    path: str = "",
    device: str = "cpu",
    **data: Any,
) -> float:
    """`RewardModel(path, device)`; both come from `reward_kwargs.options`."""
    if not path:
        raise ValueError(
            "reward_fn: reward_model: set workflow_kwargs.reward_kwargs.options.path to the folder "
            "of a reward model"
        )
    return RewardModel(path, device)(prompt, completions, prompt_ids, completion_ids, **data)
