"""Build an engine's configuration, FSDP or Megatron, from an old worker's blocks."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import (
    LoraSpec,
    ModelSpec,
    ModelType,
    OffloadSpec,
    OptimizerSpec,
    PrecisionSpec,
    ScheduleSpec,
)
from temper_engine_fsdp.config import FSDPConfig
from temper_legacy_shim.errors import format_extra_install
from temper_legacy_shim.workers.batches.settings import block, known
from temper_legacy_shim.workers.batches.updates import OldMegatronSchedule, OldSchedule
from temper_legacy_shim.workers.engine.adopted_models import NEVER, ConfigureEngine

if TYPE_CHECKING:
    from temper_engine_megatron.config import MegatronConfig


Values = Mapping[str, object]


def build_fsdp_config(
    model: Values,
    *,
    fsdp: Values,
    optim: Values | None,
    actor: Values,
    model_type: ModelType,
    keeps_old_schedule: bool,
) -> FSDPConfig:
    """Return the engine of one role.

    Args:
        model: ``model`` block: path, trust_remote_code, LoRA and gradient checkpointing.
        fsdp: ``fsdp_config`` block: sharding, precision, offloading.
        optim: ``optim`` block; None for a frozen model.
        actor: the role's own block: strategy, grad_clip, ulysses_sequence_parallel_size.
        model_type: the head.
        keeps_old_schedule: the worker sets every learning rate itself, so that the engine's
            schedule is constant.

    Raises:
        ConfigError: a setting that this release can't carry on; names it.
    """
    _refuse_unsupported_fsdp(model, actor=actor, optim=optim)
    schedule = (
        ScheduleSpec()
        if optim is None or keeps_old_schedule
        else _schedule(known(OldSchedule, optim))
    )
    return FSDPConfig(
        model=ModelSpec(
            path=str(model["path"]),
            model_type=model_type,
            trust_remote_code=bool(model.get("trust_remote_code", False)),
        ),
        optimizer=None
        if optim is None
        else _fsdp_optimizer(optim, grad_clip=actor.get("grad_clip")),
        schedule=schedule,
        precision=PrecisionSpec(compute=_fsdp_dtype(fsdp)),
        offload=OffloadSpec(
            parameters=bool(fsdp.get("param_offload", False)),
            optimizer=optim is not None and bool(fsdp.get("optimizer_offload", False)),
        ),
        lora=_fsdp_lora(model),
        strategy=_strategy(actor),
        fsdp_size=None if fsdp.get("fsdp_size", -1) in (-1, None) else _integer(fsdp, "fsdp_size"),
        # Only FSDP2 read this setting; FSDP1 always resharded.
        reshard_after_forward=bool(fsdp.get("reshard_after_forward", True))
        or _strategy(actor) == "fsdp1",
        wrap_modules=_wrap_modules(fsdp),
        activation_checkpointing=bool(model.get("enable_gradient_checkpointing", False)),
    )


def _refuse_unsupported_fsdp(model: Values, *, actor: Values, optim: Values | None) -> None:
    """Refuse settings that would change the result and that FSDPEngine does not get."""
    sharing = actor.get("ulysses_sequence_parallel_size") or 1
    if sharing != 1:
        raise ConfigError(
            f"ulysses_sequence_parallel_size is {sharing}, which the deprecated workers of this "
            "release do not carry on: set it to 1, or use an engine that claims sequence parallel."
        )
    if model.get("lora_adapter_path") is not None:
        raise ConfigError(
            "model.lora_adapter_path is set: load the adapter with engine.load_adapter() after "
            "init_model() instead."
        )
    overrides = {
        name: value
        for name, value in block(model, "override_config").items()
        if value not in (None, {})
    }
    if overrides.keys() - {"attn_implementation"}:
        raise ConfigError(
            f"model.override_config sets {sorted(overrides)}: write them into the config.json next "
            "to the weights instead."
        )
    if optim is not None and (
        optim.get("optimizer", "AdamW") != "AdamW" or optim.get("override_optimizer_config")
    ):
        raise ConfigError(
            f"optim.optimizer is {optim.get('optimizer')!r} with override_optimizer_config "
            f"{optim.get('override_optimizer_config')!r}: the "
            "deprecated workers carry on AdamW without further options."
        )


def _fsdp_optimizer(optim: Values, *, grad_clip: object) -> OptimizerSpec:
    given = known(OptimizerSpec, {name: optim.get(name) for name in ("lr", "weight_decay", "eps")})
    betas = cast("list[float] | None", optim.get("betas"))
    return replace(
        given,
        betas=given.betas if betas is None else (float(betas[0]), float(betas[1])),
        clip_grad_norm=None if grad_clip is None else float(cast("float", grad_clip)),
        # The old optimizer had one parameter group, so the decay applied to biases and norms, too.
        decays_vectors=True,
        # The old workers skipped any number of updates that were not finite.
        max_consecutive_skips=NEVER,
    )


def _schedule(old: OldSchedule) -> ScheduleSpec:
    if old.lr_scheduler_type == "constant":
        return ScheduleSpec(warmup_steps=old.warmup, advance="rl_step")
    return ScheduleSpec(
        kind="cosine",
        warmup_steps=old.warmup,
        total_steps=old.total_training_steps,
        min_lr_ratio=old.min_lr_ratio or 0.0,
        advance="rl_step",
    )


def _fsdp_dtype(fsdp: Values) -> Literal["bf16", "fp32"]:
    """Return matmuls' dtype: bfloat16, unless parameters and casts are float32."""
    mixed = block(fsdp, "mixed_precision").get("param_dtype", "bf16")
    names = {str(value) for value in (mixed, fsdp.get("dtype", mixed))}
    if not names <= {"bf16", "bfloat16", "fp32", "float32"}:
        raise ConfigError(
            f"fsdp_config asks to compute in {sorted(names)}: the deprecated workers know bfloat16 "
            "and float32."
        )
    return "fp32" if names & {"fp32", "float32"} else "bf16"


