"""The APIs of OpenAI and Anthropic as plain dicts: requests in, replies and stream events out.

    call = requests.parse_chat(body)                         # or WireError, for error_body
    prompt_ids = prompts.chat_prompt_ids(tokenizer, call)
    ...                                                      # any engine: tokens and log-probs
    text = text_stream.visible_text(tokenizer, token_ids, call.gconfig)
    reply = replies.chat_reply(
        call, "chatcmpl-1", created, [Output(token_ids, logprobs, "stop", text)],
        prompt_tokens=len(prompt_ids), tokenizer=tokenizer,
    )

`apis.CHAT_APIS` has OpenAI's chats and responses and Anthropic's messages, all as chats: requests
of the latter two are in *_requests.py, replies in *_replies.py.

Pure translation: no HTTP, no torch, and not the `openai` package.
"""
