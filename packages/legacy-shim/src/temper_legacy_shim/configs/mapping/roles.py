"""The engine of each role.

Model, adapter, optimizer, schedule, sharding, offload, and how many ranks it has.
"""

import math
from dataclasses import dataclass

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl_facts import num_weight_syncs, updates_per_schedule_step
from temper_legacy_shim.configs.mapping.rules import apply_rules
from temper_legacy_shim.configs.reading.config_values import Plain, from_home


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRole:
    """Blocks of one role in the old tree."""

    name: str
    """actor, critic or ref."""
    block: str
    """The role's own block."""
    model: str
    """Its model block; the reference shares the actor's."""
    fsdp: tuple[str, ...]
    """Sharding blocks of the role; the first that exists counts."""
    is_trained: bool
    """True if it has an optimizer."""
    megatron: str = ""
    optim: str = ""
    ulysses: str = ""
    """A further key of the ranks that share a sequence."""

    @property
    def engine(self) -> str:
        """Its engine in the new configuration."""
        return f"{self.name}.engine"

    def blocks(self, draft: Draft) -> dict[str, str]:
        """Return the role's blocks, for rules that apply to several roles."""
        parent = "critic" if self.name == "critic" else _HYBRID
        blocks = {
            "model": self.model,
            "megatron": self.megatron,
            "optim": self.optim,
            "fsdp": _block(draft, self),
        }
        return {"engine": self.engine, "parent": parent, **blocks}


_HYBRID = "actor_rollout_ref"


def _make_ppo_role(
    name: str, block: str, *, model: str, fsdp: tuple[str, ...], is_trained: bool
) -> OldRole:
    return OldRole(
        name=name,
        block=block,
        model=model,
        fsdp=fsdp,
        is_trained=is_trained,
        megatron=f"{block}.megatron",
        optim=f"{block}.optim",
    )


ACTOR = _make_ppo_role(
    "actor",
    f"{_HYBRID}.actor",
    model=f"{_HYBRID}.model",
    fsdp=(f"{_HYBRID}.actor.fsdp_config",),
    is_trained=True,
)
REF = _make_ppo_role(
    "ref",
    f"{_HYBRID}.ref",
    model=f"{_HYBRID}.model",
    fsdp=(f"{_HYBRID}.ref.fsdp_config",),
    is_trained=False,
)
CRITIC = _make_ppo_role(
    "critic",
    "critic",
    model="critic.model",
    fsdp=("critic.fsdp", "critic.model.fsdp_config"),
    is_trained=True,
)
SFT = OldRole(
    name="actor",
    block="engine",
    model="model",
    fsdp=("engine",),
    is_trained=True,
    megatron="engine",
    optim="optim",
)
COLUMNS = OldRole(
    name="actor",
    block="model",
    model="model",
    fsdp=("model.fsdp_config",),
    is_trained=True,
    optim="optim",
    ulysses="ulysses_sequence_parallel_size",
)


CLUSTER_KEYS = ("trainer.nnodes", "trainer.n_gpus_per_node")


def world_size(draft: Draft) -> int | None:
    """Return the processes of the run: nodes times GPUs of each; None if it is not known."""
    if draft.cluster is not None:
        return max(1, draft.cluster.nodes * draft.cluster.gpus_per_node)
    if draft.old.family.startswith("sft") and not draft.old.is_set(*CLUSTER_KEYS):
        return None  # torchrun's numbers, which no configuration has
    nodes, gpus = draft.integer("trainer.nnodes"), draft.integer("trainer.n_gpus_per_node")
    if nodes is None and gpus is None:
        return None
    return max(1, (nodes or 1) * (gpus or 1))


def is_megatron(draft: Draft) -> bool:
    """Check if the tree is Megatron's."""
    return draft.old.family.endswith("megatron")


def sequence_parallel(draft: Draft, role: OldRole) -> int:
    """Return the ranks that shared a sequence (Ulysses), as the release read it."""
    keys = ulysses_keys(role)
    result = [draft.integer(key) or 1 for key in keys if draft.old.has(key)]
    return max(result, default=1)


