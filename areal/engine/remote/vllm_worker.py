"""Worker extension of a stock vLLM server for broadcasts of weights.

    python -m vllm.entrypoints.openai.api_server \\
        --worker-extension-cls areal.engine.remote.vllm_worker.WeightReceiver

vLLM adds the class to the bases of its worker, in every rank's process; POST /collective_rpc calls
its methods on all of them. It runs in the server's environment, so it may import only torch and
modules of areal that need no more than torch. Names start with `areal` to avoid collisions with
those of the worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from areal.utils.device import device_identity
from areal.weight_sync.collective import GroupError, GroupPlace, WeightGroup
from areal.weight_sync.tied_head import LM_HEAD, embedding_for_head

if TYPE_CHECKING:
    import torch


class WeightReceiver:
    _areal_group: WeightGroup | None = None

    if TYPE_CHECKING:  # attributes of vLLM's worker
        rank: int  # among the processes of its server
        device: torch.device

        def reload_weights(
            self, *, weights_iterator: Iterable[tuple[str, torch.Tensor]]
        ) -> None: ...

    def areal_device(self) -> str:
        """Identity of the device that holds its weights."""
        return device_identity(self.device)

    def areal_join(self, **place: Any) -> None:
        """Join a group, leaving the previous one; returns when all pool have joined.

        `place` is the `GroupPlace` of the server's first worker.
        """
        self._areal_leave()
        own = GroupPlace(**{**place, "rank": place["rank"] + self.rank})
        self._areal_group = WeightGroup.open(own, self.device)

    def areal_take(self, *, group: str, version: int, with_lm_head: bool) -> None:
        """Receive and verify all of a version, then load it. Until then the old weights stay.

        with_lm_head: the model has a separate head even if the received weights have none.
        """
        weights = self._areal_receive(group, version)
        if with_lm_head and LM_HEAD not in weights:
            weights[LM_HEAD] = weights[embedding_for_head(weights, where=f"version {version}")]
        self.reload_weights(weights_iterator=iter(weights.items()))

    def _areal_receive(self, group: str, version: int) -> dict[str, torch.Tensor]:
        joined = self._areal_group
        if joined is None or joined.place.name != group:
            here = "none" if joined is None else joined.place.name
            raise GroupError(
                f"the weights come through the group {group}, this worker is in {here}"
            )
        try:
            return dict(joined.receive(version))
        except BaseException:  # leftover transfers would mix with the next version
            self._areal_leave()
            raise

    def _areal_leave(self) -> None:
        if self._areal_group is not None:
            self._areal_group.close()
            self._areal_group = None
