"""The page of the documentation that shows old effective values against new ones."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

_HEAD = """\
# Does a translated run do what the old one did?

This page compares what real runs of verl did with what their translations do. The table counts
equal values, differences with a known reason, and others. To make the page again, with the recorded
data in `$TEMPER_TEST_DATA/legacy`: `TEMPER_MEANING_PAGE=docs/benchmarks/migration-meaning.md pytest
packages/legacy-shim/tests/configs/test_meaning.py -m nightly`. The test fails on a difference
without a reason.

* The old value is computed without the translator. Hydra's parser and OmegaConf apply the overrides
  of a real invocation to the recorded defaults of its release. Rules written by hand from the old
  code then give the value that took effect, such as the bounds of the clip, or whether the KL was
  in the reward or in the loss.
* The new value is read from the translated file and the trainer's defaults.
* Keys that the tables do not list are not compared. A review of 2026-11-28 found wrong dtypes and
  lengths among such keys; both are compared since.
* Runs of `verl.trainer.main_ppo` are compared if their values do not depend on the shell's
  environment, and the translation needs no decision.
* `test_meaning_of_rewards.py` compares the rewards of the same runs: what scores a completion, and
  the penalty of long completions. All runs are equal. `test_meaning_of_sft.py` compares
  supervised fine-tuning and generation. The evaluation of finished completions is always a
  question.
"""
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "advantage, completions, entropy, aggregation": (
        "algorithm.advantage.name",
        "algorithm.group_size",
        "algorithm.entropy_coef",
        "algorithm.aggregation",
    ),
    "KL: loss, reward, estimator": (
        "algorithm.kl_loss_coef",
        "algorithm.kl_reward_coef",
        "algorithm.kl_estimator",
        "algorithm.kl_clamp",
    ),
    "clip: low, high, dual": (
        "algorithm.policy_loss.clip_low",
        "algorithm.policy_loss.clip_high",
        "algorithm.policy_loss.dual_clip",
    ),
    "prompts, updates, passes": (
        "batching.prompts_per_step",
        "batching.num_mini_batches",
        "batching.num_passes",
    ),
    "lr, decay, warm-up": (
        "actor.engine.optimizer.lr",
        "actor.engine.optimizer.weight_decay",
        "actor.engine.schedule.warmup_steps",
    ),
    "schedule, warm-up ratio, clip norm, policy loss": (
        "actor.engine.schedule.kind",
        "actor.engine.schedule.warmup_ratio",
        "actor.engine.optimizer.clip_grad_norm",
        "algorithm.policy_loss.name",
    ),
    "LoRA: rank, alpha": ("actor.engine.lora.rank", "actor.engine.lora.alpha"),
    "temperature, top-p, top-k, tokens": (
        "sampling.temperature",
        "sampling.top_p",
        "sampling.top_k",
        "sampling.max_tokens",
    ),
}
_SAMPLES_A_RELEASE = 10


class Comparison(Protocol):
    """Fields of a comparison that the page reads; see test_meaning."""

    @property
    def tag(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def old(self) -> Mapping[str, object]: ...
    @property
    def new(self) -> Mapping[str, object]: ...
    @property
    def explained(self) -> frozenset[str]: ...
    @property
    def unexplained(self) -> Mapping[str, tuple[object, object]]: ...


def meaning_page(result: Sequence[Comparison], *, reasons: Mapping[str, str]) -> str:
    """Return the counts by key over all runs, then a sample of runs with their values."""
    sample = [
        item
        for items in _group_by_release(result).values()
        for item in _spread(items, _SAMPLES_A_RELEASE)
    ]
    return "\n".join([_HEAD, *_counts(result, reasons), "", *_values(sample)]) + "\n"


def _group_by_release(result: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    out: dict[str, list[Comparison]] = {}
    for item in result:
        out.setdefault(item.tag, []).append(item)
    return out


def _spread(items: Sequence[Comparison], count: int) -> list[Comparison]:
    """Spread as many from the first to the last."""
    return [
        items[number * len(items) // min(count, len(items))]
        for number in range(min(count, len(items)))
    ]


def _counts(result: Sequence[Comparison], reasons: Mapping[str, str]) -> list[str]:
    equal: Counter[str] = Counter()
    explained: Counter[str] = Counter()
    unexplained: Counter[str] = Counter()
    for item in result:
        explained.update(item.explained)
        unexplained.update(item.unexplained.keys())
        equal.update(
            key
            for key, value in item.old.items()
            if value is not None and key not in item.explained and key not in item.unexplained
        )
    keys = list(dict.fromkeys(key for item in result for key in item.old))
    releases = ", ".join(f"{tag} {len(items)}" for tag, items in _group_by_release(result).items())
    lines = [
        f"## {len(result)} runs ({releases})",
        "",
        "| key | equal | explained | unexplained | reason |",
        "|---|---|---|---|---|",
    ]
    for key in keys:
        reason = reasons.get(key, "") if explained[key] else ""
        lines.append(
            f"| `{key}` | {equal[key]} | {explained[key]} | {unexplained[key]} | {reason} |"
        )
    return [
        *lines,
        (
            f"| **all** | **{equal.total()}** | **{explained.total()}** | "
            f"**{unexplained.total()}** | "
            "|"
        ),
    ]


def _values(sample: Sequence[Comparison]) -> list[str]:
    lines = [
        f"## {len(sample)} of them, with all values",
        "",
        (
            "The first line of a run has the old system's values, the second the new system's; `-` "
            "means off, or not in this release."
        ),
        (
            "`schedule.advance` is `rl_step` in all runs, because the old schedule advanced once "
            "per "
            "RL step."
        ),
        "",
        f"| run | | {' | '.join(_GROUPS)} |",
        f"|---|---|{'---|' * len(_GROUPS)}",
    ]
    for item in sample:
        name = f"{item.tag} {item.path.removeprefix('examples/')}"
        lines += [
            f"| {name} | old | {_cells(item.old, item)} |",
            f"| | new | {_cells(item.new, item)} |",
        ]
    return lines


def _cells(values: Mapping[str, object], item: Comparison) -> str:
    return " | ".join(
        " ".join(
            _shown(values[key]) + ("*" if key in item.explained else "")
            for key in keys
            if key in item.old
        )
        for keys in _GROUPS.values()
    )


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).rpartition(":")[2].replace("_", "\\_")
    )
