"""Tensor parallelism of the native engine on two real processes, compared with one.

The pair of processes is started once and plays the same scenario with every model: rank 0 leads,
rank 1 follows. Then a server of two ranks over HTTP, and what happens when one of them dies.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fork_server import FORKS, fork
from tiny import tiny_config, tiny_model, write_tiny_model

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest
from areal.engine.native.tensor_parallel import LeadingEngine, follow
from areal.engine.native.tokenizer import ModelText
from areal.engine.remote.native import NativeRemoteEngine, launch_native_server
from areal.engine.stored_weights import joined_checksums
from areal.engine.train.export import send_weights
from areal.models.common.tensor_parallel import Ranks
from areal.models.hf_io import save_hf
from areal.utils.child_process import ChildProcess
from areal.utils.manifest import seal
from areal.weight_sync import cuda_ipc
from areal.weight_sync.bucket import checksum_of
from areal.weight_sync.publication import open_publication, publish
from areal.weight_sync.transports import PublicationRoot

TOKEN = "token-of-this-run"
WAIT_S = 900
VOCAB = 320  # of the tokenizer
# Biases that are cut and that are not, norms of queries and keys; heads tied, own, cut unevenly.
MODELS = {
    "qwen2": ("qwen2", {"tie_word_embeddings": False, "vocab_size": 63}),
    "qwen3": ("qwen3", {"vocab_size": 65}),
    "llama": ("llama", {"attention_bias": True, "num_key_value_heads": 4, "vocab_size": 64}),
    "deepseek_v2": ("deepseek_v2", {"q_lora_rank": 9}),
}
CUT = "model.layers.1.self_attn.o_proj.weight"
ENGINE = {"page_size": 4, "num_pages": 24, "max_running": 6, "seed": 3}


def test_drawn_as_by_one_process(pair, folders):
    for name, folder in folders.items():
        engine = NativeEngine.from_pretrained(folder, **ENGINE)
        expected, stats = play(engine, folder)
        found, found_stats = pair[name]
        assert stats["preemptions"] > 0 and stats["version"] == 2
        assert found_stats == stats
        assert found.keys() == expected.keys()
        for rid, output in expected.items():
            assert found[rid][:3] == output[:3], (name, rid)
            assert found[rid][3] == pytest.approx(output[3], abs=1e-5), (name, rid)
        assert {output[2] for output in expected.values()} >= {"length", "abort"}
        versions = {version for output in expected.values() for version in output[1]}
        assert versions == {0, 1, 2}


def test_checksums_are_of_whole_tensors_and_of_every_rank(pair):
    for name in MODELS:
        # As they are; another shard on rank 1; another copy there of what every rank has whole.
        assert pair["differing"][name] == [[], [CUT], ["model.norm.weight"]], name


def test_a_follower_that_drew_other_tokens_raises(pair):
    assert "rank 1 has drawn other tokens than rank 0" in pair["astray"]


def play(engine: NativeEngine | LeadingEngine, folder) -> tuple[dict, dict]:
    """Groups, preemption, abort and two weight updates under way; outputs by rid, and counters."""
    done: list[Finished] = []

    def steps(count: int) -> None:
        for _ in range(count):
            done.extend(engine.step())

    for group, options in enumerate(({"temperature": 0.7}, {"top_p": 0.8, "top_k": 9}, {})):
        for sample in range(3):
            engine.add(request(f"g{group}.{sample}", range(2 + group, 9 + group), **options))
    engine.add(request("greedy", [5], greedy=True, frequency_penalty=0.3))
    rare = {"presence_penalty": 0.5, "repetition_penalty": 1.3, "min_p": 0.02}
    engine.add(request("rare", [5, 9], logit_bias={7: 2.0}, seed=4, **rare))
    with pytest.raises(ValueError, match="vocabulary"):
        engine.add(request("unfit", [9999]))
    steps(4)
    done.append(engine.abort("g0.1"))
    assert engine.abort("nobody") is None
    engine.load_weights(open_publication(folder / "v1"), 1, recompute_kv=True)
    steps(3)
    with pytest.raises(ValueError, match="do not fit"):
        engine.load_weights(open_publication(folder / "unfit"), 2, recompute_kv=True)
    for sample in range(2):
        engine.add(request(f"long{sample}", [2 + i % 50 for i in range(60)], max_new_tokens=3))
    steps(2)
    engine.load_weights(open_publication(folder / "v2"), 2, recompute_kv=False)
    engine.offload()
    engine.onload()
    while engine.has_work:
        steps(1)
    with pytest.raises(ValueError, match="vocabulary"):
        engine.score([[9999]])
    scores = engine.score([[5, 7, 2]])[0].logprobs
    outputs = {
        one.rid: (one.output_tokens, one.output_versions, one.stop_reason, one.output_logprobs)
        for one in done
    }
    outputs["scored"] = ([5, 7, 2], [2], "length", scores)
    return outputs, engine.stats()


def request(rid: str, prompt, **options) -> GenRequest:
    options = {"max_new_tokens": 14, **options}
    return GenRequest(rid, list(prompt), GenerationHyperparameters(**options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model folder for each of MODELS, and weights of later versions in it."""
    folders = {}
    for name, (family, overrides) in MODELS.items():
        folder = folders[name] = tmp_path_factory.mktemp("model")
        save_hf(biased(family, 0, overrides), tiny_config(family, **overrides), folder)
        for version in (1, 2):
            publish(biased(family, version, overrides), folder / f"v{version}", version)
        other = tiny_model(family, **{**overrides, "intermediate_size": 50})
        publish(other.named_hf_tensors(), folder / "unfit", 2)
    return folders


