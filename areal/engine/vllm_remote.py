"""Public import of `RemotevLLMEngine`, which stands above the engines: it runs episodes too."""

from areal.rollout.remote_engines import RemotevLLMEngine

__all__ = ["RemotevLLMEngine"]