def ulysses_keys(role: OldRole) -> list[str]:
    """Return the keys that hold the number of ranks per sequence."""
    own = [role.ulysses] if role.ulysses else []
    return [
        *own,
        f"{role.block}.ulysses_sequence_parallel_size",
        *(f"{block}.ulysses_sequence_parallel_size" for block in role.fsdp),
    ]


def data_parallel(draft: Draft, role: OldRole) -> int | None:
    """Return the number of ranks with different samples."""
    world = world_size(draft)
    if world is None:
        return None
    return max(1, world // replica_size(draft, role))


def build_role(draft: Draft, role: OldRole) -> None:
    """Set everything of one role."""
    _model(draft, role)
    if role.is_trained:
        _optimizer(draft, role)
        _schedule(draft, role)
    _precision(draft, role)
    _offload(draft, role)
    if is_megatron(draft):
        _megatron(draft, role)
    else:
        _fsdp(draft, role)
    _workers(draft, role)


def _model(draft: Draft, role: OldRole) -> None:
    engine = role.engine
    if role.name != "ref":  # the group ref=frozen takes the actor's
        key = next(
            (
                key
                for key in (f"{role.model}.path", f"{role.model}.partial_pretrain")
                if draft.text(key)
            ),
            f"{role.model}.path",
        )
        path = draft.text(key)
        if path:
            here = from_home(path)
            draft.put(
                f"{engine}.model.path", here, rule="model-path", old=[key], verbatim=here == path
            )
        elif role.name == "actor":
            draft.find("model-path.missing", f"{role.model}.path", model=role.model)
        apply_rules(draft, "trust-remote-code", "nccl-timeout", blocks=role.blocks(draft))
        if role.name == "actor":
            _tokenizer(draft, role)
        if role.name == "critic":
            draft.put(f"{engine}.model.model_type", "value_model", rule="critic", old=[])


def _tokenizer(draft: Draft, role: OldRole) -> None:
    key = f"{role.model}.tokenizer_path"
    path = draft.text(key)
    if path and path != draft.text(f"{role.model}.path"):
        here = from_home(path)
        draft.put(
            "data.tokenizer.path", here, rule="tokenizer-path", old=[key], verbatim=here == path
        )


def _optimizer(draft: Draft, role: OldRole) -> None:
    engine, optim = f"{role.engine}.optimizer", role.optim
    blocks = role.blocks(draft)
    apply_rules(draft, "lr", "weight-decay", blocks=blocks)
    _clip(draft, role)
    if _another_optimizer(draft, role):
        return
    betas = draft.old.get(f"{optim}.betas")
    draft.put(
        f"{engine}.betas",
        betas if isinstance(betas, list) else [0.9, 0.999],
        rule="betas",
        old=[f"{optim}.betas"],
    )
    if not is_megatron(draft):
        apply_rules(draft, "decays-vectors", blocks=blocks)


def _another_optimizer(draft: Draft, role: OldRole) -> bool:
    """Check if an optimizer other than AdamW was requested; it has no betas here."""
    key = f"{role.optim}.optimizer"
    name, home = draft.text(key), draft.text(f"{role.optim}.optimizer_impl") or "torch.optim"
    if name.lower() in ("", "adamw", "adam"):
        return False
    if is_megatron(draft):
        draft.find("optimizer-kind", key, name=name)
        return True
    draft.put(
        f"{role.engine}.optimizer.name",
        f"{home}.{name}",
        rule="optimizer-kind",
        old=[key, f"{role.optim}.optimizer_impl"],
    )
    arguments = draft.old.get(f"{role.optim}.override_optimizer_config")
    if isinstance(arguments, dict) and arguments:
        draft.put(
            f"{role.engine}.optimizer.arguments",
            arguments,
            rule="optimizer-kind",
            old=[f"{role.optim}.override_optimizer_config"],
        )
    return True


def _clip(draft: Draft, role: OldRole) -> None:
    """Set the gradient clip from the key that the release used; there are two."""
    own, optim = f"{role.block}.grad_clip", f"{role.optim}.clip_grad"
    reads_own = not is_megatron(draft) and (not draft.since("v0.8.0") or draft.old.is_set(own))
    key = (
        own
        if reads_own
        and draft.old.has(own)
        and not (draft.since("v0.8.0") and draft.old.is_set(optim))
        else optim
    )
    if draft.old.has(key):
        norm = draft.number(key)
        if norm is not None and norm <= 0:  # Megatron's word for never
            draft.put(f"{role.engine}.optimizer.clip_grad_norm", None, rule="grad-clip", old=[key])
        else:
            draft.copy(
                f"{role.engine}.optimizer.clip_grad_norm", key, rule="grad-clip", expected="number"
            )
    if key == own and draft.since("v0.8.0"):
        draft.find("grad-clip", own, optim=optim)


_STYLES = ("warmup_style", "lr_scheduler_type", "lr_decay_style")
_RATIOS = ("lr_warmup_steps_ratio", "warmup_steps_ratio")


def _schedule(draft: Draft, role: OldRole) -> None:
    engine, optim = f"{role.engine}.schedule", role.optim
    styles = (
        _STYLES if role.block != "model" else ("lr_scheduler",)
    )  # the first generation of fine-tuning read no other
    style_key = next(
        (key for key in (f"{optim}.{name}" for name in styles) if _is_given(draft, key)), ""
    )
    # Before v0.4.0 the first generation of fine-tuning had one schedule, and no key for it.
    kind = draft.text(style_key) or ("cosine" if role.block == "model" else "constant")
    target = {
        "constant": "constant",
        "cosine": "cosine",
        "linear": "linear",
        "wsd": "wsd",
        "WSD": "wsd",
    }.get(kind)
    if target is None:
        draft.find("schedule-kind", style_key, kind=kind)
        target = "constant"
    ratio_key = next(
        (f"{optim}.{name}" for name in _RATIOS if _is_given(draft, f"{optim}.{name}")),
        f"{optim}.{_RATIOS[0]}",
    )
    warmup, ratio = draft.number(f"{optim}.lr_warmup_steps"), draft.number(ratio_key)
    draft.put(f"{engine}.kind", target, rule="schedule-kind", old=[style_key] if style_key else [])
    if warmup is not None and warmup >= 0 and (warmup > 0 or not is_megatron(draft)):
        if warmup > 0:
            steps = int(warmup) * (updates_per_schedule_step(draft) or 1)
            draft.put(
                f"{engine}.warmup_steps",
                steps,
                rule="warmup",
                old=[f"{optim}.lr_warmup_steps"],
                verbatim=steps == warmup,
            )
        draft.explain_drop(ratio_key, "lr_warmup_steps is set and wins over the ratio")
    elif ratio:
        draft.put(
            f"{engine}.warmup_ratio", float(ratio), rule="warmup", old=[ratio_key], verbatim=True
        )
    if target != "constant":
        _floor(draft, engine, optim)
    if target != "constant" or f"{engine}.warmup_ratio" in draft.settings:
        _schedule_length(draft, engine, optim)
    if {f"{engine}.warmup_steps", f"{engine}.warmup_ratio"} & draft.settings.keys():
        draft.find("warmup", f"{optim}.lr_warmup_steps")
    unit = updates_per_schedule_step(draft)
    if role.block not in ("engine", "model"):  # supervised steps are updates
        draft.put(
            f"{engine}.advance", "rl_step" if unit is None else "update", rule="schedule-advance"
        )
    if unit is not None and unit > 1:
        draft.find("schedule-advance", unit=unit, role=role.name)


def _floor(draft: Draft, engine: str, optim: str) -> None:
    """Set the floor of a falling schedule; Megatron's is a rate, not a fraction of the peak."""
    fraction, rate, peak = (
        draft.number(f"{optim}.min_lr_ratio"),
        draft.number(f"{optim}.min_lr"),
        draft.number(f"{optim}.lr"),
    )
    if fraction is None and rate and peak:
        fraction = rate / peak
    draft.put(
        f"{engine}.min_lr_ratio",
        float(min(1.0, fraction or 0.0)),
        rule="min-lr",
        old=[f"{optim}.min_lr_ratio", f"{optim}.min_lr"],
    )


def _is_given(draft: Draft, key: str) -> bool:
    return draft.old.get(key) is not None


def _schedule_length(draft: Draft, engine: str, optim: str) -> None:
    """Set the schedule's length; 0 stands for the length of the run, as in the old trainer."""
    keys = (f"{optim}.lr_decay_steps", f"{optim}.total_training_steps")
    key = next((key for key in keys if (draft.number(key) or 0) > 0), "")
    unit = updates_per_schedule_step(draft)
    if key:
        steps = (draft.integer(key) or 0) * (unit or 1)
        draft.put(
            f"{engine}.total_steps",
            steps,
            rule="schedule-length",
            old=[key],
            verbatim=unit in (None, 1),
        )
    elif unit is not None:
        _asynchronous_length(draft, engine, key=keys[-1], unit=unit)
    else:
        draft.put(
            f"{engine}.total_steps",
            0,
            rule="schedule-length",
            old=["trainer.total_training_steps", "trainer.total_epochs"],
        )


def _asynchronous_length(draft: Draft, engine: str, *, key: str, unit: int) -> None:
    """Set the length of a schedule that was given in weight syncs but counted trainer calls."""
    syncs, keys = num_weight_syncs(draft)
    if syncs is None or not draft.since("v0.7.1"):
        draft.find("schedule-length", key, engine=engine)
        return
    draft.put(f"{engine}.total_steps", syncs * unit, rule="schedule-length", old=keys)


def _precision(draft: Draft, role: OldRole) -> None:
    fsdp = _block(draft, role)
    engine = f"{role.engine}.precision"
    words = {
        "bf16": "bf16",
        "bfloat16": "bf16",
        "fp16": "fp16",
        "float16": "fp16",
        "half": "fp16",
        "fp32": "fp32",
        "float32": "fp32",
    }
    compute = words.get(
        draft.text(f"{fsdp}.mixed_precision.param_dtype") or draft.text(f"{fsdp}.dtype") or "bf16",
        "bf16",
    )
    old = [f"{fsdp}.mixed_precision.param_dtype", f"{fsdp}.dtype"]
    draft.put(f"{engine}.compute", compute, rule="compute-dtype", old=old)
    if not role.is_trained or is_megatron(draft):
        return
    master = words.get(draft.text(f"{fsdp}.model_dtype") or "fp32", "fp32")
    if master == "fp16" or (master == "bf16" and compute == "fp16"):
        master = "fp32"
    draft.put(f"{engine}.parameters", master, rule="master-dtype", old=[f"{fsdp}.model_dtype"])
    reduce = words.get(draft.text(f"{fsdp}.mixed_precision.reduce_dtype") or "fp32", "fp32")
    draft.put(
        f"{engine}.reduce",
        "bf16" if reduce == "bf16" else "fp32",
        rule="reduce-dtype",
        old=[f"{fsdp}.mixed_precision.reduce_dtype"],
    )


def _block(draft: Draft, role: OldRole) -> str:
    return next((block for block in role.fsdp if draft.old.has(block)), role.fsdp[0])


_OFFLOADS = ("param_offload", "cpu_offload", "offload_params")


def _offload(draft: Draft, role: OldRole) -> None:
    block = role.megatron if is_megatron(draft) else _block(draft, role)
    engine = f"{role.engine}.offload"
    old = [
        *(f"{block}.{name}" for name in _OFFLOADS),
        f"{role.block}.param_offload",
        *_policy(draft, role, block),
    ]
    offloads = any(draft.switch(key) for key in old)
    draft.put(f"{engine}.parameters", offloads, rule="param-offload", old=old)
    if not role.is_trained:
        return
    grads = f"{block}.grad_offload"
    if draft.old.has(grads) and draft.switch(grads) != offloads:
        draft.put(f"{engine}.gradients", draft.switch(grads), rule="grad-offload", old=[grads])
    hybrid = f"{role.optim}.override_optimizer_config.optimizer_cpu_offload"
    if draft.switch(hybrid):
        draft.put(f"{engine}.optimizer_on_cpu", True, rule="optimizer-cpu", old=[hybrid])
        draft.explain_drop(
            f"{block}.optimizer_offload",
            "the optimiser lives on the CPU all the time (optimizer_cpu_offload)",
        )
        return
    draft.put(
        f"{engine}.optimizer",
        draft.switch(f"{block}.optimizer_offload"),
        rule="optimizer-offload",
        old=[f"{block}.optimizer_offload"],
    )


def _policy(draft: Draft, role: OldRole, block: str) -> list[str]:
    """Return FSDP2's key for offloading, if the role uses FSDP2.

    Elsewhere it did nothing.
    """
    key = f"{block}.offload_policy"
    if not is_megatron(draft) and draft.text(f"{role.block}.strategy") == "fsdp2":
        return [key]
    if draft.switch(key) and draft.old.is_set(key):
        engine = "Megatron" if is_megatron(draft) else "FSDP1, which this role trains with,"
        name = "offload-policy" if role.block not in ("engine", "model") else "sft-offload"
        draft.find(name, key, engine_name=engine, engine=role.engine)
    return []


def _fsdp(draft: Draft, role: OldRole) -> None:
    engine, block = role.engine, _block(draft, role)
    strategy_key = f"{role.block}.strategy"
    strategy = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}.get(draft.text(strategy_key) or "fsdp")
    if strategy is None:
        draft.find("strategy.not-fsdp", strategy_key, value=draft.text(strategy_key))
        strategy = "fsdp2"
    draft.put(f"{engine}.strategy", strategy, rule="strategy", old=[strategy_key])
    _fsdp_size(draft, role, block)
    sharing = sequence_parallel(draft, role)
    draft.put(
        f"{engine}.sequence_parallel", sharing, rule="sequence-parallel", old=ulysses_keys(role)
    )
    reshard = draft.old.get(f"{block}.reshard_after_forward")
    if strategy == "fsdp2" and isinstance(reshard, bool | int) and reshard is not True:
        draft.put(
            f"{engine}.reshard_after_forward",
            reshard,
            rule="reshard",
            old=[f"{block}.reshard_after_forward"],
            verbatim=True,
        )
    apply_rules(draft, "prefetch", blocks=role.blocks(draft))
    wrap = draft.old.get(f"{block}.wrap_policy.transformer_layer_cls_to_wrap")
    if wrap:
        names: Plain = wrap if isinstance(wrap, list) else [wrap]
        draft.put(
            f"{engine}.wrap_modules",
            names,
            rule="wrap-policy",
            old=[f"{block}.wrap_policy.transformer_layer_cls_to_wrap"],
        )
    if role.is_trained:
        apply_rules(draft, "checkpointing", blocks=role.blocks(draft))


