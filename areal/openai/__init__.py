"""OpenAI's chat and completion API as plain dicts: requests in, replies and stream chunks out.

    call = parse_chat(body)                                  # or WireError, for error_body
    prompt_ids = chat_prompt_ids(tokenizer, call)
    ...                                                      # any engine: tokens and log-probs
    text = visible_text(tokenizer, token_ids, call.gconfig)
    reply = chat_reply(call, "chatcmpl-1", created, [Output(token_ids, logprobs, "stop", text)],
                       prompt_tokens=len(prompt_ids), tokenizer=tokenizer)

Pure translation: no HTTP, no torch, and not the `openai` package.
"""

from areal.openai.parsing.formats import TOOL_FORMATS, format_of_template
from areal.openai.parsing.parser import (
    REASONING_PARSERS,
    Content,
    Event,
    OutputParser,
    ParsedOutput,
    Reasoning,
    ToolCall,
    begins_in_reasoning,
    parse_output,
)
from areal.openai.prompts import chat_prompt_ids, chat_prompt_text
from areal.openai.replies import (
    Output,
    chat_chunk,
    chat_logprobs,
    chat_reply,
    completion_chunk,
    completion_logprobs,
    completion_reply,
    finish_reason,
    usage_chunk,
    usage_of,
)
from areal.openai.requests import (
    ChatCall,
    CompletionCall,
    WireError,
    error_body,
    parse_chat,
    parse_completion,
)
from areal.openai.text_stream import TextStream, token_text, visible_text

__all__ = [
    "REASONING_PARSERS",
    "TOOL_FORMATS",
    "ChatCall",
    "CompletionCall",
    "Content",
    "Event",
    "Output",
    "OutputParser",
    "ParsedOutput",
    "Reasoning",
    "TextStream",
    "ToolCall",
    "WireError",
    "begins_in_reasoning",
    "chat_chunk",
    "chat_logprobs",
    "chat_prompt_ids",
    "chat_prompt_text",
    "chat_reply",
    "completion_chunk",
    "completion_logprobs",
    "completion_reply",
    "error_body",
    "finish_reason",
    "format_of_template",
    "parse_chat",
    "parse_completion",
    "parse_output",
    "token_text",
    "usage_chunk",
    "usage_of",
    "visible_text",
]
