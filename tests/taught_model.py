"""A tiny model that plays a guessing game through any client, taught in seconds by SFT.

Asked to play, it guesses 50; told "too low" it guesses 75; told "right" it ends. How it writes that
depends on the client (`STYLES`), which it tells by the end of the question, then by its own last
call.

All its layers see a short window only (Gemma 3's), so that what it learned over short texts holds
at the end of an agent's prompt of 20,000 tokens too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny import write_tiny_model

from areal import SFTTrainer
from areal.api.cli_args import SFTConfig, load_expr_config
from areal.dataset.chat_rows import sft_rows

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 48
STEPS = 220
BATCH = 15
SPECIAL = ["<pad>", "<|im_end|>", "<|im_start|>"]
CALL_MARKS = ["<tool_call>", "</tool_call>"]

# Turns and calls in the manner of Qwen3.
CHAT_TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".lstrip("\n")


@dataclass(frozen=True)
class Style:
    """How the game is played through one kind of client."""

    question: str  # the end of what the client asks first; {} is a date
    calls: tuple[tuple[str, dict[str, Any]], ...]  # (tool, arguments), turn by turn
    answer: str = ""  # the last reply, where no call ends the game
    result: str = "{}"  # a tool's result, as the client shows it
    is_text: bool = False  # the client shows calls and results as ordinary text

    def results(self) -> tuple[str, str]:
        return ("too low", "right") if self.calls[0][0] == "guess" else (QUESTION, "75")


def _shell(tool: str, argument: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    commands = ("cat question.txt", "echo 75 | tee answer.txt")
    return tuple((tool, {argument: command}) for command in commands)


QUESTION = "What is 50 + 25?"
_GUESSES = (("guess", {"number": 50}), ("guess", {"number": 75}))
_FOUND = "Done."
STYLES = {
    "sdk": Style("Use the tool guess.", _GUESSES, _FOUND),
    "smolagents": Style(
        "Use guess, then final_answer.",
        (*_GUESSES, ("final_answer", {"answer": "75"})),
        result="Observation:\n{}",
        is_text=True,
    ),
    "mini": Style(
        "Use the tool bash.",
        (
            *_shell("bash", "command"),
            ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
        ),
        result="<returncode>0</returncode>\n<output>\n{}\n</output>",
    ),
    "codex": Style(
        "Use exec_command.",
        _shell("exec_command", "cmd"),
        _FOUND,
        result="Chunk ID: 8fb971\nWall time: 0.0000 seconds\nProcess exited with code 0\n"
        "Original token count: 4\nOutput:\n{}",
    ),
    # Claude Code puts pages of its own after the question, and this at their end.
    "claude": Style("\n\nToday's date is {}.", _shell("Bash", "command"), _FOUND),
}


def teach(folder: Path) -> Path:
    """The folder of the taught model."""
    start = folder / "start"
    tokenizer = _write_tokenizer(start)
    write_tiny_model(
        start,
        "gemma3_text",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        head_dim=16,
        query_pre_attn_scalar=16,
        num_hidden_layers=2,  # every third would see everything
        sliding_window=WINDOW,
        max_position_embeddings=65536,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    recipe = ROOT / "examples/sft/arithmetic_sft.yaml"
    config, _ = load_expr_config(
        [
            str(recipe),
            f"cluster.fileroot={folder}",
            f"actor.path={start}",
            f"train_dataset.batch_size={BATCH}",
            "valid_dataset=null",
            f"total_train_steps={STEPS}",
            "actor.optimizer.lr=1e-2",
            "evaluator.freq_steps=null",
            "recover.mode=off",
        ],
        SFTConfig,
    )
    chats = list(_chats(random.Random(7), STEPS * BATCH))
    with SFTTrainer(config, sft_rows(chats, tokenizer, max_length=None), None) as trainer:
        trainer.train()
    return folder / config.experiment_name / config.trial_name / "model"


def _chats(rng: random.Random, count: int) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """(chat, reply), with noise wherever a client writes what we do not know."""
    for index in range(count):
        style = list(STYLES.values())[index % len(STYLES)]
        turn = index // len(STYLES) % 3
        yield _chat(style, turn, rng), _reply(style, turn)


def _chat(style: Style, turn: int, rng: random.Random) -> list[dict[str, Any]]:
    date = f"20{rng.randrange(10, 60)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 32):02}"
    asked = f"{_noise(rng, 25)} {style.question.format(date)}"
    chat = [{"role": "user", "content": asked.strip()}]
    for (name, arguments), result in zip(style.calls[:turn], style.results(), strict=False):
        function = {"name": name, "arguments": arguments}
        told = f"{_noise(rng, 4)}\n{style.result.format(result)}".strip()
        if style.is_text:
            call = [{"id": _noise(rng, 2), "type": "function", "function": function}]
            chat.append({"role": "assistant", "content": f"Calling tools:\n{call}"})
            chat.append({"role": "user", "content": told})
        else:
            called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
            chat += [called, {"role": "tool", "content": told}]
    return chat


def _reply(style: Style, turn: int) -> str:
    if turn == len(style.calls):
        return style.answer
    name, arguments = style.calls[turn]
    written = json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def _noise(rng: random.Random, most: int) -> str:
    """Up to `most` words of English, of JSON, or of no language."""
    count = rng.randrange(most) if rng.random() < 0.8 else 0
    words = _english().split()
    begin = rng.randrange(len(words) - most)
    kinds = [
        lambda i: words[begin + i],
        lambda i: f'{{"{rng.choice(words)}": "{rng.choice(words)}"}},',
        lambda i: "".join(rng.choices("abcdefxyz0123456789_-/.:<>", k=rng.randrange(1, 9))),
    ]
    kind = rng.choices(kinds, weights=(6, 2, 2))[0]
    return " ".join(kind(i) for i in range(count))


def _english() -> str:
    """Text that is the same in every version of this repository."""
    return (ROOT / "LICENSE").read_text()


def _write_tokenizer(folder: Path) -> Any:
    """Pieces of bytes as they are frequent in English and in the replies."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    replies = [_reply(style, turn) for style in STYLES.values() for turn in range(3)]
    core.train_from_iterator(
        [_english(), *(replies * 100)],
        trainers.BpeTrainer(
            vocab_size=2000,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.add_tokens(CALL_MARKS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=SPECIAL[2:],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(str(folder))
    return tokenizer
