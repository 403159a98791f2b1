"""Does a model fit an engine? Answered from config.json and the config alone, without torch.

    check_models(config, {"actor": hf_config, ...})       # all of a run; ValueError names the key
    check_training(config.actor, hf_config)
    check_generation(config.rollout, config.native, hf_config)

`areal check` and `areal plan` call it before a run, the run before it fetches weights, and an
engine before it builds anything, so all give the same answer. What only the device or the weights
can tell (memory, a kernel, a layer that mixes sequences) shows when the engine has built the model.

Models of transformers: which of them can be trained packed is read from its source, because
importing its models takes seconds and torch. Its tables of model types are literals, and what a
family's attention needs is in the text of its file. What the source cannot tell (a default missing
from config.json, logits that are no plain product) `check_model` finds on the built model.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.alloc_mode import ModelAllocation, ParallelStrategy, check_equal_stages
from areal.api.config.experiment import PPOConfig
from areal.api.config.ppo import FrozenModelConfig
from areal.api.config.train_engine import TrainEngineConfig
from areal.models import decoder_args, vision_args
from areal.models.common.args import DecoderArgs, share_of
from areal.models.parallel_dims import ParallelDims, check_heads, check_layout
from areal.models.stage_layout import StageLayout
from areal.models.vision.args import VisionArgs
from areal.utils.hub import model_folder
from areal.utils.model_files import language_config, read_hf_config

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig
    from areal.api.config.inference import InferenceEngineConfig
    from areal.api.config.inference_servers import NativeServerConfig


SEEN_AHEAD = "the image tokens of this model see each other, which fsdp does not compute"
# Back ends that see: of actor.backend, and of rollout.backend.
IMAGE_TRAINERS, IMAGE_SERVERS = ("archon", "fsdp"), ("native", "sglang", "vllm")
# That read images, as `workflow` of a config names them.
VISION_WORKFLOWS = frozenset({"vision_rlvr", "areal.workflow.vision_rlvr.VisionRLVRWorkflow"})
MEGATRON_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_GPU_DRIVER = Path("/proc/driver/nvidia/gpus")
_EXPERT_LAYERS = {"gate_proj", "up_proj", "down_proj"}
# Of tables in transformers' source, and of keys and layers in a config.json.
_ROW = re.compile(r"\(\s*\"([\w.-]+)\",\s*\(?\"(\w+)\"")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")


def check_models(
    config: BaseExperimentConfig,
    hf_configs: Mapping[str, Mapping[str, Any]],
    *,
    runs_here: bool = True,
) -> None:
    """Every role whose config.json is known (`hf_configs`, by role) fits its engine. A run on
    another machine has packages of its own."""
    models = config.models()
    for role, section in models.items():
        if role not in hf_configs:
            continue
        engine = section
        try:
            if isinstance(engine, FrozenModelConfig):
                actor = models["actor"]
                assert isinstance(actor, TrainEngineConfig), "the actor is trained"
                engine = engine.engine_config(actor)  # may refuse what it has of the actor
            check_training(engine, hf_configs[role], runs_here=runs_here)
        except ValueError as error:
            where = f"{role}.backend: {section.backend!r} with {section.path!r}"
            raise ValueError(f"{where}: {error}") from None
    if isinstance(config, PPOConfig) and "actor" in hf_configs:
        try:
            _check_servers(config, hf_configs["actor"])
        except ValueError as error:
            where = f"rollout.backend: {config.rollout.backend!r} with {config.actor.path!r}"
            raise ValueError(f"{where}: {error}") from None
        for role, section in config.served_models().items():
            if role in hf_configs:
                _check_served(config.of_teacher(), section.path, hf_configs[role])
        if config.rollout.return_routed_experts:
            check_router_replay(config, hf_configs["actor"])
        check_sight(config, hf_configs["actor"])
        if config.rollout.use_lora and config.rollout.engine != "native":
            _check_served_adapters(config.actor, hf_configs["actor"])


def _check_served(config: PPOConfig, path: str | None, hf_config: Mapping[str, Any]) -> None:
    """`config` as the servers of the model at `path` see it."""
    try:
        _check_servers(config, hf_config)
    except ValueError as error:
        where = f"teacher.backend: {config.rollout.backend!r} with {path!r}"
        raise ValueError(f"{where}: {error}") from None


def _check_servers(config: PPOConfig, hf_config: Mapping[str, Any]) -> None:
    """The servers that a run starts can cut the model as rollout.backend says."""
    if config.rollout.engine == "native":
        check_generation(config.rollout, config.native, hf_config)
    elif not config.rollout.api_url:
        _check_stock(config, hf_config)


def _check_stock(config: PPOConfig, hf_config: Mapping[str, Any]) -> None:
    """What vLLM and SGLang refuse after a minute. They check the rest of a model themselves."""
    rollout, text = config.rollout, language_config(hf_config)
    heads, tp = text.get("num_attention_heads"), rollout.tensor_parallel
    layers, pp = text.get("num_hidden_layers"), rollout.pipeline_parallel
    # Such ranks of SGLang cut attention less, or not.
    has_copies = rollout.engine == "sglang" and "--enable-dp-attention" in config.sglang.extra_args
    if isinstance(heads, int) and heads % tp and not has_copies:
        raise ValueError(
            f"t{tp} cannot cut this model: num_attention_heads of its config.json must be a "
            f"multiple of {tp}, got {heads}; choose another t"
        )
    if isinstance(layers, int) and pp > layers:
        raise ValueError(
            f"p{pp} cannot cut this model: each stage needs a layer, and num_hidden_layers of its "
            f"config.json is {layers}; choose a smaller p"
        )


def _check_served_adapters(actor: TrainEngineConfig, hf_config: Mapping[str, Any]) -> None:
    """No adapters of experts, which only archon trains."""
    if ModelAllocation.from_str(actor.backend).backend != "archon":
        return
    named = sorted(_EXPERT_LAYERS & set(actor.target_modules))
    if named and decoder_args(hf_config).moe is not None:
        raise ValueError(
            f"rollout.use_lora must be false when actor.target_modules names layers of experts "
            f"({', '.join(named)}): stock servers get their adapters merged into the weights"
        )


def check_router_replay(config: PPOConfig, hf_config: Mapping[str, Any]) -> None:
    """The servers record experts, and the actor can train with them."""
    if config.rollout.engine != "native":
        raise ValueError(
            f"rollout.return_routed_experts: {config.rollout.backend!r} returns none; use "
            "rollout.backend native"
        )
    actor = ModelAllocation.from_str(config.actor.backend)
    if actor.backend != "archon":
        raise ValueError(
            f"rollout.return_routed_experts: {config.actor.backend!r} trains with experts of its "
            "own choice; use actor.backend archon"
        )
    num_replicas = config.actor.archon.num_replicas
    check_replay(
        decoder_args(hf_config), ParallelDims.of(actor.parallel, num_replicas=num_replicas)
    )


def check_sight(config: PPOConfig, hf_config: Mapping[str, Any]) -> None:
    """A workflow that shows images has a model that sees them, trained and served by back ends that
    do."""
    used = {"workflow": config.workflow, "eval_workflow": config.eval_workflow}
    for key, name in used.items():
        if name not in VISION_WORKFLOWS:
            continue
        if vision_args(hf_config) is None:
            raise ValueError(
                f"{key}: {name} shows images, and {config.actor.path!r} (model_type "
                f"{hf_config['model_type']}) reads text only here; name a model with a vision "
                "tower in actor.path, or use a workflow and a data set of text"
            )
        trainer = ModelAllocation.from_str(config.actor.backend).backend
        _require_sight(key, name, "actor.backend", trainer, IMAGE_TRAINERS)
        if trainer == "fsdp" and sees_ahead(hf_config):
            raise ValueError(f"{key}: {name} shows images, and {SEEN_AHEAD}; use archon")
        _require_sight(key, name, "rollout.backend", config.rollout.engine, IMAGE_SERVERS)


def sees(config: TrainEngineConfig) -> bool:
    """Whether the model of `config` has a vision tower that its back end computes."""
    hf_config = read_hf_config(model_folder(config.path, weights=False))
    if ModelAllocation.from_str(config.backend).backend == "fsdp":  # of any family
        return "vision_config" in hf_config
    return vision_args(hf_config) is not None


def _require_sight(
    key: str, workflow: str, where: str, backend: str | None, known: tuple[str, ...]
) -> None:
    if backend not in known:
        raise ValueError(
            f"{key}: {workflow} shows images, and {where} {backend!r} takes text only; expected "
            f"{' or '.join(known)}"
        )


def check_replay(args: DecoderArgs, dims: ParallelDims) -> None:
    """Archon can compute by given experts."""
    if args.moe is None:
        raise ValueError(
            f"rollout.return_routed_experts: this {args.model_type} has no experts; turn it off"
        )
    if dims.tp > 1 or dims.pp > 1:
        raise ValueError(
            "rollout.return_routed_experts: archon has no router replay with tensor or pipeline "
            "parallelism; lay the actor out with d, c and e"
        )


def check_training(
    config: TrainEngineConfig, hf_config: Mapping[str, Any], *, runs_here: bool = True
) -> None:
    """The model of `hf_config` can be trained (or run forward) as `config` says."""
    if runs_here:
        _check_packages(config)
    allocation = ModelAllocation.from_str(config.backend)
    layout = allocation.parallel
    if allocation.backend == "archon":
        args = decoder_args(hf_config, is_critic=config.is_critic)
        check_archon(config, args, ParallelDims.of(layout, num_replicas=config.archon.num_replicas))
    elif allocation.backend == "fsdp":
        dims = ParallelDims.of(layout, num_replicas=config.fsdp.num_replicas)
        check_fsdp(config, hf_config, dims)
    else:
        check_megatron(config, decoder_args(hf_config, is_critic=config.is_critic), layout)


def _check_packages(config: TrainEngineConfig) -> None:
    """Optional ones that the back end needs are installed."""
    backend = ModelAllocation.from_str(config.backend).backend
    if backend == "megatron" and importlib.util.find_spec("megatron") is None:
        raise ValueError(
            "backend megatron needs the package megatron-core: pip install 'areal[megatron]'"
        )
    if backend == "fsdp" and config.use_lora and importlib.util.find_spec("peft") is None:
        raise ValueError("use_lora needs the package peft: pip install 'areal[lora]'")


def check_generation(
    rollout: InferenceEngineConfig, native: NativeServerConfig, hf_config: Mapping[str, Any]
) -> None:
    """The native server can generate with the model; stock servers check their own models."""
    if rollout.engine != "native":
        return
    args = decoder_args(hf_config)
    if rollout.tensor_parallel > 1:
        share_of(args, rollout.tensor_parallel)
    if native.batch_invariant:
        _check_batch_invariant(args)


def check_archon(config: TrainEngineConfig, args: DecoderArgs, dims: ParallelDims) -> None:
    _check_vision(config, args)
    check_layout(args, dims)
    if dims.pp > 1:
        stage_layout(config, args, dims.pp)
    if config.batch_invariant:
        _check_batch_invariant(args)
    if config.archon.fp8_forward and (args.moe is not None or args.delta is not None):
        found = "layers with a recurrent state" if args.moe is None else "experts"
        raise ValueError(
            "archon.fp8_forward rounds dense models as an FP8 server does, and this one has "
            f"{found}: set it to false"
        )
    if config.archon.trains_in_fp8 and (args.latent is not None or args.delta is not None):
        found = "layers with a recurrent state" if args.latent is None else "latent attention"
        raise ValueError(
            f"archon.fp8_config.mode {config.archon.fp8_config.mode}: it trains layers with plain "
            f"attention, and this {args.model_type} has {found}: set it to disabled"
        )
    if config.enable_tree_training and args.delta is not None:
        raise ValueError(
            "enable_tree_training: sequences of a tree share keys and values of their prefix, and "
            f"this {args.model_type} has layers with a recurrent state: set it to false"
        )


def _check_vision(config: TrainEngineConfig, args: DecoderArgs) -> None:
    if args.vision is None:
        if config.freeze_vision_tower:
            raise ValueError(
                f"freeze_vision_tower: areal's {args.model_type} has no vision tower; set it to "
                "false"
            )
    elif config.enable_tree_training:
        raise ValueError(
            f"enable_tree_training: prefix trees do not compute images, which this "
            f"{args.model_type} sees; set it to false"
        )


def stage_layout(config: TrainEngineConfig, args: DecoderArgs, num_ranks: int) -> StageLayout:
    """The stages of Archon's pipeline."""
    archon = config.archon
    return StageLayout.of(
        args.n_layers,
        num_ranks=num_ranks,
        schedule=archon.pp_schedule,
        layers_per_stage=archon.pp_layers_per_stage,
        embedding_layers=archon.pp_first_stage_less_layers,
        head_layers=archon.pp_last_stage_less_layers,
    )


