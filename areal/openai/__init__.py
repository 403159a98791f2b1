"""OpenAI's chat and completion API as plain dicts: requests in, replies and stream chunks out.

    call = requests.parse_chat(body)                         # or WireError, for error_body
    prompt_ids = prompts.chat_prompt_ids(tokenizer, call)
    ...                                                      # any engine: tokens and log-probs
    text = text_stream.visible_text(tokenizer, token_ids, call.gconfig)
    reply = replies.chat_reply(
        call, "chatcmpl-1", created, [Output(token_ids, logprobs, "stop", text)],
        prompt_tokens=len(prompt_ids), tokenizer=tokenizer,
    )

Pure translation: no HTTP, no torch, and not the `openai` package.
"""
