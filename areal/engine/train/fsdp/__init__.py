"""Parts of FSDPEngine: packed attention, the model around a Hugging Face one, weights, sharding."""
