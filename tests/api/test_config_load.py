"""From a YAML file and overrides to the typed config: what is read, what flows down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal.api.cli_args import (
    ConfigError,
    GRPOConfig,
    SFTConfig,
    dump_yaml,
    experiment_class,
    load_expr_config,
)
from areal.api.config.loader import _interpolate
from areal.api.config.source import Source

GRPO = """
experiment_name: arithmetic
trial_name: grpo
train_dataset: {path: arithmetic, batch_size: 64}
gconfig:
  n_samples: 8
  max_new_tokens: 32
rollout:
  max_head_offpolicyness: 2
actor:
  path: tiny
  reward_norm: {mean_level: group, std_level: group}
  optimizer:
    lr: 1e-3
"""


@pytest.fixture
def grpo(tmp_path: Path) -> str:
    path = tmp_path / "grpo.yaml"
    path.write_text(GRPO)
    return str(path)


def load(path: str, *overrides: str) -> GRPOConfig:
    return load_expr_config([path, *overrides], GRPOConfig)[0]


@pytest.mark.parametrize("form", ["script", "option", "option=", "positional"])
def test_every_way_to_name_the_file(grpo: str, form: str) -> None:
    argv = {
        "script": ["train.py", "--config", grpo, "seed=7"],
        "option": ["--config", grpo, "seed=7"],
        "option=": ["seed=7", f"--config={grpo}"],
        "positional": [grpo, "seed=7"],
    }[form]
    config, path = load_expr_config(argv, GRPOConfig)
    assert path == grpo
    assert config.seed == 7


def test_overrides_reach_any_depth_and_take_yaml_values(grpo: str) -> None:
    config = load(
        grpo,
        "actor.optimizer.lr=5e-4",
        "+gconfig.stop_token_ids=[1, 2]",
        "actor.adv_norm.mean_level=batch",
        "workflow_kwargs={enable_thinking: true}",
        "train_dataset.dataset_kwargs.digits=3",
        "actor.eps_clip=0.1",
        "actor.eps_clip=0.3",
    )
    assert config.actor.optimizer.lr == 5e-4
    assert config.gconfig.stop_token_ids == [1, 2]
    assert config.actor.adv_norm.mean_level == "batch"
    assert config.workflow_kwargs == {"enable_thinking": True}
    assert config.train_dataset.dataset_kwargs == {"digits": 3}
    assert config.actor.eps_clip == 0.3  # the last one counts


def test_tilde_goes_back_to_the_default(grpo: str) -> None:
    assert load(grpo, "~rollout.max_head_offpolicyness").rollout.max_head_offpolicyness == 0
    assert load(grpo, "~actor.reward_norm").actor.reward_norm is None


def test_values_flow_down_from_the_root(grpo: str) -> None:
    config = load(grpo)
    assert config.tokenizer_path == "tiny"
    assert config.train_dataset.type == "rl"
    assert config.rollout.consumer_batch_size == 64
    assert config.rollout.max_concurrent_rollouts == 3 * 64  # staleness 2
    assert config.actor.max_new_tokens == 32
    assert (config.eval_gconfig.greedy, config.eval_gconfig.n_samples) == (True, 1)
    assert config.eval_gconfig.max_new_tokens == 32


def test_interpolation_sees_written_keys_defaults_and_whole_sections(grpo: str) -> None:
    config = load(
        grpo,
        "actor.path=${cluster.fileroot}/${experiment_name}",  # fileroot is a default
        "valid_dataset=${train_dataset}",
        "seed=${train_dataset.batch_size}",
    )
    assert config.actor.path == "runs/arithmetic"
    assert config.valid_dataset.batch_size == 64
    assert config.seed == 64


@pytest.mark.parametrize(
    "written",
    [
        "${a.b.c}",
        "x/${a.b.c}/${f}",
        "${a}",  # a section, with references of its own
        "${a.b}",
        "${a.g}",  # a list with a reference in it
        "${a.g.1}",
        "${d.c}",  # through a reference to a section
        "${h}",  # of a reference
        "${a.b.missing}",
        "${a.b.c.none}",
        "${missing.c}",
        "${value}",
        "${.a}",
        "${a[b].c}",
        "${a.${k}.c}",
        "${oc.select:a.b.none,7}",
        "\\${a.b.c}",
    ],
)
def test_what_a_reference_finds_is_what_omegaconf_finds_in_the_whole_tree(written: str) -> None:
    tree = {
        "value": written,
        "a": {"b": {"c": 1, "plain": [1, {"x": None}]}, "e": "${f}", "g": [1, "${f}"]},
        "d": "${a.b}",
        "f": "0x10",
        "h": "${d.c}",
        "k": "b",
        "plain": {"m": "???", "n": {}, "o": []},
    }
    try:
        expected = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        with pytest.raises(ConfigError, match=re.escape(reason)):
            _interpolate(tree, Source("file.yaml"))
    else:
        assert _interpolate(tree, Source("file.yaml")) == expected
        assert tree["value"] == written, "what was read stays as it was"


def test_environment_gives_numbers_and_paths(grpo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_TEST_N", "16")
    monkeypatch.setenv("AREAL_TEST_ROOT", "/data")
    config = load(
        grpo, "gconfig.n_samples=${oc.env:AREAL_TEST_N}", "cluster.fileroot=$AREAL_TEST_ROOT/runs"
    )
    assert config.gconfig.n_samples == 16
    assert config.cluster.fileroot == "/data/runs"
    assert load(grpo, "actor.path=~/model").actor.path == str(Path("~/model").expanduser())


@pytest.mark.parametrize(
    ("written", "mode"),
    [("on", "on"), ("off", "disabled"), ("auto", "on"), ("disabled", "disabled")],
)
def test_recover_mode_and_its_older_names(grpo: str, written: str, mode: str) -> None:
    # A bare `on` or `off` is a boolean to YAML.
    assert load(grpo, f"recover.mode={written}", "recover.freq_steps=5").recover.mode == mode


def test_numbers_are_read_as_people_write_them(grpo: str) -> None:
    config = load(grpo, "seed=1e3", "actor.optimizer.lr=1", "trial_name=7")
    assert config.seed == 1000
    assert isinstance(config.seed, int)
    assert config.actor.optimizer.lr == 1.0
    assert isinstance(config.actor.optimizer.lr, float)
    assert config.trial_name == "7"


def test_empty_section_keeps_its_defaults(grpo: str) -> None:
    config = load(grpo, "perf_tracer=null", "saver=null")
    assert config.perf_tracer.enabled is False
    assert config.saver.ever_fires is False


def test_dump_loads_to_an_equal_config(grpo: str, tmp_path: Path) -> None:
    config = load(grpo, "recover.mode=on", "recover.freq_steps=5", "actor.adv_norm.eps=1e-6")
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_yaml(config))
    assert load(str(copy)) == config


@pytest.mark.parametrize(
    "text", ["1e3", "5.0", "12", "nan", "1_0.5", "0x1f", "yes", "y", "N", "null", "~", "a: b", "é"]
)
def test_text_that_reads_as_something_else_is_dumped_in_quotes(
    grpo: str, tmp_path: Path, text: str
) -> None:
    config = load(grpo)
    config.workflow_kwargs = {"name": text, "items": [text, 1.5, None, True], "same": [text]}
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_yaml(config), encoding="utf-8")
    assert load(str(copy)).workflow_kwargs == config.workflow_kwargs


def test_file_says_its_trainer(grpo: str) -> None:
    assert experiment_class([grpo]) is GRPOConfig
    assert experiment_class([grpo, "trainer=sft"]) is SFTConfig


def test_sft_config(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        "trainer: sft\nexperiment_name: a\ntrial_name: b\ntrain_dataset: {path: gsm8k}\n"
        "actor: {path: tiny, optimizer: {lr: 1e-3}}\n"
    )
    config, _ = load_expr_config([str(path)], SFTConfig)
    assert config.train_dataset.type == "sft"
    assert config.tokenizer_path == "tiny"


def test_allocation_mode_sets_the_backends_that_are_not_written(grpo: str) -> None:
    config = load(grpo, "allocation_mode=native:d2+d4", "actor.weight_update_mode=disk")
    assert (config.rollout.backend, config.actor.backend) == ("native:d2", "fsdp:d4")


def test_a_backend_that_disagrees_with_allocation_mode_is_named(grpo: str) -> None:
    with pytest.raises(ConfigError, match="allocation_mode must hold 'archon:d2', the backend of"):
        load(grpo, "allocation_mode=native:d1+archon:d1", "actor.backend=archon:d2")


def test_a_refused_layout_is_at_the_line_of_allocation_mode(grpo: str) -> None:
    line = len(GRPO.splitlines()) + 1
    Path(grpo).write_text(f"{GRPO}allocation_mode: native:d1p2+archon:d1\n")
    with pytest.raises(ConfigError, match=f"grpo.yaml:{line}: rollout.backend 'native:d1p2'"):
        load(grpo)


@pytest.mark.parametrize(("written", "stored"), [("null", "local"), ("slurm", "slurm")])
def test_scheduler_types_of_other_files(grpo: str, written: str, stored: str) -> None:
    config = load(grpo, f"scheduler.type={written}")
    assert config.scheduler.type == stored
    assert config.scheduler.by_ray == (stored == "slurm")


def test_a_ref_that_nothing_needs_is_left_out(grpo: str, caplog) -> None:
    config = load(grpo, "ref={path: elsewhere, backend: fsdp:d4}")
    assert config.ref is None and list(config.models()) == ["actor"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "ref has no effect: actor.kl_ctl and actor.kl_loss_coef are 0" in message


@pytest.mark.parametrize(("steps", "rows", "bound"), [(9, 12, 3), (2, 12, 2), (None, 15, 3)])
def test_the_smaller_bound_on_steps_counts(grpo: str, steps, rows: int, bound: int) -> None:
    overrides = [f"total_train_steps={'null' if steps is None else steps}"]
    config = load(grpo, *overrides, f"total_train_n_seqs={rows}", "train_dataset.batch_size=4")
    assert config.max_train_steps == bound


def test_allocation_mode_may_repeat_the_backends(grpo: str) -> None:
    config = load(grpo, "allocation_mode=native:d1 + archon:d1")
    assert (config.rollout.backend, config.actor.backend) == ("native:d1", "archon:d1")
