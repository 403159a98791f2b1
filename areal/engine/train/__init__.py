"""Training engines: archon (our own models), fsdp (transformers) and megatron."""
