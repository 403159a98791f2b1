"""The Qwen3 (dense) family."""
