"""Backend of vLLM's weight-transfer API for broadcasts of weights, in the workers of a server.

    python -m vllm.entrypoints.openai.api_server \\
        --worker-extension-cls areal.engine.remote.vllm_worker.WorkerDevice \\
        --weight-transfer-config '{"backend": "areal"}'

    POST /init_weight_transfer_engine   a place in a group      every worker joins it
    POST /start_weight_update
    POST /update_weights                group and version       received, verified, loaded
    POST /finish_weight_update          the version             from now on told by /weight_info

vLLM imports the extension's module in every worker's process before it makes the transfer engine:
that registers `areal` beside vLLM's own backends, which need NCCL, know no checksums and load each
tensor as it arrives. Here the old weights stay until all of a version has arrived and is verified.
It runs in the server's environment, so besides vLLM it may import only torch and modules of areal
that need no more than torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory

from areal.utils.device import device_identity
from areal.weight_sync.collective import GroupError, GroupPlace, WeightGroup
from areal.weight_sync.tied_head import LM_HEAD, embedding_for_head


class WorkerDevice:
    """Added to the bases of vLLM's worker; POST /collective_rpc calls it on all of them. The name
    starts with `areal` to avoid collisions with those of the worker."""

    if TYPE_CHECKING:  # attribute of vLLM's worker
        device: torch.device

    def areal_device(self) -> str:
        """Identity of the device that holds its weights."""
        return device_identity(self.device)


@dataclass(frozen=True, slots=True)
class Update:
    """What a server is told of a version that is about to be sent."""

    group: str
    version: int
    with_lm_head: bool  # the model has a separate head even if the sent weights have none


class GroupEngine(WeightTransferEngine[GroupPlace, Update]):
    """One worker's end of a `WeightGroup`."""

    init_info_cls = GroupPlace
    update_info_cls = Update
    supports_draft_weight_update = False  # the trainer has no draft model

    if TYPE_CHECKING:  # set by vLLM's constructor
        device: torch.device
        model: torch.nn.Module
        model_config: Any
        parallel_config: Any

        def parse_update_info(self, update_dict: dict[str, Any]) -> Update: ...

    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: GroupPlace) -> None:
        """Join a group, leaving the previous one; returns when all members have joined.

        `init_info` is the place of the server's first worker."""
        self.shutdown()
        parallel = self.parallel_config
        number = parallel.data_parallel_index * parallel.world_size + parallel.rank
        own = replace(init_info, rank=init_info.rank + number)
        self._group = WeightGroup.open(own, self.device)

    def start_weight_update(self) -> None:
        """Nothing is touched before a version has arrived."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # as vLLM's own, which needs an accelerator for it
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Receive and verify all of a version, then load it. Until then the old weights stay."""
        weights = self._receive(update_info.group, update_info.version)
        if update_info.with_lm_head and LM_HEAD not in weights:
            where = f"version {update_info.version}"
            weights[LM_HEAD] = weights[embedding_for_head(weights, where=where)]
        self._load(weights)

    def _load(self, weights: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import (  # late: the whole of vLLM's models
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        load: Any = self.model.load_weights
        initialize_layerwise_reload(self.model)
        load(weights.items())
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Loaded already."""

    def _receive(self, group: str, version: int) -> dict[str, torch.Tensor]:
        joined = self._group
        if joined is None or joined.place.name != group:
            here = "none" if joined is None else joined.place.name
            raise GroupError(
                f"the weights come through the group {group}, this worker is in {here}"
            )
        try:
            return dict(joined.receive(version))
        except BaseException:  # leftover transfers would mix with the next version
            self._leave(joined)
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._leave(self._group)

    def _leave(self, group: WeightGroup) -> None:
        """`group` may not be the current one: an update may fail after the next group was joined,
        which then stays."""
        group.close()
        if self._group is group:
            self._group = None


WeightTransferEngineFactory.register_engine("areal", GroupEngine)