def biased(family, seed, overrides):
    """Weights of a tiny model whose biases are not 0."""
    model = tiny_model(family, seed, **overrides)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.2, generator=generator)
    return list(model.named_hf_tensors())


@pytest.fixture(scope="module")
def pair(folders, tmp_path_factory):
    """What rank 0 played with each model, and what became of a rank that went astray."""
    results = FORKS.SimpleQueue()
    store = str(tmp_path_factory.mktemp("store") / "file")
    ranks = [fork(run_rank, rank, store, folders, results, daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WAIT_S)
    assert [process.exitcode for process in ranks] == [0, 0]
    return results.get() | results.get()


def run_rank(rank, store, folders, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=WAIT_S),
    )
    ranks, group = Ranks.of(dist.group.WORLD), dist.group.WORLD
    outcome = {}
    for name, folder in folders.items():
        engine = NativeEngine.from_pretrained(folder, ranks=ranks, **ENGINE)
        if rank == 0:
            leader = LeadingEngine(engine, group, ModelText(folder))
            outcome[name] = play(leader, folder)
            leader.close()
        else:
            follow(engine, group, ModelText(folder))
    outcome["differing"] = {name: differing_names(name, folders[name], ranks) for name in MODELS}
    # Seeds of its own for requests that bring none.
    engine = NativeEngine.from_pretrained(folder, ranks=ranks, **(ENGINE | {"seed": rank}))
    if rank == 0:
        leader = LeadingEngine(engine, group, ModelText(folder))
        leader.add(request("a", [2, 3], max_new_tokens=1, temperature=5.0))
        leader.step()
        leader.close()
    else:
        with pytest.raises(RuntimeError) as fault:
            follow(engine, group, ModelText(folder))
        outcome["astray"] = str(fault.value)
    results.put(outcome)
    dist.destroy_process_group()


def differing_names(name, folder, ranks) -> list[list[str]]:
    """Tensors whose checksum is not that of the file: none, then with two faults of rank 1."""
    model = NativeEngine.from_pretrained(folder, ranks=ranks, **ENGINE).model
    family, overrides = MODELS[name]
    whole = {name: checksum_of(tensor) for name, tensor in biased(family, 0, overrides)}
    found = []
    for weight in (None, model.get_parameter("layers.1.attention.wo.weight"), model.norm.weight):
        kept = None if weight is None else weight.detach().clone()
        if weight is not None and ranks.rank == 1:
            weight.data += 1
        shown = joined_checksums(model)
        assert shown.keys() == whole.keys()
        found.append([name for name in whole if shown[name] != whole[name]])
        if weight is not None:
            weight.data.copy_(kept)
    return found


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory):
    from tiny_tokenizer import VOCAB_SIZE, write_byte_tokenizer  # seconds, which rank 1 can spare

    assert VOCAB == VOCAB_SIZE
    folder = tmp_path_factory.mktemp("served") / "tiny"
    write_tiny_model(folder, "qwen2", vocab_size=VOCAB)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(server_folder):
    child, address = launch_native_server(
        server_folder, token=TOKEN, num_pages=400, tensor_parallel=2, setup_timeout_s=WAIT_S
    )
    yield child, address
    child.terminate()


