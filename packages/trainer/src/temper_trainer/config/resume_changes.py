"""What a resumed run takes from its checkpoint, so that a changed setting has no effect on it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Settings whose effect is in the checkpoint already."""

    keys: tuple[str, ...]
    """Dotted keys and blocks."""
    source: str
    """Completes "has no effect on a resumed run: ..."."""


FIXED = (
    Fixed(
        keys=tuple(
            f"{role}.engine.{key}"
            for role in ("actor", "critic", "ref")
            for key in ("model.path", "model.seed", "lora.path")
        ),
        source="the weights are those of the checkpoint",
    ),
    Fixed(keys=("warm_start",), source="the warm start is done"),
    Fixed(
        keys=("algorithm.kl_reward_coef", "algorithm.entropy_coef"),
        source="the checkpoint holds the coefficient that was reached",
    ),
    Fixed(keys=("generate",), source="a training run writes no completions"),
)


UNCOMPARED = ("run.resume", "run.dir")
"""Settings that differ between two starts of one run by their nature."""


ORDER_KEYS = ("data.train", "data.shuffle", "data.streaming", "data.streaming_buffer", "run.seed")
"""Settings that give the training data, or their order."""


def describe_changes(
    before: Mapping[str, object], after: Mapping[str, object], *, has_checkpoint: bool
) -> Iterator[str]:
    """Yield a line for each setting that differs from the last start, and one for each without effect.

    Args:
        before: The settings of the last start by dotted key; empty if there was none.
        after: Those of this start.
        has_checkpoint: Whether this start continues from a checkpoint.
    """
    changed = [
        key
        for key in sorted(before.keys() | after.keys())
        if key not in UNCOMPARED and before.get(key) != after.get(key)
    ]
    if not before or not changed:
        return
    yield "settings that differ from the last start of this run (its config.yaml is kept as config.superseded-*.yaml):"
    for key in changed:
        yield f"  {key}: {_text(before, key)} -> {_text(after, key)}"
    if not has_checkpoint:
        return
    for key in changed:
        for fixed in FIXED:
            if any(_is_within(key, block) for block in fixed.keys):
                yield f"warning: {key} has no effect on a resumed run: {fixed.source}. To use the new value, choose another run.dir."
    if any(_is_within(key, block) for key in changed for block in ORDER_KEYS):
        yield (
            "warning: the training data or their order changed, but the run continues at the position that the checkpoint names: "
            "some prompts may be skipped or repeated."
        )


def _text(values: Mapping[str, object], key: str) -> str:
    return repr(values[key]) if key in values else "(not set)"


def _is_within(key: str, block: str) -> bool:
    return key == block or key.startswith(f"{block}.")
