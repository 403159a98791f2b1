"""A tiny byte-level tokenizer: every text can be written, and any tokens may be invalid UTF-8.

Ids 0 to 3 are special, 4 to 259 the bytes, then a few merged pieces. With 320 as the model's
vocabulary there are also ids the tokenizer does not know, as in real models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320  # of a model for this tokenizer
PAD, EOS, IM_START, IM_END = range(4)
SPECIAL = ["<|pad|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = """
{%- if tools %}{{ '<|im_start|>tools' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>' }}{% endif %}
{%- if shout %}{{ 'LOUD' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'developer' %}{{ raise_exception('who is that') }}{% endif %}
{{- '<|im_start|>' + message.role + ' ' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}
"""


def byte_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("Ġt", "h"), ("h", "e"), ("S", "T"), ("ST", "O"), ("Ã", "¼")]
    pieces = [*SPECIAL, *letters, *(a + b for a, b in merges)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[EOS],
        chat_template=CHAT_TEMPLATE,
        **options,
    )


def write_byte_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(str(folder))
    return tokenizer
