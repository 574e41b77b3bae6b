"""Build the FSDP engine's configuration from an old worker's blocks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import LoraSpec, ModelSpec, ModelType, OffloadSpec, OptimizerSpec, PrecisionSpec, ScheduleSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_legacy_shim.workers.engines import NEVER
from temper_legacy_shim.workers.settings import block, known
from temper_legacy_shim.workers.updates import OldSchedule

Values = Mapping[str, object]


def engine_config(
    model: Values, *, fsdp: Values, optim: Values | None, actor: Values, model_type: ModelType, keeps_old_schedule: bool
) -> FSDPConfig:
    """Return the engine of one role.

    Args:
        model: ``model`` block: path, trust_remote_code, LoRA and gradient checkpointing.
        fsdp: ``fsdp_config`` block: sharding, precision, offloading.
        optim: ``optim`` block; None for a frozen model.
        actor: the role's own block: strategy, grad_clip, ulysses_sequence_parallel_size.
        model_type: the head.
        keeps_old_schedule: the worker sets every learning rate itself, so that the engine's schedule is constant.

    Raises:
        ConfigError: a setting that this release can't carry on; names it.
    """
    _refuse_unsupported(model, actor=actor, optim=optim)
    schedule = ScheduleSpec() if optim is None or keeps_old_schedule else _schedule(known(OldSchedule, optim))
    return FSDPConfig(
        model=ModelSpec(path=str(model["path"]), model_type=model_type, trust_remote_code=bool(model.get("trust_remote_code", False))),
        optimizer=None if optim is None else _optimizer(optim, grad_clip=actor.get("grad_clip")),
        schedule=schedule,
        precision=PrecisionSpec(compute=_compute_dtype(fsdp)),
        offload=OffloadSpec(
            parameters=bool(fsdp.get("param_offload", False)),
            optimizer=optim is not None and bool(fsdp.get("optimizer_offload", False)),
        ),
        lora=_lora(model),
        strategy=_strategy(actor),
        fsdp_size=None if fsdp.get("fsdp_size", -1) in (-1, None) else _integer(fsdp, "fsdp_size"),
        reshard_after_forward=bool(fsdp.get("reshard_after_forward", True)) or _strategy(actor) == "fsdp1",
        wrap_modules=_wrap_modules(fsdp),
        activation_checkpointing=bool(model.get("enable_gradient_checkpointing", False)),
    )


def _refuse_unsupported(model: Values, *, actor: Values, optim: Values | None) -> None:
    sharing = actor.get("ulysses_sequence_parallel_size") or 1
    if sharing != 1:
        raise ConfigError(
            f"ulysses_sequence_parallel_size is {sharing}, which the deprecated workers of this release do not carry on: set it to 1, or "
            "use an engine that claims sequence parallel."
        )
    if model.get("lora_adapter_path") is not None:
        raise ConfigError("model.lora_adapter_path is set: load the adapter with engine.load_adapter() after init_model() instead.")
    overrides = {name: value for name, value in block(model, "override_config").items() if value not in (None, {})}
    if overrides.keys() - {"attn_implementation"}:
        raise ConfigError(f"model.override_config sets {sorted(overrides)}: write them into the config.json next to the weights instead.")
    if optim is not None and (optim.get("optimizer", "AdamW") != "AdamW" or optim.get("override_optimizer_config")):
        raise ConfigError(
            f"optim.optimizer is {optim.get('optimizer')!r} with override_optimizer_config {optim.get('override_optimizer_config')!r}: the "
            "deprecated workers carry on AdamW without further options."
        )


def _optimizer(optim: Values, *, grad_clip: object) -> OptimizerSpec:
    given = known(OptimizerSpec, {name: optim.get(name) for name in ("lr", "weight_decay", "eps")})
    betas = cast("list[float] | None", optim.get("betas"))
    return replace(
        given,
        betas=given.betas if betas is None else (float(betas[0]), float(betas[1])),
        clip_grad_norm=None if grad_clip is None else float(cast("float", grad_clip)),
        decays_vectors=True,
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


def _compute_dtype(fsdp: Values) -> Literal["bf16", "fp32"]:
    """Return the dtype of matmuls.

    Bfloat16 under autocast unless parameters and FSDP's cast both say float32.
    """
    mixed = block(fsdp, "mixed_precision").get("param_dtype", "bf16")
    names = {str(value) for value in (mixed, fsdp.get("dtype", mixed))}
    if not names <= {"bf16", "bfloat16", "fp32", "float32"}:
        raise ConfigError(f"fsdp_config asks to compute in {sorted(names)}: the deprecated workers know bfloat16 and float32.")
    return "fp32" if names & {"fp32", "float32"} else "bf16"


def _lora(model: Values) -> LoraSpec:
    rank = _integer(model, "lora_rank") if model.get("lora_rank") else 0
    if rank == 0:
        return LoraSpec()
    modules = model.get("target_modules", "all-linear")
    chosen = modules if isinstance(modules, str) else tuple(str(name) for name in cast("list[object]", modules))
    return LoraSpec(rank=rank, alpha=float(cast("float", model.get("lora_alpha", 16))), target_modules=chosen)


def _strategy(actor: Values) -> Literal["fsdp1", "fsdp2"]:
    name = actor.get("strategy", "fsdp")
    if name not in ("fsdp", "fsdp2"):
        raise ConfigError(f"strategy is {name!r}, but the FSDP workers take fsdp or fsdp2.")
    return "fsdp1" if name == "fsdp" else "fsdp2"


def _wrap_modules(fsdp: Values) -> tuple[str, ...]:
    names = block(fsdp, "wrap_policy").get("transformer_layer_cls_to_wrap")
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(str(name) for name in cast("list[object]", names))


def _integer(values: Values, name: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, but must be a whole number.")
    return value


def compute_rank_sizes(role: Values, *, num_ranks: int, rollout_n: object, where: str) -> dict[str, object]:
    """Return the role's sizes as each rank uses them.

    Old configs give prompts, and totals over all ranks.

    Raises:
        ConfigError: nothing is left for a rank.
    """
    sizes = dict(role)
    mini = _integer(role, "ppo_mini_batch_size") * (rollout_n if isinstance(rollout_n, int) else 1) // num_ranks
    if mini < 1:
        raise ConfigError(f"{where}.ppo_mini_batch_size is {role['ppo_mini_batch_size']}, too few for each of {num_ranks} ranks.")
    sizes["ppo_mini_batch_size"] = mini
    if role.get("ppo_micro_batch_size") is not None:
        sizes["ppo_micro_batch_size_per_gpu"] = _integer(role, "ppo_micro_batch_size") // num_ranks
    micro = sizes.get("ppo_micro_batch_size_per_gpu")
    if isinstance(micro, int) and not role.get("use_dynamic_bsz") and (micro < 1 or mini % micro):
        raise ConfigError(
            f"{where}: each rank's mini-batch has {mini} rows, but must be a multiple of ppo_micro_batch_size_per_gpu, which is {micro}."
        )
    return sizes
