"""Import Megatron-Bridge where packages that it imports are missing and the engine needs none."""

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
    """Import the bridge, and define the name that Megatron-Core lacks without TransformerEngine.

    Raises:
        ConfigError: If the bridge is missing, of an unsupported version, or cannot be imported.
    """
    versions = find_installed_pair()
    try:
        with _stub_imports(versions.unused_package_importers), _preserve_logging():
            import megatron.bridge
    except (ImportError, RuntimeError) as error:
        # "transformer-engine" without its extra has no code, and raises RuntimeError on import.
        raise ConfigError(
            f"Megatron-Bridge is installed, but importing it failed with {type(error).__name__} "
            f"({error}): install what is missing, or remove the package that does not work."
        ) from error
    if versions.router_needs_transformer_engine:
        from megatron.core.transformer.moe import moe_utils

        # The router uses this name, but it is only defined when TransformerEngine is installed.
        vars(moe_utils).setdefault("te_general_gemm", None)
    if importlib.util.find_spec("transformer_engine") is None:
        from megatron.core.transformer import multi_latent_attention

        # Since `te_general_gemm` and the like exist, even as None, the module concludes that
        # TransformerEngine is installed.
        vars(multi_latent_attention)["HAVE_TE"] = False
    logging.getLogger("megatron").setLevel(logging.ERROR)
    return megatron.bridge


@contextmanager
def _preserve_logging() -> Iterator[None]:
    """Ignore log messages about failed imports, and restore the root logger.

    megatron-core 0.19 gives the root logger a handler and a level.
    """
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
def _stub_imports(importers: Mapping[str, str]) -> Iterator[None]:
    """Give stubs of missing packages to the modules that import them unconditionally.

    Only those modules see a stub. With a stub in `sys.modules`, Megatron-Core would conclude that
    TransformerEngine is installed.
    """
    missing = {name for name in importers if importlib.util.find_spec(name) is None}
    real_import = builtins.__import__

    def import_or_stub(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Any = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> Any:
        importer = str((globals or {}).get("__name__") or "")
        package = name.partition(".")[0]
        if level == 0 and package in missing and importer.startswith(importers[package]):
            stub = _STUBS[package]
            return getattr(stub, name.rpartition(".")[2]) if fromlist and "." in name else stub
        return real_import(name, globals, locals, fromlist, level)

    # Replace `__import__` instead of adding a finder: a finder is not told which module contains
    # the import statement.
    builtins.__import__ = import_or_stub  # type: ignore[assignment]  # a stub is not a module
    try:
        yield
    finally:
        builtins.__import__ = real_import


class _MissingModule(torch.nn.Module):
    """Base class for the bridge's adapters, which need TransformerEngine and are never used."""

    def __init__(self, *_: object, **__: object) -> None:
        raise CapabilityError("TransformerEngine is not installed.")


def _null_decorator(function: object = None, **_: object) -> object:
    return function if function is not None else _null_decorator


_STUBS = {
    "transformer_engine": types.SimpleNamespace(
        pytorch=types.SimpleNamespace(
            Linear=_MissingModule,
            LayerNormLinear=_MissingModule,
            ops=types.SimpleNamespace(Sequential=_MissingModule),
        )
    ),
    "triton": types.SimpleNamespace(
        jit=_null_decorator, language=types.SimpleNamespace(constexpr=object(), tensor=object())
    ),
}