def check_fsdp(config: TrainEngineConfig, hf_config: Mapping[str, Any], dims: ParallelDims) -> None:
    check_transformers_family(hf_config, is_critic=config.is_critic)
    _check_fsdp_vision(config, hf_config, dims)
    text = language_config(hf_config)
    heads = text.get("num_attention_heads")
    if heads is not None:  # some families use another key, with a default
        check_heads(heads, text.get("num_key_value_heads") or heads, dims)


def _check_fsdp_vision(
    config: TrainEngineConfig, hf_config: Mapping[str, Any], dims: ParallelDims
) -> None:
    if "vision_config" not in hf_config:
        if config.freeze_vision_tower:
            raise ValueError(
                f"freeze_vision_tower: this {hf_config['model_type']} has no vision tower; set it "
                "to false"
            )
        return
    if config.enable_tree_training:
        raise ValueError(
            f"enable_tree_training: prefix trees do not compute images, which this "
            f"{hf_config['model_type']} sees; set it to false"
        )
    is_new = hf_config["model_type"] not in (_classes("CAUSAL_LM") or {})
    if is_new and (dims.tp > 1 or dims.cp > 1):
        raise ValueError(
            f"t{dims.tp}c{dims.cp}: fsdp does not cut a model with images "
            f"({hf_config['model_type']}) over tensor or context parallel ranks; use d"
        )


