"""The Gemma 3 family, text only."""
