"""FSDPEngine: training of transformers' models with FSDP2; engine, model and weights."""
