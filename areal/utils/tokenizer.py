"""Tokenizers: load one from a folder or hub name, and turn a chat into prompt tokens.

`chat_prompt_ids` is the only conversion of prompts to tokens: rollouts and supervised rows both use
it, so a warm start and the RL that follows see the same text.
"""

from __future__ import annotations

from typing import Any

from areal.utils.chat_template import render_chats, warm_up
from areal.utils.hub import model_folder

Messages = list[dict[str, Any]]


def load_hf_tokenizer(path: str) -> Any:
    """A Hugging Face tokenizer with a chat template, a pad token and an end token."""
    warm_up()
    folder = model_folder(path, key="tokenizer_path", weights=False)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"tokenizer folder {path} does not exist; check tokenizer_path (a hub name is org/name)"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the tokenizer at {path!r} brings code of its own, which areal does not run; load "
                "it in a script that you trust, save it as tokenizer.json, and use that folder"
            ) from None
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"no tokenizer at {path!r}: {first_line} (expected tokenizer.json and "
            "tokenizer_config.json)"
        ) from error
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer at {path!r} has no chat template; take the instruct version of the "
            "model, or put a chat_template.jinja beside its tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer at {path!r} has no end token; set eos_token in its config")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def chat_prompt_ids(
    messages: Messages, tokenizer: Any, *, enable_thinking: bool = False
) -> list[int]:
    """Token ids of `messages` followed by the header of the assistant's turn."""
    return chat_prompts_ids([messages], tokenizer, enable_thinking=enable_thinking)[0]


def chat_prompts_ids(
    chats: list[Messages], tokenizer: Any, *, enable_thinking: bool = False
) -> list[list[int]]:
    """`chat_prompt_ids` of many chats, several times faster than one by one."""
    texts = render_chats(tokenizer, chats, variables={"enable_thinking": enable_thinking})
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def replies_ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of the assistant's `texts`, each with the end token."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [[*ids, tokenizer.eos_token_id] for ids in encoded]