def _fsdp_size(draft: Draft, role: OldRole, block: str) -> None:
    """Set the number of ranks that shard one copy.

    The old mesh took a larger number for all ranks.
    """
    key = f"{block}.fsdp_size"
    size, world = draft.integer(key), _known_world(draft)
    if size is None or size < 1:
        return
    if world is not None and size > world:
        draft.explain_drop(key, f"there are {world} ranks, and all of them shard, as with -1")
        return
    draft.put(f"{role.engine}.fsdp_size", size, rule="fsdp-size", old=[key], verbatim=True)
    if world is not None and world % size:
        _refuse_ranks(draft, role, size, world, [key])


def _megatron(draft: Draft, role: OldRole) -> None:
    engine, block = role.engine, role.megatron
    tensor = draft.integer(f"{block}.tensor_model_parallel_size") or 1
    pipeline = draft.integer(f"{block}.pipeline_model_parallel_size") or 1
    apply_rules(
        draft, "tensor-parallel", "pipeline-parallel", "context-parallel", blocks=role.blocks(draft)
    )
    chunks = draft.integer(f"{block}.virtual_pipeline_model_parallel_size")
    if chunks is not None and chunks > 1 and pipeline > 1:
        key = f"{block}.virtual_pipeline_model_parallel_size"
        draft.put(
            f"{engine}.virtual_pipeline", chunks, rule="virtual-pipeline", old=[key], verbatim=True
        )
    is_sequence = tensor > 1 and (
        draft.switch(f"{block}.sequence_parallel")
        or not draft.old.has(f"{block}.sequence_parallel")
    )
    if is_sequence:
        draft.put(
            f"{engine}.sequence_parallel",
            True,
            rule="megatron-sequence-parallel",
            old=[f"{block}.sequence_parallel"],
        )
    _experts(draft, role)
    if role.is_trained:
        _transformer(draft, role)
        apply_rules(draft, "distributed-optimizer", blocks=role.blocks(draft))


