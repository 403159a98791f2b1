"""Names of Qwen2's weights: the dense table and the biases of query, key and value."""

from __future__ import annotations

from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)


class Qwen2StateDictAdapter(StateDictAdapter):
    from_hf_map = {**DENSE_FROM_HF, **QKV_BIAS_FROM_HF}
