"""`areal convert`: files in the shape of AReaL's become files that load, with a list of changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.api.cli_args import ConfigError, load_experiment
from areal.api.config.convert import convert

CORPUS = Path(__file__).parents[1] / "data" / "areal_yaml"
FILES = sorted(CORPUS.glob("*.yaml"))


def converted(file: Path, folder: Path, *overrides: str):
    """The config of the new file, and the list."""
    text, changes = convert([str(file), *overrides])
    new = folder / file.name
    new.write_text(text)
    return load_experiment([str(new)])[0], {change.key: str(change) for change in changes}


def leaves(node, name: str = "") -> set[str]:
    """Dotted keys; those of lists once."""
    if isinstance(node, list):
        return {key for item in node for key in leaves(item, name)} or {name}
    if not isinstance(node, dict):
        return {name}
    below = (leaves(value, f"{name}.{key}".lstrip(".")) for key, value in node.items())
    return {key for keys in below for key in keys}


def test_there_is_a_corpus() -> None:
    assert len(FILES) >= 20


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_every_file_converts_and_every_lost_key_is_listed(file: Path, tmp_path: Path) -> None:
    text, changes = convert([str(file)])
    new = tmp_path / "new.yaml"
    new.write_text(text)
    load_experiment([str(new)])
    old_keys, new_keys = (leaves(yaml.safe_load(one.read_text())) for one in (file, new))
    listed = {change.key for change in changes}
    lost = {key for key in old_keys - new_keys if not covered(key, listed)}
    assert not lost
    assert all(change.why and "\n" not in str(change) for change in changes)
    assert convert([str(new)])[1] == []  # it converts to itself


def covered(key: str, listed: set[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:length]) in listed for length in range(1, len(parts) + 1))


def corpus(name: str) -> Path:
    return CORPUS / f"{name}.yaml"


def test_what_means_the_same_stays(tmp_path: Path) -> None:
    config, changes = converted(corpus("decoupled_icepop"), tmp_path)
    assert config.rollout.max_head_offpolicyness == 8
    assert config.actor.rejection_sampling.lower == 0.5
    assert config.actor.optimizer.lr == 1.7e-5
    assert config.rollout.consumer_batch_size == config.train_dataset.batch_size == 256
    assert changes["actor.disable_dropout"].endswith("dropout is always off")


def test_training_in_fp8_stays(tmp_path: Path) -> None:
    config, changes = converted(CORPUS / "sft_archon_fp8.yaml", tmp_path)
    assert config.actor.archon.fp8_config.mode == "blockwise"
    assert "experts" in changes["actor.archon.fp8_config.include_experts"]


def test_an_allocation_becomes_back_ends(tmp_path: Path) -> None:
    config, changes = converted(corpus("ppo_critic"), tmp_path)
    assert (config.actor.backend, config.critic.backend) == ("fsdp:d4", "fsdp:d4")
    assert config.critic.scheduling_strategy.target == "actor"
    assert "written as rollout.backend, actor.backend" in changes["allocation_mode"]


def test_server_options_reach_the_command_line(tmp_path: Path) -> None:
    config, changes = converted(corpus("grpo_one_gpu"), tmp_path)
    assert config.vllm.arguments == [
        *("--block-size", "16", "--no-enable-prefix-caching"),
        *("--swap-space", "8"),
    ]
    assert config.vllm.seed == config.seed == 1
    assert changes["vllm.swap_space"] == "dropped vllm.swap_space: written in vllm.extra_args"


def test_the_older_cap_is_rejection_sampling(tmp_path: Path) -> None:
    config, _ = converted(corpus("behave_cap"), tmp_path)
    assert config.actor.rejection_sampling.action == "mask"
    assert config.actor.rejection_sampling.upper == 5.0
    assert config.recover.mode == "on" and config.scheduler.type == "slurm"


def test_a_default_that_differs_is_written_out(tmp_path: Path) -> None:
    file = tmp_path / "kl.yaml"
    text = corpus("grpo_dense_vllm").read_text()
    file.write_text(text.replace("  kl_ctl: 0.01\n", ""))
    config, changes = converted(file, tmp_path / "..")
    assert config.actor.kl_ctl == 0.1 and config.ref is not None
    assert "AReaL's default" in changes["actor.kl_ctl"]


def test_an_override_says_what_the_script_passes(tmp_path: Path) -> None:
    file, name = corpus("multi_turn_script_keys"), "my_package.agent.Agent"
    _, dropped = converted(file, tmp_path)
    assert any(key.startswith("rollout.agent") for key in dropped)
    config, kept = converted(file, tmp_path, f"workflow={name}")
    assert config.workflow == name and config.rollout.agent.mode == "subproc"
    assert not any(key.startswith("rollout.agent") for key in kept)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("actor: {path: a}\nactor: {path: b}\n", "duplicate key actor"),
        ("[1, 2]\n", "expected `key: value` lines"),
        ("a: {b: 1\n", "not valid YAML"),
        ("experiment_name: e\n", "no section actor"),
        ("", "no section actor"),
        ("actor: {path: '${nothing.here}'}\n", "${nothing.here} has no value"),
        ("actor: {path: a}\nallocation_mode: what+ever\n", "allocation_mode: cannot read 'what'"),
        ("actor: {path: a}\n", "required and not given"),
    ],
)
def test_what_cannot_be_converted_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        convert([str(file)])
    assert says in str(caught.value) and "\n" not in str(caught.value)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
PLACES = sorted(leaves(yaml.safe_load(corpus("lora_grpo").read_text())))


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.sampled_from(PLACES), value=ODD)
def test_an_odd_value_converts_or_is_refused_in_one_line(tmp_path: Path, place: str, value) -> None:
    tree = yaml.safe_load(corpus("lora_grpo").read_text())
    *path, leaf = place.split(".")
    node = tree
    for name in path:
        node = node[name] if isinstance(node, dict) else node[0][name]
    (node if isinstance(node, dict) else node[0])[leaf] = value
    file = tmp_path / "odd.yaml"
    file.write_text(yaml.safe_dump(tree))
    try:
        text, _ = convert([str(file)])
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert yaml.safe_load(text)["trainer"] == "ppo"


def test_the_command_writes_once_and_lists(tmp_path: Path) -> None:
    out = tmp_path / "new.yaml"
    command = [sys.executable, "-m", "areal.cli.main", "convert", "--out", str(out)]
    command.append(str(corpus("grpo_dense_sglang")))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "dropped actor.disable_dropout: " in done.stdout
    assert load_experiment([str(out)])[0].experiment_name == "gsm8k-grpo"
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "exists; choose another name" in again.stderr
