"""Stand-ins for torch and for functions that import it; the import happens at the first use.

The configuration is read in less than a second because that does not import torch, which takes two.
The settings of an algorithm are next to its formula, so such a module imports torch from here:

    from temper_trainer.settings.lazy_torch import torch, compute_weighted_mean
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = [
    "compute_weighted_mean",
    "find_trained_sequences",
    "lazy_module",
    "sum_per_sequence",
    "torch",
]


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def lazy_module(name: str) -> Any:
    """Return a stand-in for a module that is imported when an attribute is read."""
    return _LazyModule(name)


if TYPE_CHECKING:
    import torch

    from temper_engine_api.metrics import compute_weighted_mean
    from temper_engine_api.reduction import find_trained_sequences, sum_per_sequence
else:

    class _LazyFunction:
        def __init__(self, module: str, name: str) -> None:
            self._module, self._name = lazy_module(module), name

        def __call__(self, *args: object, **kwargs: object) -> Any:
            return getattr(self._module, self._name)(*args, **kwargs)

    torch = lazy_module("torch")
    compute_weighted_mean = _LazyFunction("temper_engine_api.metrics", "compute_weighted_mean")
    sum_per_sequence = _LazyFunction("temper_engine_api.reduction", "sum_per_sequence")
    find_trained_sequences = _LazyFunction("temper_engine_api.reduction", "find_trained_sequences")