def banned_ids(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens without probability: image placeholders of a model that the native engine sees with,
    which masks them too. Servers of other families do not."""
    vision = _own_tower(hf_config)
    return () if vision is None else vision.placeholder_ids


def sees_ahead(hf_config: Mapping[str, Any]) -> bool:
    """Whether the tokens of an image see those behind them, too: see `SEEN_AHEAD`."""
    vision = _own_tower(hf_config)
    return vision is not None and vision.is_bidirectional


def _own_tower(hf_config: Mapping[str, Any]) -> VisionArgs | None:
    try:
        return decoder_args(hf_config).vision
    except ValueError:  # a family that areal has none of
        return None


def check_megatron(config: TrainEngineConfig, args: DecoderArgs, layout: ParallelStrategy) -> None:
    _check_megatron_family(args)
    stages_per_rank = config.megatron.virtual_pipeline_parallel_size
    check_equal_stages(layout.pipeline_parallel_size, stages_per_rank, args.n_layers)
    tp, cp = layout.tensor_parallel_size, layout.context_parallel_size
    ep, expert_tp = layout.expert_parallel_size, layout.expert_tensor_parallel_size
    counts = [("t", tp, "intermediate_size", args.hidden_dim)]
    if args.moe is not None:
        counts.append(("e", ep, "num_experts", args.moe.num_experts))
        counts.append(("t", expert_tp, "moe_intermediate_size", args.moe.hidden_dim))
    for letter, size, key, count in counts:
        if count % size:
            raise ValueError(
                f"{letter}{size} cannot cut this model: {key} of its config.json must be a "
                f"multiple of {size}, got {count}; choose another {letter}"
            )
    check_heads(args.n_heads, args.n_kv_heads, ParallelDims(tp=tp, cp=cp))
    if args.moe is None and ep * expert_tp > 1:
        raise ValueError(
            f"the layout megatron:{layout} spreads experts, and this model has none: remove e"
        )
    if args.moe is not None and ep == 1 and tp != expert_tp:
        # Only with e > 1 does megatron-core reduce expert gradients in a group of their own.
        raise ValueError(
            f"the layout megatron:{layout} copies the experts over t{tp}, which megatron-core "
            f"does not train: spread them with e{tp}, or cut them like the rest with "
            f"(attn:{layout}|ffn:d{layout.data_parallel_size}t{tp})"
        )


def _check_megatron_family(args: DecoderArgs) -> None:
    """ValueError for features of the checkpoint that its stages do not compute."""
    if args.model_type not in MEGATRON_FAMILIES:
        raise ValueError(
            f"backend megatron trains models of type {', '.join(MEGATRON_FAMILIES)}, got "
            f"{args.model_type!r}: use backend archon or fsdp"
        )
    refused = {
        "attention_bias with a bias of o_proj": args.attention_out_bias,
        "mlp_bias": args.mlp_bias,
        "use_expert_bias": args.moe is not None and args.moe.expert_bias,
    }
    for key, found in refused.items():
        if found:
            raise ValueError(
                f"backend megatron has no {key}, which this model's config.json asks for: use "
                "backend archon"
            )


def _check_batch_invariant(args: DecoderArgs) -> None:
    if args.moe is not None and _GPU_DRIVER.exists():  # on a CPU it needs no kernel
        raise ValueError(
            "batch_invariant: there is no such kernel for experts; turn it off for this model"
        )
    if args.delta is not None:
        raise ValueError(
            "batch_invariant: there is no such kernel for layers with a recurrent state; turn it "
            "off for this model"
        )
    if args.vision is not None and args.vision.is_bidirectional:
        raise ValueError(
            "batch_invariant: there is no such kernel for images whose tokens all see each other; "
            "turn it off for this model"
        )


def check_transformers_family(hf_config: Mapping[str, Any], *, is_critic: bool) -> None:
    """ValueError for a model that packed attention cannot compute, as far as the source tells."""
    model_type = hf_config["model_type"]
    classes = _classes("SEQUENCE_CLASSIFICATION" if is_critic else "CAUSAL_LM")
    if not is_critic and classes is not None:
        classes = {**(_classes("IMAGE_TEXT_TO_TEXT") or {}), **classes}
    if classes is None:  # a release of transformers with another layout
        return
    if model_type not in classes:
        own_code = " (it brings code of its own, which areal does not run)"
        kind = "sequence classifier, which a critic is" if is_critic else "causal language model"
        raise ValueError(
            f"model_type {model_type!r} is no {kind} that transformers has"
            f"{own_code if 'auto_map' in hf_config else ''}: use another model"
        )
    name, text = classes[model_type], _modeling_text(model_type)
    if text is not None and "_supports_attention_backend = True" not in text:
        raise ValueError(
            f"{name} has attention of its own, which lets packed sequences see each other: use "
            "another model"
        )
    asked = _asked_of_attention(hf_config, text or "")
    if asked:
        raise ValueError(
            f"{name} needs {asked} in its attention, which packed attention does not compute: use "
            "another model"
        )
    language = hf_config.get("text_config") or hf_config
    layers = {str(layer) for key in _LAYER_KEYS for layer in language.get(key) or ()}
    if odd := sorted(layers - _ATTENTION_LAYERS):
        raise ValueError(
            f"{name} has layers of {', '.join(odd)}, which mix tokens other than by attention, so "
            "that packed sequences see each other: use another model"
        )


def _asked_of_attention(hf_config: Mapping[str, Any], text: str) -> str | None:
    language = hf_config.get("text_config") or hf_config
    if language.get("attn_logit_softcapping") and "softcap" in text:
        return "softcap"
    return "s_aux (attention sinks)" if "s_aux" in text else None


@cache
def _classes(table: str) -> dict[str, str] | None:
    """Model type -> class."""
    return _table("modeling_auto.py", f"MODEL_FOR_{table}_MAPPING_NAMES")


def _modeling_text(model_type: str) -> str | None:
    folders = _table("auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME") or {}
    folder = folders.get(model_type, model_type.replace("-", "_"))
    file = _models() / folder / f"modeling_{folder}.py"
    return file.read_text(encoding="utf-8") if file.is_file() else None


@cache
def _table(file: str, name: str) -> dict[str, str] | None:
    """A literal `NAME = OrderedDict([("key", "value"), ...])` of transformers."""
    path = _models() / "auto" / file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    _, found, rest = text.partition(f"\n{name} = OrderedDict(")
    return dict(_ROW.findall(rest.partition("\n)")[0])) if found else None


def _models() -> Path:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "models"
