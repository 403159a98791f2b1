"""Rows for the warm start of a tiny model, from dialogues: replies are learned, the rest is read.

rows_of([["guess 1-7:", "4", "higher:", "6"]], tokenizer)      # learns "4" and "6"

For tokenizers whose chat template is the bare text of the messages, as that of `areal demo`. Then a
row has the very tokens of an episode by `workflow: env`: each reply ends with the end token.
"""

from __future__ import annotations

from areal.dataset.chat_rows import Rows


def rows_of(dialogues, tokenizer) -> Rows:
    """{"input_ids", "loss_mask"} of each dialogue: observation, reply, observation, reply, ..."""
    rows = Rows()
    for turns in dialogues:
        ids, mask = [], []
        for number, text in enumerate(turns):
            is_reply = number % 2 == 1
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens += [tokenizer.eos_token_id] * is_reply
            ids += tokens
            mask += [int(is_reply)] * len(tokens)
        rows.append({"input_ids": ids, "loss_mask": mask})
    return rows
