"""`areal serve --model FOLDER_OR_HUB_NAME`: the native inference engine behind HTTP.

`areal serve join RUN`, `leave` and `list` are about the servers of a living run (serve_fleet.py).

Once it accepts requests it prints one line of JSON on stdout, {"host", "port", "pid"}, from which a
parent reads the port of `--port 0`. The token is never printed there. areal's own launcher passes
it in the environment, because other users can read command lines.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

from areal.cli import serve_fleet
from areal.cli.serve_fleet import TOKEN_VARIABLE

if TYPE_CHECKING:
    from areal.engine.native.engine import NativeEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves a model with the native inference engine: /generate takes token ids, "
        "/v1/chat/completions, /v1/responses, /v1/completions and /v1/models speak OpenAI's API, "
        "/v1/messages speaks Anthropic's. "
        "docs/native_server.md shows every route."
    )
    serve_fleet.add_actions(parser)
    parser.add_argument("--model", help="folder or hub name of a model; needed to serve one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0: a free port")
    parser.add_argument(
        "--token", help=f"bearer token of clients; default: ${TOKEN_VARIABLE}, else a random one"
    )
    parser.add_argument("--max-running", type=int, default=512, help="most requests in one step")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per cache page")
    parser.add_argument("--num-pages", type=int, help="cache pages; default: as the model needs")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests without one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "fp8"])
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda, cuda:1 ..., or best: a GPU if there is one"
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="on CUDA: results do not depend on the batch, bit for bit; slower",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="shard the model over N processes of this machine, one device each",
    )
    parser.add_argument(
        "--image-folder",
        action="append",
        default=[],
        metavar="DIR",
        help="read images that requests name as file:// URLs below DIR; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    if args.action is not None:
        return serve_fleet.run(args)
    _check(args)
    token = _token(args)
    from areal.utils.startup import importing

    with importing():
        from areal.engine.native.loop import EngineLoop
        from areal.engine.native.server import create_app
        from areal.utils import perf_tracer, stacks
        from areal.utils.addresses import bind
        from areal.utils.http_server import serve

    stacks.listen()
    # Bind before loading the model, so that a port in use fails at once.
    listener = bind(args.host, args.port)
    with (
        listener,
        serve_fleet.orderly_end(),
        _engine(args, folder := _folder(args.model)) as engine,
    ):
        loop = EngineLoop(engine)
        host, port = listener.getsockname()[:2]
        perf_tracer.start_below(f"server {host}:{port}, process")
        ready = json.dumps({"host": host, "port": port, "pid": os.getpid()})
        app = create_app(
            loop, token, model=args.model, folder=folder, image_folders=args.image_folder
        )
        try:
            serve(app, listener, on_ready=lambda: print(ready, flush=True))
        finally:
            loop.close()
            app.state.weights.close()
    return 0


def _token(args: argparse.Namespace) -> str:
    token = args.token or os.environ.get(TOKEN_VARIABLE)
    if token:
        return token
    if not _is_loopback(args.host):
        raise ValueError(
            f"--host {args.host} is reachable by others: give the server a token, "
            f"by ${TOKEN_VARIABLE} or --token"
        )
    token = secrets.token_urlsafe(24)
    print(f"clients must send 'Authorization: Bearer {token}'", file=sys.stderr)
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _folder(model: str) -> Path:
    from areal.utils.hub import model_folder

    return model_folder(model, key="--model")


def _check(args: argparse.Namespace) -> None:
    from areal.utils.hub import hub_name

    if args.model is None:
        raise ValueError("--model is needed: the folder or hub name of the model to serve")
    if hub_name(args.model) is None and not (Path(args.model) / "config.json").is_file():
        raise FileNotFoundError(
            f"--model {args.model}: expected the folder of a Hugging Face model, with config.json, "
            "or a hub name like org/name"
        )
    for folder in args.image_folder:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"--image-folder {folder}: expected a folder")
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port must lie between 0 and 65535, got {args.port}")
    if args.tensor_parallel > 1 and args.batch_invariant:
        raise ValueError("--batch-invariant needs one process: remove --tensor-parallel")
    for name in ("max_running", "page_size", "threads", "num_pages", "tensor_parallel"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


@contextmanager
def _engine(args: argparse.Namespace, folder: Path) -> Iterator[NativeEngine]:
    import torch

    from areal.engine.native.engine import NativeEngine
    from areal.engine.native.tensor_parallel import leading_engine
    from areal.models.hf_io import dtype_named
    from areal.utils.device import best_device

    device = best_device() if args.device == "best" else args.device
    _check_device(device)
    options = {
        "device": device,
        "page_size": args.page_size,
        "num_pages": args.num_pages,
        "max_running": args.max_running,
        "batch_invariant": args.batch_invariant,
        "seed": args.seed,
    }
    if args.tensor_parallel > 1:
        options |= {"model_path": str(folder), "threads": args.threads, "dtype": args.dtype}
        with leading_engine(args.tensor_parallel, on_end=_end_with, **options) as engine:
            yield cast("NativeEngine", engine)  # same methods, run on all ranks
        return
    torch.set_num_threads(args.threads)
    yield NativeEngine.from_pretrained(folder, dtype=dtype_named(args.dtype), **options)


def _end_with(fault: str) -> NoReturn:
    """Exit at once: the engine's thread may wait for a lost rank."""
    print(f"areal: error: {fault}", file=sys.stderr, flush=True)
    os._exit(1)


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device {name} is not usable here: {reason}") from error