def _transformer(draft: Draft, role: OldRole) -> None:
    """Set recomputation and the expert-balancing loss from Megatron's own configuration."""
    block = f"{role.megatron}.override_transformer_config"
    apply_rules(draft, "recompute", blocks=role.blocks(draft))
    weight = draft.number(f"{block}.moe_aux_loss_coeff")
    if (
        weight is not None
        and weight > 0
        and draft.text(f"{block}.moe_router_load_balancing_type") not in ("none", "None")
    ):
        draft.put(
            f"{role.engine}.router_aux_loss",
            float(weight),
            rule="router-loss",
            old=[f"{block}.moe_aux_loss_coeff"],
        )


def _experts(draft: Draft, role: OldRole) -> None:
    """Set the ranks that share experts.

    The tensor size of one expert matters only with expert parallel.
    """
    key, split = (
        f"{role.megatron}.expert_model_parallel_size",
        f"{role.megatron}.expert_tensor_parallel_size",
    )
    size = draft.integer(key) or 1
    draft.put(
        f"{role.engine}.expert_parallel", size, rule="expert-parallel", old=[key], verbatim=True
    )
    if size == 1:
        draft.explain_drop(
            split, "experts are not divided over ranks, so that it follows tensor_parallel"
        )
        return
    if draft.text(split) not in ("", "None"):
        draft.put(
            f"{role.engine}.expert_tensor_parallel",
            draft.integer(split),
            rule="expert-parallel",
            old=[split],
            verbatim=True,
        )


