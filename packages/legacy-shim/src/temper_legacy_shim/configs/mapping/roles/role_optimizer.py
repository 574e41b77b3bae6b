"""The optimizer of each role: learning rate, decay, clip and schedule."""

from temper_legacy_shim.configs.mapping.builder import Draft
from temper_legacy_shim.configs.mapping.rl.rl_facts import (
    num_weight_syncs,
    updates_per_schedule_step,
)
from temper_legacy_shim.configs.mapping.roles.roles import OldRole, is_megatron
from temper_legacy_shim.configs.mapping.rows import apply_rows


def set_optimizer(draft: Draft, role: OldRole) -> None:
    engine, optim = f"{role.engine}.optimizer", role.optim
    blocks = role.blocks(draft)
    apply_rows(draft, "optimizer", **blocks)
    _clip(draft, role)
    if _another_optimizer(draft, role):
        return
    # Releases without the key used torch's defaults, by optim_config.get("betas", (0.9, 0.999)).
    betas = draft.old.get(f"{optim}.betas")
    draft.put(
        f"{engine}.betas",
        betas if isinstance(betas, list) else [0.9, 0.999],
        rule="betas",
        old=[f"{optim}.betas"],
    )
    apply_rows(draft, "decay", **blocks)


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
    old = {word: f"{role.optim}.{word}" for word in ("betas", "override_optimizer_config")}
    given, betas = draft.old.get(old["override_optimizer_config"]), draft.old.get(old["betas"])
    arguments = dict(given) if isinstance(given, dict) else {}
    # The old builder gave betas to every class with such a name.
    if isinstance(betas, list) and ("adam" in name.lower() or "ademamix" in name.lower()):
        arguments = {"betas": betas, **arguments}
    if arguments:
        draft.put(
            f"{role.engine}.optimizer.arguments",
            arguments,
            rule="optimizer-kind",
            old=[key for word, key in old.items() if word in arguments or word != "betas"],
        )
    return True


def _clip(draft: Draft, role: OldRole) -> None:
    """Set the gradient clip from the key that the release used; there are two."""
    own, optim = f"{role.block}.grad_clip", f"{role.optim}.clip_grad"
    # Since v0.8.0 the optimizer's key counts, unless a user sets that of the role.
    reads_own = not is_megatron(draft) and (not draft.since("v0.8.0") or draft.old.is_set(own))
    key = (
        own
        if reads_own
        and draft.old.has(own)
        and not (draft.since("v0.8.0") and draft.old.is_set(optim))
        else optim
    )
    if draft.old.has(key):
        apply_rows(draft, "gradient-clip", engine=role.engine, clip=key)
    if key == own and draft.since("v0.8.0") and draft.number(own) != draft.number(optim):
        draft.find("grad-clip", own, optim=optim)


_STYLES = ("warmup_style", "lr_scheduler_type", "lr_decay_style")
_RATIOS = ("lr_warmup_steps_ratio", "warmup_steps_ratio")


def set_schedule(draft: Draft, role: OldRole) -> None:
    engine, optim = f"{role.engine}.schedule", role.optim
    is_first_sft = role.block == "model"
    # The first generation of fine-tuning read no other key of a schedule than this and the ratio.
    styles = ("lr_scheduler",) if is_first_sft else _STYLES
    style_key = next(
        (key for key in (f"{optim}.{name}" for name in styles) if _is_given(draft, key)), ""
    )
    # Before v0.4.0 the first generation of fine-tuning had one schedule, and no key for it.
    kind = draft.text(style_key) or ("cosine" if is_first_sft else "constant")
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
    # FSDP's builder reads the ratio if lr_warmup_steps is below 0, which is its default.
    ratio_key = next(
        (f"{optim}.{name}" for name in _RATIOS if _is_given(draft, f"{optim}.{name}")),
        f"{optim}.{_RATIOS[0]}",
    )
    warmup = None if is_first_sft else draft.number(f"{optim}.lr_warmup_steps")
    ratio = draft.number(ratio_key)
    draft.put(f"{engine}.kind", target, rule="schedule-kind", old=[style_key] if style_key else [])
    # Megatron takes 0 for a number that is not given, and then reads the ratio.
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
    if is_first_sft:
        for name in ("lr_warmup_steps", "min_lr_ratio"):
            draft.explain_drop(f"{optim}.{name}", f"{draft.old.version} did not read it")
    elif target != "constant":
        _floor(draft, engine, optim)
    if target != "constant" or f"{engine}.warmup_ratio" in draft.settings:
        _schedule_length(draft, engine, optim)
    has_warmup = {f"{engine}.warmup_steps", f"{engine}.warmup_ratio"} & draft.settings.keys()
    # verl's cosine may count steps from one, as schedules here do.
    counts_from_one = kind == "cosine" and draft.old.get(f"{optim}.zero_indexed_step") is False
    if has_warmup and not (counts_from_one and not is_megatron(draft)):
        floor = draft.settings.get(f"{engine}.min_lr_ratio")
        if floor and floor.value and kind == "cosine" and _rises_from_floor(draft):
            draft.find("warmup.from-floor", f"{optim}.lr_warmup_steps", floor=floor.value)
        else:
            draft.find("warmup", f"{optim}.lr_warmup_steps")
    # The old scheduler stepped once for each call of the workers, however many updates it made.
    unit = updates_per_schedule_step(draft)
    if role.block not in ("engine", "model"):  # supervised steps are updates
        draft.put(
            f"{engine}.advance", "rl_step" if unit is None else "update", rule="schedule-advance"
        )
    if unit is not None and unit > 1:
        draft.find("schedule-advance", unit=unit, role=role.name)


def _rises_from_floor(draft: Draft) -> bool:
    """Check if the warm-up of a cosine began at min_lr_ratio; all other ones began at 0."""
    # get_cosine_schedule_with_warmup added min_lr_ratio to its ramp in these releases. Later ones
    # have init_lr_ratio for it, which is 0.
    return draft.since("v0.4.0") and not draft.since("v0.6.0") and not is_megatron(draft)


def _floor(draft: Draft, engine: str, optim: str) -> None:
    """Set the floor of a falling schedule; Megatron's is a rate, not a fraction of the peak."""
    fraction, rate, peak = (
        draft.number(f"{optim}.min_lr_ratio"),
        draft.number(f"{optim}.min_lr"),
        draft.number(f"{optim}.lr"),
    )
    # OptimizerParamScheduler of Megatron-Core takes min_lr as a rate.
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
    unit = updates_per_schedule_step(draft)
    # Only the first asynchronous trainers left the second key as the user had set it.
    reads_both = unit is not None and not draft.since("v0.7.1")
    if not reads_both:
        draft.explain_drop(
            keys[1], f"{draft.old.version} replaced it by the number of steps of the run"
        )
    read = keys if reads_both else keys[:1]
    key = next((key for key in read if (draft.number(key) or 0) > 0), "")
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
    # FullyAsyncTrainer writes the number of weight syncs into optim.total_training_steps since
    # v0.7.1.
    syncs, keys = num_weight_syncs(draft)
    if syncs is None or not draft.since("v0.7.1"):
        draft.find("schedule-length", key, engine=engine)
        return
    draft.put(f"{engine}.total_steps", syncs * unit, rule="schedule-length", old=keys)
