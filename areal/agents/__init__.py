"""Agents that call the model over HTTP, as they would call OpenAI or Anthropic.

`workflow` runs an agent as a RolloutWorkflow; `proxy` is the server it calls, `session` the record
of one episode, `completions` turns a request into tokens and tokens into a reply, which leaves
whole or as events (`streams`).
"""
