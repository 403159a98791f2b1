"""MegatronEngine: engine, layout, model, weights and optimizer on megatron-core.

The only files that import megatron-core; importing this one reports a missing installation.
"""

import warnings

try:
    with warnings.catch_warnings():
        # About optional packages that areal does not need.
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*")
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401 (is it there?)
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("megatron"):
        raise
    raise ModuleNotFoundError(
        "backend megatron needs the package megatron-core: pip install areal[megatron]",
        name=error.name,
    ) from error
