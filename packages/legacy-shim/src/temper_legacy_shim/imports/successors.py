"""Old names and their successors, from ``data/successors.tsv``.

A successor is Temper's, or a deprecated class of this package for the transition. Rows without a
target hold advice: they fit all names that begin with theirs, and the first that fits counts.
"""

from dataclasses import dataclass
from importlib.resources import files

from temper_legacy_shim.old_paths import MODULES, PACKAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    target: str
    """``module:name``."""
    how: str
    """Instruction for other changes at its uses; empty if it takes the same arguments."""


_HELPERS = (
    "utils",
    "utils.dataset.rl_dataset",
    "utils.fs",
    "utils.hdfs_io",
    "utils.model",
    "utils.tokenizer",
    "utils.torch_functional",
    "utils.reward_score",
    "utils.reward_score.gsm8k",
    "utils.reward_score.math",
    "utils.reward_score.math_reward",
)
"""Modules whose helpers this package offers under the old signatures, with or without
``keeps_legacy``.
"""


def _read_table() -> tuple[dict[str, Successor], tuple[tuple[str, str], ...]]:
    """Return successors by old name, and advice by the beginning of an old path."""
    successors = {
        f"{PACKAGE}.{module}.{name}": Successor(target=target, how="")
        for module in _HELPERS
        for name, target in MODULES[f"{PACKAGE}.{module}"].items()
    }
    advice = []
    table = files(__package__).joinpath("data/successors.tsv").read_text(encoding="utf-8")
    for line in table.splitlines()[1:]:
        old, target, how = line.split("\t")
        if target:
            successors[old] = Successor(target=target, how=how)
        else:
            advice.append((old, how))
    return successors, tuple(advice)


_SUCCESSORS, _ADVICE = _read_table()


def successor_of(name: str, *, keeps_legacy: bool) -> Successor | None:
    """Return the successor of an old full name, or None.

    Args:
        name: such as ``verl.workers.fsdp_workers.CriticWorker``.
        keeps_legacy: prefer this package's deprecated class, which takes the old arguments.
    """
    if keeps_legacy:
        module, _, attribute = name.rpartition(".")
        result = MODULES.get(module, {}).get(attribute)
        if result is not None:
            return Successor(target=result, how="")
    return _SUCCESSORS.get(name)


def is_module(name: str) -> bool:
    return name in MODULES or any(each.startswith(f"{name}.") for each in _SUCCESSORS)


def advice_for(name: str) -> str:
    """Return what to do about an old name without a successor."""
    result = next(
        (
            advice
            for start, advice in _ADVICE
            if name == start or name.startswith((f"{start}.", f"{start}_"))
        ),
        "",
    )
    module, _, attribute = name.rpartition(".")
    if target := MODULES.get(module, {}).get(attribute):
        here = f"temper-migrate imports --keep-legacy takes it from {target.partition(':')[0]}"
        return f"{here}; otherwise, {result}" if result else here
    if not result and is_module(name):
        return "no use was found that could be changed: remove the import, or change it by hand"
    return result or (
        "there is no such thing in Temper: keep a copy of the function in your own code, or "
        "do without"
    )


def rows() -> list[tuple[str, Successor, str]]:
    """Return every row: old name, Temper's own, and this package's, or empty."""
    legacy = {
        f"{module}.{name}": target
        for module, offers in MODULES.items()
        for name, target in offers.items()
    }
    return [
        (name, successor, legacy.get(name, "")) for name, successor in sorted(_SUCCESSORS.items())
    ]