def _fsdp_lora(model: Values) -> LoraSpec:
    rank = _integer(model, "lora_rank") if model.get("lora_rank") else 0
    if rank == 0:
        return LoraSpec()
    modules = model.get("target_modules", "all-linear")
    chosen = (
        modules
        if isinstance(modules, str)
        else tuple(str(name) for name in cast("list[object]", modules))
    )
    return LoraSpec(
        rank=rank, alpha=float(cast("float", model.get("lora_alpha", 16))), target_modules=chosen
    )


def _strategy(actor: Values) -> Literal["fsdp1", "fsdp2"]:
    name = actor.get("strategy", "fsdp")
    if name not in ("fsdp", "fsdp2"):
        raise ConfigError(f"strategy is {name!r}, but the FSDP workers take fsdp or fsdp2.")
    return "fsdp1" if name == "fsdp" else "fsdp2"


def _wrap_modules(fsdp: Values) -> tuple[str, ...]:
    names = block(fsdp, "wrap_policy").get("transformer_layer_cls_to_wrap")
    if names is None:
        return ()
    return (
        (names,)
        if isinstance(names, str)
        else tuple(str(name) for name in cast("list[object]", names))
    )


def _integer(values: Values, name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, but must be a whole number.")
    return value


def compute_rank_sizes(
    role: Values, *, num_ranks: int, rollout_n: object, where: str
) -> dict[str, object]:
    """Return the role's sizes as each rank uses them.

    Old configs give prompts, and totals over all ranks.

    Raises:
        ConfigError: nothing is left for a rank.
    """
    sizes = dict(role)
    mini = (
        _integer(role, "ppo_mini_batch_size")
        * (rollout_n if isinstance(rollout_n, int) else 1)
        // num_ranks
    )
    if mini < 1:
        raise ConfigError(
            f"{where}.ppo_mini_batch_size is {role['ppo_mini_batch_size']}, too few for each of "
            f"{num_ranks} ranks."
        )
    sizes["ppo_mini_batch_size"] = mini
    if role.get("ppo_micro_batch_size") is not None:
        sizes["ppo_micro_batch_size_per_gpu"] = _integer(role, "ppo_micro_batch_size") // num_ranks
    micro = sizes.get("ppo_micro_batch_size_per_gpu")
    if isinstance(micro, int) and not role.get("use_dynamic_bsz") and (micro < 1 or mini % micro):
        raise ConfigError(
            f"{where}: each rank's mini-batch has {mini} rows, but must be a multiple of "
            f"ppo_micro_batch_size_per_gpu, which is {micro}."
        )
    return sizes


_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
}
"""Megatron's names of modules that an adapter can target, and Hugging Face's."""

