"""Engines built from a config and connected to servers by address, for scripts.

    rollout = RemoteSGLangEngine(config.rollout)
    rollout.initialize(addr="127.0.0.1:30000")        # or AREAL_LLM_SERVER_ADDRS, or launch_server
    batch = rollout.prepare_batch(dataloader, workflow=workflow, should_accept_fn=keep)

Each is a `RolloutController` over a client of its servers. Servers must answer as those that
`launch_server` starts: with the token in AREAL_SERVER_TOKEN, if they want one, and for vLLM under
the model name `areal`, in its development mode (`VLLM_SERVER_DEV_MODE=1`).
"""

from __future__ import annotations

import os
import secrets
from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal.api.config.inference import InferenceEngineConfig
from areal.api.io_struct import LocalInfServerInfo
from areal.api.redact import remember_secret
from areal.api.scratch import ScratchFolder
from areal.engine.remote import sglang, vllm
from areal.engine.remote.engine import RemoteEngine
from areal.engine.remote.protocol import ServerProtocol
from areal.engine.remote.server_control import ControlClient
from areal.engine.remote.sglang import SGLangProtocol, launch_sglang_server
from areal.engine.remote.vllm import VLLMProtocol, launch_vllm_server
from areal.rollout.controller import RolloutController
from areal.utils.hub import model_folder
from areal.utils.server_envs import find_interpreter

ADDRESSES = "AREAL_LLM_SERVER_ADDRS"
TOKEN = "AREAL_SERVER_TOKEN"


class RemoteServersEngine(RolloutController):
    """What the engines below share. `seed` determines the samples."""

    kind: str  # of the environment: `areal env create KIND`
    model_key: str  # of the model in `server_args`

    def __init__(self, config: InferenceEngineConfig, *, seed: int = 1) -> None:
        super().__init__(None, config, seed=seed)
        self._token = os.environ.get(TOKEN, "")
        self._launched: list[LocalInfServerInfo] = []
        self._ending = ExitStack()  # ends the launched servers

    @abstractmethod
    def _protocol(self, model: Path) -> ServerProtocol: ...

    @abstractmethod
    def _model_of(self, control: ControlClient) -> str:
        """The model that a server was started with."""

    @abstractmethod
    def _launch(self, model_path: str, **options: Any) -> tuple[Any, str]:
        """(the child, its "host:port")."""

    def initialize(
        self,
        engine_id: str | None = None,
        addr: str | list[str] | None = None,
        train_data_parallel_size: int | None = None,
    ) -> None:
        """Connect to `addr`, else to the servers of `launch_server`, else to those named in
        AREAL_LLM_SERVER_ADDRS ("host:port,host:port").

        `engine_id` names the client in its error messages. With `train_data_parallel_size`, that
        many processes have such a client, and each takes its share of a batch.
        """
        if self.initialized:
            return
        if train_data_parallel_size is not None:
            self._config = _share(self._config, train_data_parallel_size)
        addresses = self._addresses(addr)
        timeout_s = self._config.setup_timeout
        control = ControlClient(addresses[0], self._token, timeout_s=timeout_s, kind=self.kind)
        control.wait_until_healthy(timeout_s)
        self._engine = RemoteEngine(
            self._protocol(model_folder(self._model_of(control), weights=False)),
            addresses,
            self._token,
            request_timeout_s=self._config.request_timeout,
            request_retries=self._config.request_retries,
            setup_timeout_s=timeout_s,
        )
        try:
            super().initialize()
        except RuntimeError as error:
            if engine_id is not None:
                error.add_note(f"engine {engine_id}")
            raise

    def destroy(self) -> None:
        """Also ends the servers of `launch_server`."""
        super().destroy()
        self.teardown_server()

    def launch_server(self, server_args: dict[str, Any]) -> LocalInfServerInfo:
        """Start a server on this machine. `server_args` has the model and options of
        `launch_sglang_server` or `launch_vllm_server`; `python` is by default that of
        `areal env create`."""
        options = dict(server_args)
        if self.model_key not in options:
            raise ValueError(f"server_args: {self.model_key} must name the model")
        python = find_interpreter(self.kind, options.pop("python", ""))
        if not self._launched:
            self._token = secrets.token_urlsafe(32)
            remember_secret(self._token)
        model = str(model_folder(options.pop(self.model_key)))
        try:
            child, address = self._launch(model, python=python, token=self._token, **options)
        except TypeError as error:
            raise ValueError(f"server_args: {error}") from error
        self._ending.callback(child.terminate)
        host, _, port = address.rpartition(":")
        self._launched.append(LocalInfServerInfo(host, int(port), child))
        return self._launched[-1]

    def teardown_server(self) -> None:
        """End the servers of `launch_server`. Idempotent."""
        self._launched.clear()
        self._ending.close()

    def _addresses(self, addr: str | list[str] | None) -> list[str]:
        given = [addr] if isinstance(addr, str) else list(addr or [])
        launched = [f"{server.host}:{server.port}" for server in self._launched]
        found = given or launched or os.environ.get(ADDRESSES, "").split(",")
        found = [address.strip() for address in found if address.strip()]
        if not found:
            raise ValueError(
                f"addr: no server is known; give addr='host:port', call launch_server, or set "
                f"{ADDRESSES}"
            )
        return found


class RemoteSGLangEngine(RemoteServersEngine):
    """Episodes on SGLang servers."""

    kind, model_key = "sglang", "model_path"

    def _protocol(self, model: Path) -> ServerProtocol:
        return SGLangProtocol(model)

    def _model_of(self, control: ControlClient) -> str:
        return sglang.model_of(control)

    def _launch(self, model_path: str, **options: Any) -> tuple[Any, str]:
        return launch_sglang_server(model_path, **options)


class RemotevLLMEngine(RemoteServersEngine):
    """Episodes on vLLM servers."""

    kind, model_key = "vllm", "model"

    def _protocol(self, model: Path) -> ServerProtocol:
        return VLLMProtocol(model)

    def _model_of(self, control: ControlClient) -> str:
        return vllm.model_of(control)

    def _launch(self, model_path: str, **options: Any) -> tuple[Any, str]:
        scratch = self._ending.enter_context(ScratchFolder("vllm"))
        return launch_vllm_server(model_path, scratch=scratch, **options)


def _share(config: InferenceEngineConfig, num_ranks: int) -> InferenceEngineConfig:
    """The share of one of `num_ranks` clients."""
    batch, most = config.consumer_batch_size, config.max_concurrent_rollouts
    if batch is not None and batch % num_ranks:
        raise ValueError(
            f"train_data_parallel_size: {num_ranks} ranks cannot share "
            f"rollout.consumer_batch_size={batch} equally"
        )
    return replace(
        config,
        consumer_batch_size=None if batch is None else batch // num_ranks,
        max_concurrent_rollouts=None if most is None else max(1, most // num_ranks),
    )
