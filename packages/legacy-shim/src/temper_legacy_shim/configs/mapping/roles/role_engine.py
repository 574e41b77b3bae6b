"""The engine of each role: its model and precision, adapter, optimizer and layout."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.roles.numerics_changes import has_engines
from temper_legacy_shim.configs.mapping.roles.role_layout import (
    set_fsdp,
    set_megatron,
    set_offload,
    set_workers,
)
from temper_legacy_shim.configs.mapping.roles.role_optimizer import set_optimizer, set_schedule
from temper_legacy_shim.configs.mapping.roles.roles import (
    ACTOR,
    REF,
    OldRole,
    fsdp_block,
    is_megatron,
)
from temper_legacy_shim.configs.mapping.rows import apply_rows
from temper_legacy_shim.configs.reading.config_values import Plain, from_home


def build_role(draft: Draft, role: OldRole) -> None:
    _model(draft, role)
    if role.is_trained:
        set_optimizer(draft, role)
        set_schedule(draft, role)
    _precision(draft, role)
    set_offload(draft, role)
    if is_megatron(draft):
        set_megatron(draft, role)
    else:
        set_fsdp(draft, role)
    set_workers(draft, role)


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
        apply_rows(draft, "role-model", **role.blocks(draft))
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


def _precision(draft: Draft, role: OldRole) -> None:
    words = {
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **dict.fromkeys(("fp16", "float16", "half", "16"), "fp16"),
        **dict.fromkeys(("fp32", "float32", "32"), "fp32"),
    }
    old = _compute_keys(draft, role)
    key = next((key for key in old if draft.text(key)), "")
    # The old workers ran the model under autocast in bf16, or in mixed precision with bf16
    # parameters, unless a key said otherwise.
    compute = words.get(draft.text(key) or "bf16")
    if compute is None:
        draft.find("compute-dtype", key, word=draft.text(key))
        return
    draft.put(f"{role.engine}.precision.compute", compute, rule="compute-dtype", old=old)
    if role.is_trained and not is_megatron(draft):
        apply_rows(draft, "precision", **role.blocks(draft))


def _compute_keys(draft: Draft, role: OldRole) -> list[str]:
    """Return the keys from which the release took the dtype of matmuls; the first counts."""
    if is_megatron(draft):
        # The old worker of the reference read the actor's block.
        is_shared = role.name == "ref" and not has_engines(draft)
        block = ACTOR.megatron if is_shared else role.megatron
        return [f"{block}.dtype"] if draft.since("v0.6.1") else []
    fsdp = fsdp_block(draft, role)
    keys = [f"{fsdp}.mixed_precision.param_dtype"]
    if draft.since("v0.6.1") and not has_engines(draft) and role.block in (ACTOR.block, REF.block):
        return [*keys, f"{fsdp}.dtype"]
    draft.explain_drop(
        f"{fsdp}.dtype", f"{draft.old.version} did not read it, and computed in bf16"
    )
    return keys


_MEGATRON_NAMES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def build_lora(draft: Draft, role: OldRole) -> None:
    """Set a role's adapter; FSDP reads the flat keys, Megatron the block."""
    # Both forms are in the trees of v0.7.0 and later, whichever engine trains.
    forms = (f"{role.model}.lora_", f"{role.model}.lora.")
    lora, other = reversed(forms) if is_megatron(draft) else forms
    read, unread = f"{lora}rank", f"{other}rank"
    rank, other_rank = draft.integer(read) or 0, draft.integer(unread) or 0
    if other_rank > 0:
        _unread(draft, read=read, unread=unread, rank=rank, other=other_rank)
    blocks = role.blocks(draft)
    if draft.text(f"{lora}adapter_path"):
        apply_rows(draft, "lora-path", **blocks, lora=lora)
    elif rank > 0:
        block = f"{role.model}.lora" if is_megatron(draft) else role.model
        given = draft.old.get(f"{block}.target_modules")
        targets = _names(given)
        apply_rows(
            draft,
            "lora",
            **blocks,
            lora=lora,
            block=block,
            targets=targets,
            keeps_targets=targets == given,
            excluded=_names(draft.old.get(f"{block}.exclude_modules")),
            # Fine-tuning of v0.7.0 lacked the keys, and had the defaults of Megatron-Bridge.
            first=draft.text(f"{block}.lora_A_init_method") or "xavier",
            second=draft.text(f"{block}.lora_B_init_method") or "zero",
        )


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


def _names(value: Plain) -> Plain:
    """Return Hugging Face's names for Megatron's; a word may stand for all linear layers."""
    if isinstance(value, str):
        return value if value not in ("all", "all_linear") else "all-linear"
    if not isinstance(value, list):
        return None
    words = [str(item) for item in value]
    # The four modules are all linear layers of a block, but not the output layer, as all-linear of
    # PEFT.
    if set(words) >= _MEGATRON_NAMES.keys() and len(words) == len(_MEGATRON_NAMES):
        return "all-linear"
    names: list[Plain] = []
    for word in words:
        names += _MEGATRON_NAMES.get(word, (word,))
    return names