_NO_OVERRIDE: Values = {
    "recompute_granularity": None,
    "recompute_modules": ["core_attn"],
    "recompute_method": None,
    "recompute_num_layers": None,
    "attention_backend": "flash",
}
"""Old defaults of ``override_transformer_config``, which change no number."""


def build_megatron_config(
    model: Values,
    *,
    megatron: Values,
    optim: Values | None,
    role: Values,
    model_type: ModelType,
    keeps_old_schedule: bool,
) -> "MegatronConfig":
    """Return the engine of one role.

    Args:
        model: ``model`` block: path, trust_remote_code, LoRA.
        megatron: ``megatron`` block: sizes of the layout, precision, offloading, overrides.
        optim: ``optim`` block; None for a frozen model.
        role: the role's block, for the strategy.
        model_type: the head.
        keeps_old_schedule: the worker sets every learning rate itself, so that the engine's
            schedule is constant.

    Raises:
        ConfigError: a setting that this release can't carry on; names it.
    """
    if role.get("strategy", "megatron") != "megatron":
        raise ConfigError(
            f"strategy is {role.get('strategy')!r}, but the Megatron workers take megatron."
        )
    _refuse_unsupported_megatron(megatron, optim=optim)
    schedule = (
        ScheduleSpec()
        if optim is None or keeps_old_schedule
        else known(OldMegatronSchedule, optim).as_spec()
    )
    configure = _Configure(
        megatron,
        schedule=schedule,
        offload=OffloadSpec(
            parameters=bool(megatron.get("param_offload", False)),
            optimizer=optim is not None and bool(megatron.get("optimizer_offload", False)),
        ),
        lora=_megatron_lora(model),
    )
    return configure(
        model=ModelSpec(
            path=str(model["path"]),
            model_type=model_type,
            trust_remote_code=bool(model.get("trust_remote_code", False)),
        ),
        optimizer=None if optim is None else _megatron_optimizer(optim),
        precision=PrecisionSpec(compute=_megatron_dtype(megatron)),
    )


def adopted_config(megatron: Values) -> ConfigureEngine:
    """Return the layout of a ``megatron`` block around a model that the caller brings."""
    _refuse_unsupported_megatron(megatron, optim=None)
    return _Configure(megatron, schedule=ScheduleSpec(), offload=OffloadSpec(), lora=LoraSpec())


class _Configure:
    """A layout that waits for its model."""

    def __init__(
        self, megatron: Values, *, schedule: ScheduleSpec, offload: OffloadSpec, lora: LoraSpec
    ) -> None:
        self._megatron = megatron
        self._schedule, self._offload, self._megatron_lora = schedule, offload, lora

    def __call__(
        self, *, model: ModelSpec, optimizer: OptimizerSpec | None, precision: PrecisionSpec
    ) -> "MegatronConfig":
        values, tensor = self._megatron, _size(self._megatron, "tensor_model_parallel_size")
        return _config_class()(
            model=model,
            optimizer=optimizer,
            schedule=self._schedule,
            precision=precision,
            offload=self._offload,
            lora=self._megatron_lora,
            tensor_parallel=tensor,
            # As before: without tensor-parallel ranks the old default of True had no effect.
            sequence_parallel=tensor > 1 and bool(values.get("sequence_parallel", True)),
            pipeline_parallel=_size(values, "pipeline_model_parallel_size"),
            virtual_pipeline=None
            if values.get("virtual_pipeline_model_parallel_size") is None
            else _size(values, _VIRTUAL),
            context_parallel=_size(values, "context_parallel_size"),
            expert_parallel=_size(values, "expert_model_parallel_size"),
            expert_tensor_parallel=None
            if values.get(_EXPERT_TENSOR) is None
            else _size(values, _EXPERT_TENSOR),
            distributed_optimizer=optimizer is not None
            and bool(values.get("use_distributed_optimizer", True)),
        )


_VIRTUAL = "virtual_pipeline_model_parallel_size"
_EXPERT_TENSOR = "expert_tensor_parallel_size"


def _config_class() -> "type[MegatronConfig]":
    try:
        from temper_engine_megatron.config import MegatronConfig
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the deprecated Megatron workers run on temper-engine-megatron, which is not "
            f"installed: run {format_extra_install('workers-megatron')}."
        ) from error
    return MegatronConfig