def _workers(draft: Draft, role: OldRole) -> None:
    world = world_size(draft)
    if world is None:  # at least the ranks that one copy of the model asks for
        world = replica_size(draft, role)
    if world > 1:
        draft.put(f"{role.name}.num_workers", world, rule="cluster", old=CLUSTER_KEYS)
    _check_copies(draft, role)


def _check_copies(draft: Draft, role: OldRole) -> None:
    """Report sizes of model or expert copies that do not divide the number of ranks.

    The old workers failed with them.
    """
    world = _known_world(draft)
    if world is None:
        return
    copies = (
        [_megatron_sizes(role), _expert_sizes(draft, role)]
        if is_megatron(draft)
        else [ulysses_keys(role)]
    )
    for keys in copies:
        sizes = {key: draft.integer(key) or 1 for key in keys if draft.old.has(key)}
        ranks = math.prod(sizes.values()) if is_megatron(draft) else max(sizes.values(), default=1)
        if world % ranks:
            _refuse_ranks(
                draft, role, ranks, world, [key for key, size in sizes.items() if size > 1]
            )
            return


def _refuse_ranks(draft: Draft, role: OldRole, size: int, world: int, keys: list[str]) -> None:
    given = ", ".join(f"{key}={draft.integer(key)}" for key in keys)
    draft.find("layout-divides", *keys, role=role.name, given=given, size=size, world=world)