def call(address, route, **body):
    connection = http.client.HTTPConnection(address, timeout=WAIT_S)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    connection.request("POST" if body else "GET", route, json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content
    return [json.loads(line) for line in content.splitlines()]


def test_a_server_of_two_ranks(server, server_folder, tmp_path):
    _, address = server
    gconfig = {"max_new_tokens": 12, "seed": 1, "ignore_eos": True}
    entry = {"rid": "a", "input_ids": [5, 7, 9], "gconfig": gconfig}
    engine = NativeEngine.from_pretrained(server_folder, num_pages=400)

    def expected():
        engine.add(request("a", [5, 7, 9], **gconfig))
        while engine.has_work:
            (*_, done) = engine.step() or [None]
        return done

    (line,) = call(address, "/generate", requests=[entry])
    whole = expected()
    assert line["output_tokens"] == whole.output_tokens
    assert line["output_logprobs"] == pytest.approx(whole.output_logprobs, abs=1e-5)

    newer = tiny_model("qwen2", seed=1, vocab_size=VOCAB)
    publish(newer.named_hf_tensors(), tmp_path / "v1", 1)
    call(address, "/update_weights", path=str(tmp_path / "v1"), version=1)
    engine.load_weights(newer.named_hf_tensors(), 1, recompute_kv=True)
    (line,) = call(address, "/generate", requests=[entry])
    whole = expected()
    assert line["output_tokens"] == whole.output_tokens and line["output_versions"] == [1] * 12

    with pytest.raises(AssertionError, match="shm or disk"):
        (tmp_path / "v2").mkdir()
        body = {"format": cuda_ipc.FORMAT, "version": 2, "tensors": {}}
        (tmp_path / "v2" / cuda_ipc.HANDLES).write_bytes(seal(body, ""))
        call(address, "/update_weights", path=str(tmp_path / "v2"), version=2)

    # A stop string is watched on every rank, each with the tokenizer of the folder.
    text = ModelText(server_folder).tokenizer().decode(whole.output_tokens)
    stop = {**entry, "gconfig": {**gconfig, "stop": [text[4:6]]}}
    (line,) = call(address, "/generate", requests=[stop])
    assert line["stop_reason"] == "stop" and 0 < len(line["output_tokens"]) < 12
    (line,) = call(address, "/generate", requests=[entry])
    assert line["output_tokens"] == whole.output_tokens


def test_a_server_of_two_ranks_samples_under_a_grammar(server, server_folder):
    """Each rank follows the grammar; one that proves too complex ends on all of them at once."""
    pytest.importorskip("llguidance", reason="constrained output needs the extra `grammar`")
    _, address = server
    rules = "\n".join(f'r{i}: "b" s{i}\ns{i}: "c{i}" | "d" s{i}' for i in range(2500))
    too_wide = f'start: "a" ({" | ".join(f"r{i}" for i in range(2500))})\n{rules}'
    grammars = [{"regex": "(yes|no)[a-c]{3}"}, {"lark": too_wide}, None]
    entries = [
        {"rid": f"{i}.{sample}", "input_ids": [5, 7], "grammar": grammar}
        for i, grammar in enumerate(grammars)
        for sample in range(3)
    ]
    for entry in entries:
        entry["gconfig"] = {"max_new_tokens": 12}
    decode = ModelText(server_folder).tokenizer().decode
    for _ in range(2):
        lines = {line["rid"]: line for line in call(address, "/generate", requests=entries)}
        assert lines.keys() == {entry["rid"] for entry in entries}
        for sample in range(3):
            text = decode(lines[f"0.{sample}"]["output_tokens"])
            assert re.match("(yes|no)[a-c]{3}", text), text
            assert "cannot be followed" in lines[f"1.{sample}"]["message"]


@pytest.mark.parametrize("kind", ["xccl", "delta"])
def test_a_server_of_two_ranks_takes_weights(server, tmp_path, kind):
    _, address = server
    engine = NativeRemoteEngine([address], TOKEN, request_timeout_s=WAIT_S)
    with PublicationRoot(kind, run_name="two", disk_root=tmp_path / "w") as root:
        meta = root.meta(gen_allocation=ModelAllocation.from_str("native:d1t2"))
        for version in (11, 12):
            newer = tiny_model("qwen2", seed=version, vocab_size=VOCAB)
            send_weights(engine, meta.with_version(version), newer.named_hf_tensors())
            sent = {name: checksum_of(tensor) for name, tensor in newer.named_hf_tensors()}
            assert engine.weight_checksums() == {address: sent}
            one = NativeEngine(newer)
            (answer,) = call(address, "/score", sequences=[[5, 7, 9, 3]])
            assert answer["version"] == version
            assert answer["logprobs"][0] == pytest.approx(
                one.score([[5, 7, 9, 3]])[0].logprobs, abs=1e-5
            )
    engine.destroy()


def test_a_dead_rank_ends_the_server(server):
    """The last test: it ends the server."""
    child, address = server
    follower = child_of(child.pid)
    assert call(address, "/health")[0]["status"] == "ok"
    os.kill(follower, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while child.poll() is None:
        assert time.monotonic() < deadline, "the server goes on without its rank"
        time.sleep(0.05)
    assert child.poll() == 1
    end = end_of(child)
    assert f"areal: error: rank 1 of the native engine (pid {follower}) was ended by" in end
    assert "SIGKILL" in end


def child_of(pid: int) -> int:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        mine = file.read().split()
    for task in os.listdir(f"/proc/{pid}/task"):  # children are listed with the thread that forked
        with open(f"/proc/{pid}/task/{task}/children") as file:
            mine += file.read().split()
    (child,) = set(mine)
    return int(child)


def end_of(child: ChildProcess) -> str:
    with pytest.raises(RuntimeError) as end:
        child.raise_if_ended()
    return str(end.value)
