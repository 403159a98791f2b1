"""Which class the root of a config file is, by its key `trainer`.

Names of algorithms, which users of other frameworks write there, are answered with the keys that
select them.
"""

from __future__ import annotations

from areal.api.config.experiment import BaseExperimentConfig, PPOConfig
from areal.api.config.offline import DPOConfig, RWConfig, SFTConfig
from areal.api.config.source import Source

# `trainer` key of a file -> class of its root.
EXPERIMENTS: dict[str, type[BaseExperimentConfig]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
}


_OF_ACTOR = "; that is an algorithm, chosen by keys of actor: trainer: ppo with "
# Algorithms that are no trainers, and the keys that select them.
_ALGORITHMS = {
    "grpo": _OF_ACTOR + "reward_norm {mean_level: group, std_level: group}, and no critic",
    "dr_grpo": _OF_ACTOR + "reward_norm {mean_level: group, std_level: null}",
    "rloo": _OF_ACTOR + "reward_norm {mean_level: group, mean_leave1out: true, std_level: null}",
    "gspo": _OF_ACTOR + "importance_sampling_level: sequence",
    "dapo": _OF_ACTOR + "eps_clip_higher, overlong_reward_penalty, and dynamic_filter_fn",
    "cispo": _OF_ACTOR + "use_cispo_loss: true",
    "sapo": _OF_ACTOR + "use_sapo_loss: true",
    "m2po": _OF_ACTOR + "use_decoupled_loss: true and m2_threshold",
    "vapo": _OF_ACTOR + "gae_lambda: vapo, and a critic",
    "reinforce": _OF_ACTOR + "adv_norm {mean_level: batch, std_level: batch}, and no critic",
    "rlhf": "; that is trainer: rw for a reward model, then trainer: ppo",
    "rl": "; that is trainer: ppo",
    "ipo": "; that is trainer: dpo with actor.loss_type: ipo",
    "reward": "; that is trainer: rw",
    "rm": "; that is trainer: rw",
    "distill": "; that is trainer: ppo with a teacher",
}
_OTHER_NAMES = {
    "drgrpo": "dr_grpo",
    "reinforce_pp": "reinforce",
    "reinforce++": "reinforce",
    "distillation": "distill",
    "reward_model": "reward",
}


def trainer_class(source: Source) -> type[BaseExperimentConfig]:
    """The class to load `source` with: `trainer: ppo` (default), `sft`, ..."""
    kind = source.tree.get("trainer", "ppo")
    if not isinstance(kind, str) or kind not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        name = str(kind).lower().replace("-", "_")
        hint = _ALGORITHMS.get(_OTHER_NAMES.get(name, name), "")
        raise source.error(("trainer",), f"trainer must be one of {known}, got {kind!r:.40}{hint}")
    return EXPERIMENTS[kind]
