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
    ulysses_keys,
    world_size,
)
from temper_legacy_shim.configs.mapping.rows import apply_rows, fact, role_fact
from temper_legacy_shim.configs.reading.config_values import Plain

_OFFLOADS = ("param_offload", "cpu_offload", "offload_params")


def set_layout(draft: Draft, role: OldRole) -> None:
    """Set offload, sharding, parallelism and the number of ranks."""
    blocks = role.blocks(draft)
    apply_rows(draft, "offload", **blocks)
    if is_megatron(draft):
        apply_rows(draft, "megatron", **blocks)
    else:
        apply_rows(draft, "strategy", **blocks)
        _fsdp_size(draft, role, fsdp_block(draft, role))
        apply_rows(draft, "fsdp", **blocks)
    _set_workers(draft, role)


@role_fact
def offload_keys(draft: Draft, role: OldRole) -> str:
    """Return the keys of the offload of parameters, any of which switches it on."""
    block = role.megatron if is_megatron(draft) else fsdp_block(draft, role)
    policy = [f"{block}.offload_policy"] * reads_offload_policy(draft, role)
    own = f"{role.block}.param_offload"
    return " and ".join([*(f"{block}.{name}" for name in _OFFLOADS), own, *policy])


@role_fact
def offloads(draft: Draft, role: OldRole) -> bool:
    return any(map(draft.switch, offload_keys(draft, role).split(" and ")))


@role_fact
def reads_offload_policy(draft: Draft, role: OldRole) -> bool:
    # _build_model_optimizer reads offload_policy in its branch of fsdp2 alone, as an argument of
    # fully_shard().
    return not is_megatron(draft) and draft.text(f"{role.block}.strategy") == "fsdp2"


@fact
def sharding_name(draft: Draft) -> str:
    return "Megatron" if is_megatron(draft) else "FSDP1, which this role trains with,"


@role_fact
def sequence_keys(_: Draft, role: OldRole) -> str:
    return " and ".join(ulysses_keys(role))


@role_fact
def wrapped_layers(draft: Draft, role: OldRole) -> list[Plain]:
    """Return the classes of layers that were wrapped each."""
    wrap = draft.old.get(f"{fsdp_block(draft, role)}.wrap_policy.transformer_layer_cls_to_wrap")
    return wrap if isinstance(wrap, list) else [wrap] if wrap else []


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


def _set_workers(draft: Draft, role: OldRole) -> None:
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
