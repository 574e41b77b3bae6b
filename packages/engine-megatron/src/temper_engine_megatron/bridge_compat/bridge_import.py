"""Megatron-Bridge is imported, where TransformerEngine and Triton are absent without them, and Megatron-Core's gaps are closed."""

import builtins
import importlib.util
import logging
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_megatron.bridge_compat.supported_versions import find_installed_pair


def import_bridge() -> Any:
    """The bridge's package.

    Raises:
        ConfigError: it is missing, of a line that is not known, or can't be imported.
    """
    line = find_installed_pair()
    try:
        with _stand_ins(line.unconditional_imports), _without_its_logging():
            import megatron.bridge
    except (ImportError, RuntimeError) as error:
        # The empty package "transformer-engine" raises a RuntimeError when it is imported.
        raise ConfigError(
            f"Megatron-Bridge is installed, but importing it failed with {type(error).__name__} ({error}): "
            "install what is missing, or remove the package that does not work."
        ) from error
    if line.lacks_router_gemm:
        from megatron.core.transformer.moe import moe_utils

        vars(moe_utils).setdefault("te_general_gemm", None)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    return megatron.bridge


@contextmanager
def _without_its_logging() -> Iterator[None]:
    """It tells what it could not import, and core 0.19 gives the root logger a handler and a level: the process keeps its own."""
    root, disabled = logging.getLogger(), logging.root.manager.disable
    level, handlers = root.level, tuple(root.handlers)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        for handler in set(root.handlers).difference(handlers):
            root.removeHandler(handler)


@contextmanager
def _stand_ins(importers: Mapping[str, str]) -> Iterator[None]:
    """What is absent has names without content for these modules, which import it without asking.

    Only the importing modules see them: a fake in ``sys.modules`` would make Megatron-Core believe that it has TransformerEngine.
    """
    absent = {name for name in importers if importlib.util.find_spec(name) is None}
    real = builtins.__import__

    def choose(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Any = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        importer = str((globals or {}).get("__name__") or "")
        root = name.partition(".")[0]
        if level == 0 and root in absent and importer.startswith(importers[root]):
            empty = _EMPTY[root]
            return getattr(empty, name.rpartition(".")[2]) if fromlist and "." in name else empty
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = choose  # type: ignore[assignment]  # what it gives out need not be a module
    try:
        yield
    finally:
        builtins.__import__ = real


class _Absent(torch.nn.Module):
    """A base class of adapters, which are never made without TransformerEngine."""

    def __init__(self, *_: object, **__: object) -> None:
        raise CapabilityError("TransformerEngine is not installed.")


def _decorate(function: object = None, **_: object) -> object:
    return function if function is not None else _decorate


_EMPTY = {
    "transformer_engine": types.SimpleNamespace(
        pytorch=types.SimpleNamespace(
            Linear=_Absent, LayerNormLinear=_Absent, ops=types.SimpleNamespace(Sequential=_Absent)
        )
    ),
    "triton": types.SimpleNamespace(
        jit=_decorate, language=types.SimpleNamespace(constexpr=object(), tensor=object())
    ),
}