def _known_world(draft: Draft) -> int | None:
    """Return the ranks of the run, where every number of them is known."""
    if draft.cluster is None and any(
        draft.old.has(key) and draft.integer(key) is None for key in CLUSTER_KEYS
    ):
        return None
    return world_size(draft)


def _megatron_sizes(role: OldRole) -> list[str]:
    return [f"{role.megatron}.{name}_model_parallel_size" for name in ("tensor", "pipeline")] + [
        f"{role.megatron}.context_parallel_size"
    ]


def _expert_sizes(draft: Draft, role: OldRole) -> list[str]:
    """Return the sizes whose product holds one copy of the experts.

    None if they are not divided.
    """
    key, split = (
        f"{role.megatron}.expert_model_parallel_size",
        f"{role.megatron}.expert_tensor_parallel_size",
    )
    if (draft.integer(key) or 1) == 1:
        return []
    tensor, pipeline, _ = _megatron_sizes(role)
    return [key, pipeline, tensor if draft.text(split) in ("", "None") else split]


def replica_size(draft: Draft, role: OldRole) -> int:
    """Return the ranks that hold one copy of the model and see the same samples."""
    if not is_megatron(draft):
        return sequence_parallel(draft, role)
    return math.prod(draft.integer(key) or 1 for key in _megatron_sizes(role))
