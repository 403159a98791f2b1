"""Public import of `RemoteSGLangEngine`, which stands above the engines: it runs episodes too."""

from areal.rollout.remote_engines import RemoteSGLangEngine

__all__ = ["RemoteSGLangEngine"]
