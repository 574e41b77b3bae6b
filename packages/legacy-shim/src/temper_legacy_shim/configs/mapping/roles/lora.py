"""Adapters.

Which of the two old families of keys the release's engine read, and with which alpha.
"""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.roles.roles import OldRole, is_megatron
from temper_legacy_shim.configs.reading.config_values import Plain

_MEGATRON_NAMES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def build_lora(draft: Draft, role: OldRole) -> None:
    """Set the adapter of one role.

    FSDP reads the flat keys, Megatron the block, and neither the other's.
    """
    flat, block = f"{role.model}.lora_rank", f"{role.model}.lora.rank"
    read, unread = (block, flat) if is_megatron(draft) else (flat, block)
    rank, other = draft.integer(read) or 0, draft.integer(unread) or 0
    if other > 0:
        _unread(draft, read=read, unread=unread, rank=rank, other=other)
    path_key = (
        f"{role.model}.lora.adapter_path"
        if is_megatron(draft)
        else f"{role.model}.lora_adapter_path"
    )
    path, engine = draft.text(path_key), f"{role.engine}.lora"
    if path:
        draft.put(f"{engine}.path", path, rule="lora-path", old=[path_key], verbatim=True)
        draft.explain_drop(read, "the adapter's own adapter_config.json decides it")
        return
    if rank <= 0:
        return
    draft.put(f"{engine}.rank", rank, rule="lora-rank", old=[read], verbatim=True)
    alpha_key = f"{role.model}.lora.alpha" if is_megatron(draft) else f"{role.model}.lora_alpha"
    alpha = draft.number(alpha_key)
    draft.put(
        f"{engine}.alpha",
        float(alpha if alpha is not None else (32 if is_megatron(draft) else 16)),
        rule="lora-alpha",
        old=[alpha_key],
        verbatim=True,
    )
    _modules(draft, role, engine)


def _unread(draft: Draft, *, read: str, unread: str, rank: int, other: int) -> None:
    if rank == other:
        draft.explain_drop(unread, f"the engine read {read}, which says the same")
        return
    kind = "Megatron" if is_megatron(draft) else "FSDP"
    draft.find(
        "lora-family",
        read,
        unread,
        unread=unread,
        other=other,
        rank=rank,
        kind=kind,
        detail="all weights, without an adapter" if rank == 0 else f"an adapter of rank {rank}",
    )


def _modules(draft: Draft, role: OldRole, engine: str) -> None:
    prefix = f"{role.model}.lora." if is_megatron(draft) else f"{role.model}."
    key = f"{prefix}target_modules"
    value = draft.old.get(key)
    targets = _names(value)
    if targets is not None:
        draft.put(
            f"{engine}.target_modules",
            targets,
            rule="lora-targets",
            old=[key],
            verbatim=targets == value,
        )
    dropout = f"{prefix}dropout"
    if is_megatron(draft) and draft.number(dropout):
        draft.copy(f"{engine}.dropout", dropout, rule="lora-dropout", expected="number")
    excluded = draft.old.get(f"{prefix}exclude_modules")
    if excluded:
        draft.put(
            f"{engine}.exclude_modules",
            _names(excluded),
            rule="lora-excludes",
            old=[f"{prefix}exclude_modules"],
        )


def _names(value: Plain) -> Plain:
    """Return Hugging Face's names for Megatron's.

    One word stands for all linear layers of every block.
    """
    if isinstance(value, str):
        return value if value not in ("all", "all_linear") else "all-linear"
    if not isinstance(value, list):
        return None
    words = [str(item) for item in value]
    if set(words) >= _MEGATRON_NAMES.keys() and len(words) == len(_MEGATRON_NAMES):
        return "all-linear"
    names: list[Plain] = []
    for word in words:
        names += _MEGATRON_NAMES.get(word, (word,))
    return names