def _refuse_unsupported_megatron(megatron: Values, *, optim: Values | None) -> None:
    """Refuse settings that would change the result and that MegatronEngine does not get."""
    if megatron.get("use_dist_checkpointing"):
        raise ConfigError(
            "megatron.use_dist_checkpointing is set, which began from a checkpoint in Megatron's "
            "layout: convert that one with "
            "`temper-migrate checkpoint DIR --to hf --out NEW`, and set model.path to NEW."
        )
    overrides = dict(block(megatron, "override_transformer_config"))
    others = {
        name
        for name, value in overrides.items()
        if value is not None and value != _NO_OVERRIDE.get(name)
    }
    for where in ("override_ddp_config", "override_mcore_model_config"):
        others |= {f"{where}.{name}" for name in block(megatron, where)}
    if others:
        raise ConfigError(
            f"megatron overrides {', '.join(sorted(others))}, which the deprecated workers do not "
            "carry on: remove them."
        )
    if optim is not None and (
        optim.get("optimizer", "adam") not in ("adam", "AdamW")
        or optim.get("override_optimizer_config")
    ):
        raise ConfigError(
            f"optim.optimizer is {optim.get('optimizer')!r} with override_optimizer_config "
            f"{optim.get('override_optimizer_config')!r}: the "
            "deprecated workers carry on adam without further options."
        )
    if megatron.get("grad_offload"):
        warnings.warn(
            "megatron.grad_offload has no effect: gradients stay where the engine computes.",
            UserWarning,
            stacklevel=2,
        )


def _megatron_optimizer(optim: Values) -> OptimizerSpec:
    given = known(OptimizerSpec, {name: optim.get(name) for name in ("lr", "weight_decay")})
    clip = optim.get("clip_grad", 1.0)
    return OptimizerSpec(
        lr=given.lr,
        weight_decay=given.weight_decay,
        # Megatron takes 0 for "never". Betas never reached the optimizer, whose defaults are these.
        betas=(0.9, 0.999),
        clip_grad_norm=float(cast("float", clip)) or None if clip is not None else None,
        max_consecutive_skips=NEVER,
    )


def _megatron_dtype(megatron: Values) -> Literal["bf16", "fp32"]:
    name = str(megatron.get("dtype", "bfloat16"))
    if name not in ("bf16", "bfloat16", "fp32", "float32"):
        raise ConfigError(
            f"megatron.dtype is {name}: the deprecated workers know bfloat16 and float32."
        )
    return "fp32" if name in ("fp32", "float32") else "bf16"


def _megatron_lora(model: Values) -> LoraSpec:
    """Return the adapter with verl's defaults of Megatron, which differ from those of FSDP."""
    given = block(model, "lora")
    rank = given.get("rank", 0)
    if not isinstance(rank, int) or rank <= 0:
        return LoraSpec()
    if given.get("adapter_path") is not None:
        raise ConfigError(
            f"model.lora.adapter_path is {given['adapter_path']!r}: convert it with "
            "`temper-migrate checkpoint DIR --to peft --out NEW`, "
            "and call engine.load_adapter() after init_model()."
        )
    if given.get("type", "lora") not in ("lora", "canonical_lora"):
        raise ConfigError(
            f"model.lora.type is {given['type']!r}, but the deprecated workers carry on lora and "
            "canonical_lora."
        )
    return LoraSpec(
        rank=rank,
        alpha=float(cast("float", given.get("alpha", 32))),
        dropout=float(cast("float", given.get("dropout", 0.0))),
        target_modules=_hf_modules(
            given.get("target_modules", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])
        ),
        exclude_modules=_hf_modules(given.get("exclude_modules") or []),
    )


def _hf_modules(names: object) -> tuple[str, ...]:
    if not isinstance(names, list) or any(name not in _MODULES for name in names):
        raise ConfigError(
            f"model.lora names the modules {names}, but the deprecated workers know "
            f"{', '.join(_MODULES)}."
        )
    return tuple(dict.fromkeys(hf for name in names for hf in _MODULES[name]))


def _size(values: Values, name: str) -> int:
    value = values.get(name)
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"megatron.{name} is {value!r}, but must be a whole number.")
    return value
