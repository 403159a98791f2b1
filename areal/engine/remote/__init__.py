"""Inference over HTTP: clients, server pool and the protocols of native, vLLM and SGLang."""
