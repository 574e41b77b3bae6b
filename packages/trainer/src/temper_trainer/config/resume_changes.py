"""Describe settings that changed since the last step of a run."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from temper_trainer.config.run import ROLES
from temper_trainer.settings.names import is_within


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSetting:
    """Settings whose effect is already part of the checkpoint."""

    keys: tuple[str, ...]
    """Dotted keys and blocks."""
    source: str
    """Reason; completes "has no effect on a resumed run: ..."."""


WRITES_NO_COMPLETIONS = FixedSetting(
    keys=("generate",), source="a training run writes no completions"
)


WARM_START = FixedSetting(keys=("warm_start",), source="the warm start is done")
"""Settings that are fixed as soon as the warm start is done, also without a checkpoint."""


TOKENIZER = FixedSetting(
    keys=("data.tokenizer",), source="the weights fit only the tokenizer that the run has saved"
)
"""Settings of the tokenizer, which are fixed as soon as weights were trained with it."""


UNCOMPARED_KEYS = ("run.resume", "run.dir")
"""Settings that always differ between two starts of a run."""


DATA_ORDER_KEYS = (
    "data.train",
    "data.train_sets",
    "data.shuffle",
    "data.shuffled_fraction",
    "run.seed",
)
"""Settings that determine the training data and their order."""
STREAMING_KEYS = ("data.streaming", "data.streaming_buffer")
"""Settings that determine the order of demonstrations, but not that of prompts."""


def describe_changes(
    before: Mapping[str, object],
    after: Mapping[str, object],
    *,
    restored_parts: Collection[str],
    has_warm_start_model: bool,
    has_saved_tokenizer: bool,
) -> Iterator[str]:
    """Yield a line for each setting that changed, and a warning for each change without effect.

    Args:
        before: Settings of the last start that completed a step, by dotted key; empty without one.
        after: Settings of this start.
        restored_parts: Parts of the checkpoint from which this start continues: roles, and
            ``trainer``; empty without a checkpoint.
        has_warm_start_model: True if this start uses the model of a warm start that is done.
        has_saved_tokenizer: True if this start uses the tokenizer of existing weights.
    """
    changed = [
        key
        for key in sorted(before.keys() | after.keys())
        if key not in UNCOMPARED_KEYS and before.get(key) != after.get(key)
    ]
    if not before or not changed:
        return
    yield (
        "settings that differ from those of the last step of this run (kept as "
        "config.superseded-*.yaml):"
    )
    for key in changed:
        yield f"  {key}: {_format_value(before, key)} -> {_format_value(after, key)}"
    fixed_settings = [
        *_list_restored_settings(restored_parts),
        _find_restored_loss_scales(before, after, parts=restored_parts),
        *([TOKENIZER] if has_saved_tokenizer else ()),
        *([WARM_START] if restored_parts or has_warm_start_model else ()),
        *([_find_replaced_models(before, after)] if has_warm_start_model else ()),
    ]
    for key in changed:
        for fixed in fixed_settings:
            if is_within(key, *fixed.keys):
                yield (
                    f"WARNING: {key} has no effect on a resumed run: {fixed.source}. To use the "
                    "new value, choose another run.dir."
                )
                break  # one reason is enough
    has_demonstrations = after.get("task") == "sft" or any(
        key.startswith("warm_start.") for key in after
    )
    order_keys = DATA_ORDER_KEYS + (STREAMING_KEYS if has_demonstrations else ())
    if restored_parts and any(is_within(key, *order_keys) for key in changed):
        yield (
            "WARNING: the training data or their order changed, but the run continues at the "
            "checkpoint's position in the data: some prompts may be skipped or repeated."
        )


_INITIALIZATION = tuple(
    f"model.architecture.{name}" for name in ("initializer_range", "initializer_factor", "init_std")
)
"""Names that models of transformers give to the scale of new weights."""


def _list_restored_settings(parts: Collection[str]) -> Iterator[FixedSetting]:
    """Yield the settings whose effect is in these parts of a checkpoint."""
    # A role that is not in the checkpoint is built from its settings at every start. Examples are
    # the reference model of task dpo, and of any task that starts from a checkpoint saved by an
    # engine alone.
    yield FixedSetting(
        keys=tuple(
            f"{role}.engine.{key}"
            for role in ROLES
            if role in parts
            for key in ("model.path", "model.seed", "lora.path", *_INITIALIZATION)
        ),
        source="the weights are those of the checkpoint",
    )
    if "trainer" in parts:
        yield FixedSetting(
            keys=("algorithm.kl_reward_coef", "algorithm.entropy_coef"),
            source="the checkpoint contains the current coefficient",
        )
    if parts:
        yield WRITES_NO_COMPLETIONS


def _find_restored_loss_scales(
    before: Mapping[str, object], after: Mapping[str, object], *, parts: Collection[str]
) -> FixedSetting:
    """Return the loss scales that are loaded: only a role with fp16 saves and loads one."""
    precisions = [f"{role}.engine.precision" for role in ROLES if role in parts]
    return FixedSetting(
        keys=tuple(
            f"{precision}.initial_loss_scale"
            for precision in precisions
            if before.get(f"{precision}.compute") == after.get(f"{precision}.compute") == "fp16"
        ),
        source="the checkpoint contains the current scale",
    )


def _find_replaced_models(
    before: Mapping[str, object], after: Mapping[str, object]
) -> FixedSetting:
    """Return the settings of models in whose place the run loads the warm start's model.

    Without a warm start, an architecture is not fixed: the engine builds the new one, and refuses a
    checkpoint whose tensors do not fit. The seed still draws a value head and a new LoRA adapter,
    which the warm start's model does not have.
    """
    # A role loads the warm start's model if it is a copy of the actor. A role that is a copy in
    # only one of the two configurations changes its model, so it is left out here.
    roles = [role for role in ROLES if _is_copy(role, before) and _is_copy(role, after)]
    unseeded = [
        role for role in roles if role != "critic" and not after.get(f"{role}.engine.lora.rank")
    ]
    return FixedSetting(
        keys=(
            *(f"{role}.engine.model.path" for role in roles),
            *(f"{role}.engine.model.architecture" for role in roles),
            *(f"{role}.engine.model.seed" for role in unseeded),
        ),
        source="the model is that of the warm start",
    )


def _is_copy(role: str, settings: Mapping[str, object]) -> bool:
    """Return True if a role exists and has the actor's model path and architecture."""
    exists = any(is_within(key, f"{role}.engine.model") for key in settings)
    return exists and _select_model(role, settings) == _select_model("actor", settings)


def _select_model(role: str, settings: Mapping[str, object]) -> dict[str, object]:
    model = f"{role}.engine.model"
    return {
        key.removeprefix(model): value
        for key, value in settings.items()
        if is_within(key, f"{model}.path", f"{model}.architecture")
    }


def _format_value(values: Mapping[str, object], key: str) -> str:
    return repr(values[key]) if key in values else "(not set)"
