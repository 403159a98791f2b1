"""What MegatronEngine is made of: layout, model, weights, schedule, optimizer.

The only files that import megatron-core; this one says so when it is not there.
"""

import warnings

try:
    with warnings.catch_warnings():
        # Of packages that areal does without.
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("megatron"):
        raise
    raise ModuleNotFoundError(
        "backend megatron needs the package megatron-core: pip install areal[megatron]",
        name=error.name,
    ) from error
