"""The layout of each role: offload, sharding, model and expert parallelism, and number of ranks."""

import math

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.roles.roles import (
    CLUSTER_KEYS,
    OldRole,
    fsdp_block,
    is_megatron,
    megatron_sizes,
    replica_size,
    sequence_parallel,
    ulysses_keys,
    world_size,
)
from temper_legacy_shim.configs.mapping.rows import apply_rows
from temper_legacy_shim.configs.reading.config_values import Plain

_OFFLOADS = ("param_offload", "cpu_offload", "offload_params")


def set_offload(draft: Draft, role: OldRole) -> None:
    block = role.megatron if is_megatron(draft) else fsdp_block(draft, role)
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
    # HybridDeviceOptimizer of Megatron-Core, which keeps states and updates on the CPU.
    hybrid = f"{role.optim}.override_optimizer_config.optimizer_cpu_offload"
    if draft.switch(hybrid):
        # The Megatron engine has no update on the CPU; its nearest setting moves the states there.
        kind = "optimizer" if is_megatron(draft) else "optimizer_on_cpu"
        draft.put(f"{engine}.{kind}", True, rule="optimizer-cpu", old=[hybrid])
        if is_megatron(draft):
            draft.find("optimizer-cpu", hybrid)
        draft.explain_drop(
            f"{block}.optimizer_offload",
            "the optimizer lives on the CPU all the time (optimizer_cpu_offload)",
        )
        return
    draft.put(
        f"{engine}.optimizer",
        draft.switch(f"{block}.optimizer_offload"),
        rule="optimizer-offload",
        old=[f"{block}.optimizer_offload"],
    )


def _policy(draft: Draft, role: OldRole, block: str) -> list[str]:
    """Return FSDP2's key for offloading, which had no effect elsewhere."""
    key = f"{block}.offload_policy"
    # _build_model_optimizer reads offload_policy in its branch of fsdp2 alone, as an argument of
    # fully_shard().
    if not is_megatron(draft) and draft.text(f"{role.block}.strategy") == "fsdp2":
        return [key]
    if draft.switch(key) and draft.old.is_set(key):
        engine = "Megatron" if is_megatron(draft) else "FSDP1, which this role trains with,"
        name = "offload-policy" if role.block not in ("engine", "model") else "sft-offload"
        draft.find(name, key, engine_name=engine, engine=role.engine)
    return []


def set_fsdp(draft: Draft, role: OldRole) -> None:
    engine, block = role.engine, fsdp_block(draft, role)
    strategy_key = f"{role.block}.strategy"
    strategy = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}.get(draft.text(strategy_key) or "fsdp")
    if strategy is None:
        value = draft.text(strategy_key)
        if value == "fsdp_turbo" and draft.since("main"):
            draft.find("strategy.turbo", strategy_key, value=value)
        else:
            draft.find("strategy.not-fsdp", strategy_key, value=value)
        strategy = "fsdp2"
    draft.put(f"{engine}.strategy", strategy, rule="strategy", old=[strategy_key])
    _fsdp_size(draft, role, block)
    sharing = sequence_parallel(draft, role)
    draft.put(
        f"{engine}.sequence_parallel", sharing, rule="sequence-parallel", old=ulysses_keys(role)
    )
    reshard = draft.old.get(f"{block}.reshard_after_forward")
    # True is the default of both systems, and a number is the size of a smaller group.
    if strategy == "fsdp2" and isinstance(reshard, bool | int) and reshard is not True:
        draft.put(
            f"{engine}.reshard_after_forward",
            reshard,
            rule="reshard",
            old=[f"{block}.reshard_after_forward"],
            verbatim=True,
        )
    apply_rows(draft, "prefetch", **role.blocks(draft))
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
        apply_rows(draft, "checkpointing", **role.blocks(draft))


def _fsdp_size(draft: Draft, role: OldRole, block: str) -> None:
    """Set the number of ranks that shard one copy; a larger one meant all ranks."""
    key = f"{block}.fsdp_size"
    size, world = draft.integer(key), _known_world(draft)
    # create_device_mesh makes one axis of all ranks for -1. Else it makes replicas of fsdp_size
    # ranks (HSDP).
    if size is None or size < 1:
        return
    if world is not None and size > world:
        draft.explain_drop(key, f"there are {world} ranks, and all of them shard, as with -1")
        return
    draft.put(f"{role.engine}.fsdp_size", size, rule="fsdp-size", old=[key], verbatim=True)
    if world is not None and world % size:
        _refuse_ranks(draft, role, size, world, [key])


def set_megatron(draft: Draft, role: OldRole) -> None:
    engine, block = role.engine, role.megatron
    tensor = draft.integer(f"{block}.tensor_model_parallel_size") or 1
    pipeline = draft.integer(f"{block}.pipeline_model_parallel_size") or 1
    apply_rows(draft, "megatron", **role.blocks(draft))
    # Megatron-Core has chunks of layers only between stages, and refuses them with one stage.
    chunks = draft.integer(f"{block}.virtual_pipeline_model_parallel_size")
    if chunks is not None and chunks > 1 and pipeline > 1:
        key = f"{block}.virtual_pipeline_model_parallel_size"
        draft.put(
            f"{engine}.virtual_pipeline", chunks, rule="virtual-pipeline", old=[key], verbatim=True
        )
    # The converter of verl sets it for more than one tensor rank, and Megatron-Core refuses it for
    # one. Releases without the key had it on.
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
        apply_rows(draft, "distributed-optimizer", **role.blocks(draft))


def _transformer(draft: Draft, role: OldRole) -> None:
    """Set recomputation and the expert-balancing loss from Megatron's own configuration."""
    block = f"{role.megatron}.override_transformer_config"
    apply_rows(draft, "recompute", **role.blocks(draft))
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
    """Set the ranks that share experts, and the tensor size of one expert."""
    # Without a tensor size of the experts, Megatron-Core takes that of the other layers.
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


def set_workers(draft: Draft, role: OldRole) -> None:
    for key in () if draft.cluster is not None else CLUSTER_KEYS:
        if (number := draft.integer(key)) is not None and number < 1:
            draft.find("cluster", key, number=number)
    world = world_size(draft)
    # Fine-tuning has the number from torchrun, which no configuration contains.
    if world is None:  # at least the ranks that one copy of the model asks for
        world = replica_size(draft, role)
    if world > 1:
        draft.put(f"{role.name}.num_workers", world, rule="cluster", old=CLUSTER_KEYS)
    _check_copies(draft, role)


def _check_copies(draft: Draft, role: OldRole) -> None:
    """Report copies of model or experts that do not divide the ranks: old workers failed."""
    world = _known_world(draft)
    if world is None:
        return
    copies = (
        [megatron_sizes(role), _expert_sizes(draft, role)]
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


def _expert_sizes(draft: Draft, role: OldRole) -> list[str]:
    """Return the sizes whose product holds one copy of the experts; None without them."""
    key, split = (
        f"{role.megatron}.expert_model_parallel_size",
        f"{role.megatron}.expert_tensor_parallel_size",
    )
    if (draft.integer(key) or 1) == 1:
        return []
    tensor, pipeline, _ = megatron_sizes(role)
    return [key, pipeline, tensor if draft.text(split) in ("", "None") else split]
