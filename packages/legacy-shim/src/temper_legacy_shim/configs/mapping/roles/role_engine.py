"""The engine of each role: its model and precision, adapter, optimizer and layout."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.roles.numerics_changes import has_engines
from temper_legacy_shim.configs.mapping.roles.role_layout import set_layout
from temper_legacy_shim.configs.mapping.roles.roles import (
    ACTOR,
    REF,
    OldRole,
    fsdp_block,
    is_megatron,
)
from temper_legacy_shim.configs.mapping.rows import apply_rows, role_fact
from temper_legacy_shim.configs.reading.config_values import Plain


def build_role(draft: Draft, role: OldRole) -> None:
    blocks = role.blocks(draft)
    if role.name != "ref":  # the group ref=frozen takes the actor's
        apply_rows(draft, "role-model", **blocks)
    if role.is_trained:
        apply_rows(draft, "optimizer", **blocks)
        apply_rows(draft, "schedule", **blocks)
        apply_rows(draft, "schedule-length", **blocks)
        apply_rows(draft, "schedule-start", **blocks)
    apply_rows(draft, "precision", **blocks)
    set_layout(draft, role)


@role_fact
def reads_dtype(draft: Draft, role: OldRole) -> bool:
    """Check if FSDP's workers read the dtype of the role's block."""
    is_read = role.block in (ACTOR.block, REF.block) and draft.since("v0.6.1")
    return is_read and not has_engines(draft)


@role_fact
def dtype_keys(draft: Draft, role: OldRole) -> str:
    """Return the keys of the dtype of matmuls; the first one counts."""
    if is_megatron(draft):
        # The old worker of the reference read the actor's block.
        is_shared = role.name == "ref" and not has_engines(draft)
        block = ACTOR.megatron if is_shared else role.megatron
        return f"{block}.dtype" if draft.since("v0.6.1") else ""
    fsdp = fsdp_block(draft, role)
    keys = [f"{fsdp}.mixed_precision.param_dtype", *[f"{fsdp}.dtype"] * reads_dtype(draft, role)]
    return " and ".join(sorted(keys, key=lambda key: not draft.text(key)))


@role_fact
def clip_key(draft: Draft, role: OldRole) -> str:
    """Return the key of the gradient clip that the release used; there are two."""
    own, optim = f"{role.block}.grad_clip", f"{role.optim}.clip_grad"
    if is_megatron(draft) or not draft.old.has(own):
        return optim
    # Since v0.8.0 the optimizer's key counts, unless a user sets that of the role.
    is_chosen = draft.old.is_set(own) and not draft.old.is_set(optim)
    return own if is_chosen or not draft.since("v0.8.0") else optim


@role_fact
def has_other_optimizer(draft: Draft, role: OldRole) -> bool:
    """Check if an optimizer other than AdamW was requested; it has no betas here."""
    return draft.text(f"{role.optim}.optimizer").lower() not in ("", "adamw", "adam")


@role_fact
def optimizer_class(draft: Draft, role: OldRole) -> str:
    home = draft.text(f"{role.optim}.optimizer_impl") or "torch.optim"
    return f"{home}.{draft.text(f'{role.optim}.optimizer')}"


@role_fact
def optimizer_arguments(draft: Draft, role: OldRole) -> dict[str, Plain]:
    """Return the arguments of another optimizer."""
    given = draft.old.get(f"{role.optim}.override_optimizer_config")
    arguments = dict(given) if isinstance(given, dict) else {}
    betas, name = draft.old.get(f"{role.optim}.betas"), draft.text(f"{role.optim}.optimizer")
    # The old builder gave betas to every class with such a name.
    if isinstance(betas, list) and ("adam" in name.lower() or "ademamix" in name.lower()):
        return {"betas": betas, **arguments}
    return arguments


@role_fact
def argument_keys(draft: Draft, role: OldRole) -> str:
    names = ["betas"] * ("betas" in optimizer_arguments(draft, role))
    return " and ".join(f"{role.optim}.{name}" for name in (*names, "override_optimizer_config"))


@role_fact
def counts_warmup(draft: Draft, role: OldRole) -> bool:
    """Check if the warm-up was a number of steps, which wins over the ratio."""
    # The first generation of fine-tuning read the ratio alone.
    steps = None if role.block == "model" else draft.number(f"{role.optim}.lr_warmup_steps")
    # FSDP's builder reads the ratio if the steps are below 0, which is their default. Megatron
    # takes 0 for a number that is not given.
    return steps is not None and steps >= 0 and (steps > 0 or not is_megatron(draft))


@role_fact
def floor(draft: Draft, role: OldRole) -> float:
    """Return the floor of a falling schedule, as a fraction of the peak."""
    fraction, rate, peak = (
        draft.number(f"{role.optim}.{name}") for name in ("min_lr_ratio", "min_lr", "lr")
    )
    # OptimizerParamScheduler of Megatron-Core takes min_lr as a rate.
    if fraction is None and rate and peak:
        fraction = rate / peak
    return float(min(1.0, fraction or 0.0))


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
        kind = "Megatron" if is_megatron(draft) else "FSDP"
        apply_rows(
            draft, "lora-family", read=read, unread=unread, rank=rank, other=other_rank, kind=kind
        )
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
            lora_block=block,
            targets=targets,
            keeps_targets=targets == given,
            excluded=_names(draft.old.get(f"{block}.exclude_modules")),
            # Fine-tuning of v0.7.0 lacked the keys, and had the defaults of Megatron-Bridge.
            first=draft.text(f"{block}.lora_A_init_method") or "xavier",
            second=draft.text(f"{block}.lora_B_init_method") or "zero",
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
