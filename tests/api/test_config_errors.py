"""Mistakes in a config: each ends in one line that names the key and what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import ConfigError, GRPOConfig, experiment_class, load_expr_config
from areal.api.config.section import all_keys

GRPO = """\
experiment_name: arithmetic
trial_name: grpo
train_dataset:
  path: arithmetic
  batch_size: 64
gconfig:
  n_samples: 8
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


def complaint(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_expr_config(list(argv), GRPOConfig)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor.eps_clp=1", "actor.eps_clp: unknown key; did you mean actor.eps_clip?"),
        ("actr.path=x", "actr: unknown key; did you mean actor?"),
        ("actor.recompute_logprobs=true", "did you mean actor.recompute_logprob?"),
        ("lr=1", "lr: unknown key; it belongs at actor.optimizer.lr"),
        ("actor.lr=1", "actor.lr: unknown key; it belongs at actor.optimizer.lr"),
        ("actor.n_samples=1", "it belongs at gconfig.n_samples"),
        ("learning_rate=1", "did you mean actor.optimizer.lr?"),
        ("offpolicyness=1", "did you mean rollout.max_head_offpolicyness?"),
        ("rollout.trial_name=a", "it is written once, as trial_name at the root"),
        ("saver.fileroot=a", "it is written once, as cluster.fileroot"),
        ("actor.behave_imp_weight_cap=5", "use rejection_sampling"),
        ("actor.reward_norm.group_size=8", "remove it"),
        ("rollout.check_trajectory_format=true", "every trajectory is checked; remove it"),
        ("actor.kl_coef=0.1", "actor.kl_coef: unknown key; did you mean actor.kl_ctl?"),
        ("ref.optimizer.lr=1", "ref.optimizer: unknown key; it belongs at actor.optimizer"),
        ("gconfig.zzz=1", "keys of gconfig are n_samples, "),
        ("zzz=1", "sections of the file are cluster, "),
    ],
)
def test_unknown_key_is_answered_with_a_suggestion(grpo: str, override: str, says: str) -> None:
    assert says in complaint(grpo, override)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("gconfig.n_samples=abc", "gconfig.n_samples must be a whole number, got 'abc'"),
        ("gconfig.n_samples=1.5", "gconfig.n_samples must be a whole number, got 1.5"),
        ("gconfig.n_samples=true", "gconfig.n_samples must be a whole number, got true"),
        ("gconfig.n_samples=null", "gconfig.n_samples must be a whole number, got null"),
        ("gconfig.greedy=3", "gconfig.greedy must be true or false, got 3"),
        ("gconfig.stop_token_ids=3", "gconfig.stop_token_ids must be a list"),
        ("trial_name=1.10", "trial_name must be text, got 1.1; put it in quotes"),
        ("actor=3", "actor must be a section of keys, got 3"),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr must be a number, got 'fast'"),
        ("actor.optimizer.type=adamw", "must be one of adam, sgd, got 'adamw'"),
        ("recover.mode=fault", "must be one of disabled, on, off, auto, got 'fault'"),
        ("stats_logger.wandb.mode=on", "must be one of disabled, online, offline, got true"),
        ("scheduler.type=pbs", "scheduler.type must be one of local, ray, slurm, got 'pbs'"),
    ],
)
def test_wrong_type_names_key_value_and_expectation(grpo: str, override: str, says: str) -> None:
    assert says in complaint(grpo, override)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor.optimizer.lr=-1", "actor.optimizer.lr must be above 0, got -1.0"),
        ("actor.optimizer.lr=nan", "actor.optimizer.lr must be above 0, got nan"),
        ("train_dataset.batch_size=0", "train_dataset.batch_size must be at least 1, got 0"),
        ("gconfig.n_samples=1", "gconfig.n_samples must be at least 2"),
        ("gconfig.frequency_penalty=3", "gconfig.frequency_penalty must lie between -2 and 2"),
        ("gconfig.use_beam_search=true", "gconfig.use_beam_search must be false: sampled"),
        (
            "eval_gconfig.reward_normalization=true",
            "eval_gconfig.reward_normalization must be false: evaluation reports the rewards",
        ),
        ("gconfig.temperature=0.5", "actor.temperature must equal gconfig.temperature (0.5;"),
        ("actor.ppo_n_minibatches=999", "train_dataset.batch_size * gconfig.n_samples = 512"),
        ("rollout.consumer_batch_size=3", "must equal train_dataset.batch_size (64"),
        ("train_dataset.type=sft", "train_dataset.type must be 'rl' for this trainer"),
        ("train_dataset.path=$AREAL_UNSET/x", "uses $AREAL_UNSET, which is not set"),
        ("trial_name=../up", "trial_name becomes a folder"),
        ("actor.optimizer=null", "actor.optimizer must be set to train"),
        ("recover.mode=on", "recover.freq_steps (or freq_epochs, freq_secs) must be set"),
        ("actor.rejection_sampling.upper=2", "actor.use_decoupled_loss must be true"),
        ("actor.overlong_reward_penalty=true", "actor.overlong_tokens must be set"),
        ("actor.backend=native:d1", "actor.backend 'native:d1' is for inference"),
        ("actor.backend=archn:d1", "actor.backend: unknown backend 'archn'"),
        ("allocation_mode=fsdp[actr]:d4", "allocation_mode: 'fsdp:d4' is for actr, which is no"),
        ("total_train_n_seqs=1", "total_train_n_seqs must be at least the rows of a step"),
        ("allocation_mode=what", "allocation_mode: cannot read 'what'"),
    ],
)
def test_wrong_value_names_key_value_and_fix(grpo: str, override: str, says: str) -> None:
    assert says in complaint(grpo, override)


