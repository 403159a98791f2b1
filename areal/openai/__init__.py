"""The APIs of OpenAI and Anthropic as plain dicts: requests in, replies and stream events out.

    call = requests.parse_chat(body)                         # or WireError, for error_body
    prompt_ids = prompts.chat_prompt_ids(tokenizer, call)
    ...                                                      # any engine: tokens and log-probs
    head = ReplyHead(body, call, "chatcmpl-1", created, [prompt_ids], tokenizer)
    reply = replies.chat_reply(Completion(head, [ChatOutput(token_ids, logprobs, "stop", parts)]))

`apis.CHAT_APIS` has OpenAI's chats and responses and Anthropic's messages, all as chats: requests
of the latter two are in *_requests.py, replies in *_replies.py.

Pure translation: no HTTP, no torch, and not the `openai` package.
"""
