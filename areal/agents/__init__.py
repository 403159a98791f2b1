"""Agents that talk to the model over HTTP, as they would to OpenAI or Anthropic.

`workflow` runs an agent as a RolloutWorkflow; `proxy` is the server it talks to, `session` what it
said in one episode, `completions` how a call becomes tokens and tokens a reply.
"""