def test_one_sample_alone_has_no_normalised_reward(grpo: str) -> None:
    overrides = ["gconfig.n_samples=1", "gconfig.reward_normalization=true"]
    says = "gconfig.n_samples must be at least 2 for gconfig.reward_normalization"
    assert says in complaint(grpo, *overrides, "~actor.reward_norm", "~actor.adv_norm")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "expected one config file (--config FILE.yaml), got none"),
        (["--config"], "--config needs a file"),
        (["GRPO", "word"], "cannot read argument 'word': an override is written key=value"),
        (["GRPO", "--actor.lr=3"], "overrides have no dashes: actor.lr=3"),
        (["GRPO", "=3"], "cannot read override '=3'"),
        (["GRPO", "a..b=3"], "cannot read override 'a..b=3'"),
        (["GRPO", "seed.x=3"], "seed must be a whole number, got {'x': 3}"),
        (["GRPO", "actor.path.x=3"], "actor.path is 'tiny', not a section with keys"),
        (["GRPO", "seed=[1"], "seed=[1: not valid YAML"),
        (["GRPO", "seed=${"], "seed=${: not valid YAML"),
        (["GRPO", "seed=${sed}"], "seed: Interpolation key 'sed' not found"),
        (["GRPO", "seed=${seed}"], "seed: Recursive interpolation"),
        (["GRPO", "rollout=${actor}"], "rollout.path: unknown key"),
        (["GRPO", "~seed", "~experiment_name"], "experiment_name is required and not given"),
        (["GRPO", "actor.path=???", "trial_name=???"], "trial_name, actor.path are required"),
    ],
)
def test_wrong_command_line(grpo: str, argv: list[str], says: str) -> None:
    argv = [grpo if arg == "GRPO" else arg for arg in argv]
    assert says in complaint(*argv)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "experiment_name, trial_name, train_dataset.path, actor.path are required"),
        ("- a\n- b\n", "expected `key: value` lines, found '- a"),
        ("hello", "expected `key: value` lines, found 'hello'"),
        ("a: 1\na: 2\n", "bad.yaml:2: not valid YAML: found duplicate key a"),
        ("a: 1\n b: 2\n", "bad.yaml:2: not valid YAML: mapping values are not allowed here"),
        ("a:\n\tb: 2\n", "bad.yaml:2: not valid YAML"),
        ("a: !!python/name:os.system\n", "bad.yaml:1: not valid YAML: could not determine"),
        ("zzz: 1\nseeed: 2\n", "bad.yaml:1: zzz: unknown key"),
        ("zzz: 1\nseeed: 2\n", "(also unknown: seeed)"),
        ("[" * 1200, "nested too deeply"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_wrong_file(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert says in complaint(str(path))


def test_errors_point_at_the_line(grpo: str) -> None:
    Path(grpo).write_text(GRPO.replace("lr: 1e-3", "lr: -1"))
    assert complaint(grpo).startswith(f"{grpo}:12: actor.optimizer.lr must be above 0")
    assert complaint(grpo, "actor.optimizer.lr=-2").startswith("command line: actor.optimizer.lr")


def test_missing_file_suggests_its_neighbour(grpo: str, tmp_path: Path) -> None:
    message = complaint(str(tmp_path / "gpro.yaml"))
    assert "does not exist; did you mean" in message
    assert message.endswith("grpo.yaml?")
    assert "cannot read config file" in complaint(str(tmp_path))


def test_trainer_must_be_known(grpo: str) -> None:
    with pytest.raises(ConfigError, match="trainer must be one of ppo, sft, rw, dpo, got 'grpo'"):
        experiment_class([grpo, "trainer=grpo"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "grpo",
            "an algorithm, chosen by keys of actor: trainer: ppo with reward_norm {mean_le",
        ),
        ("GSPO", "trainer: ppo with importance_sampling_level: sequence"),
        ("dapo", "trainer: ppo with eps_clip_higher"),
        ("reinforce++", "trainer: ppo with adv_norm"),
        ("ipo", "that is trainer: dpo with actor.loss_type: ipo"),
        ("reward-model", "that is trainer: rw"),
    ],
)
def test_an_algorithm_is_no_trainer(grpo: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match="trainer must be one of") as error:
        experiment_class([grpo, f"trainer={name}"])
    assert says in str(error.value)


_KEYS = st.sampled_from(sorted(all_keys(GRPOConfig))) | st.text(
    alphabet="abcdeloprt._~+-$[]{} ", max_size=12
)
_VALUES = (
    st.sampled_from(["null", "true", "on", "1", "-1", "0", "1e309", ".nan", "[]", "{}", "[1, a]"])
    | st.sampled_from(
        ["{a: 1}", "${seed}", "${actor}", "${a.b}", "???", "'x'", "native:d1", "2024-01-01"]
    )
    | st.text(max_size=12)
    | st.integers().map(str)
    | st.floats().map(str)
)


@given(overrides=st.lists(st.tuples(_KEYS, _VALUES), min_size=1, max_size=3))
def test_any_override_loads_or_is_a_config_error(
    overrides: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(GRPO)
    argv = [str(path), *(f"{key}={value}" for key, value in overrides)]
    try:
        config, _ = load_expr_config(argv, GRPOConfig)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(config, GRPOConfig)


@given(text=st.text(alphabet="abr:-[]{}&*!|>'\"#%@`,?\n\t 01$", max_size=40))
def test_any_file_loads_or_is_a_config_error(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz_file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):  # no such text holds the required keys
        load_expr_config([str(path)], GRPOConfig)
