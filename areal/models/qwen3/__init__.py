"""The Qwen3 family, dense and of experts."""
