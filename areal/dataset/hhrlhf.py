"""HH-RLHF: two replies of an assistant to the same dialogue, one preferred by people.

`path` is the bare name `hh-rlhf` (the hub's Anthropic/hh-rlhf), another hub name, a folder with
`{split}.jsonl` files, or one such file. Columns: chosen, rejected; each a whole dialogue as one
text, whose turns start with a blank line and `Human:` or `Assistant:`.
"""

from __future__ import annotations

import re
from typing import Any

from areal.dataset.chat_rows import Rows, pair_rows
from areal.dataset.source_files import read_rows
from areal.utils import logging
from areal.utils.tokenizer import Messages

logger = logging.getLogger("Dataset")

HUB_NAME = "Anthropic/hh-rlhf"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def get_hhrlhf_rw_dataset(
    path: str, split: str, tokenizer: Any, max_length: int | None = None
) -> Rows:
    """{"chosen_ids", "rejected_ids", "prompt_len"}, for reward models and for DPO."""
    source = HUB_NAME if path == "hh-rlhf" else path
    rows = read_rows(source, split=split, columns=("chosen", "rejected"))
    pairs = [pair for row in rows if (pair := read_pair(row["chosen"], row["rejected"]))]
    if len(pairs) < len(rows):
        unpaired = len(rows) - len(pairs)
        logger.warning(
            "left out %d of %d rows: not two replies to one dialogue", unpaired, len(rows)
        )
    return pair_rows(pairs, tokenizer, max_length)


get_hhrlhf_dpo_dataset = get_hhrlhf_rw_dataset  # DPO learns from the same pairs


def read_pair(chosen: str, rejected: str) -> tuple[Messages, str, str] | None:
    """(dialogue, preferred reply, other reply); None if the texts are not such a pair.

    A few rows of the data set end with a human turn, or differ before the last reply.
    """
    better, worse = read_dialogue(chosen), read_dialogue(rejected)
    for dialogue in (better, worse):
        if len(dialogue) < 2 or dialogue[-1]["role"] != "assistant":
            return None
    if better[:-1] != worse[:-1] or better[-1] == worse[-1]:
        return None
    return better[:-1], better[-1]["content"], worse[-1]["content"]


def read_dialogue(text: str) -> Messages:
    """The turns of a dialogue; text before the first one is dropped."""
    _, *parts = _TURN.split("\n\n" + text.lstrip("\n"))
    return [
        {"role": _ROLES[speaker], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]
