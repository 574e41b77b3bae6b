"""Checks of TransformerEngine and of the GPU before its layers are used."""

import importlib
import importlib.metadata
import importlib.util

import torch
from packaging.version import Version

from temper_engine_api.errors import ConfigError
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.runtime.process_groups import choose_device

OLDEST = "2.12"
"""Oldest supported version of TransformerEngine."""
_INSTALL = (
    "run pip install --no-build-isolation 'transformer-engine[pytorch]', which compiles it with "
    "CUDA's compiler, or set layers to torch."
)


def check_installed(config: MegatronConfig) -> None:
    """Check that TransformerEngine is installed if the config needs it, without importing it.

    Raises:
        ConfigError: If it is missing or too old.
    """
    if config.layers != "transformer_engine":
        return
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            f"layers is transformer_engine, but TransformerEngine is not installed: {_INSTALL}"
        )
    version = importlib.metadata.version("transformer-engine")
    if Version(version) < Version(OLDEST):
        raise ConfigError(
            f"layers is transformer_engine, but TransformerEngine is {version}, and {OLDEST} or "
            "newer is needed: upgrade it, or set layers to torch."
        )


def check_usable(config: MegatronConfig) -> None:
    """Import TransformerEngine if the config needs it, and check the GPU.

    Raises:
        ConfigError: If it cannot be imported, there is no CUDA, or the GPU lacks the products.
    """
    if config.layers != "transformer_engine":
        return
    device = choose_device(config.device)
    if device.type != "cuda":
        raise ConfigError(
            "layers is transformer_engine, which needs CUDA, but torch finds no CUDA device: set "
            "layers to torch."
        )
    try:
        te = importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # It asserts that its packages fit each other, and loads its libraries itself.
        raise ConfigError(
            f"TransformerEngine is installed, but importing it failed with {type(error).__name__} "
            f"({error}): {_INSTALL}"
        ) from error
    if config.float8 == "none":
        return
    is_available = (
        te.is_fp8_available if config.float8 == "tensorwise" else te.is_fp8_block_scaling_available
    )
    supported, reason = is_available(return_reason=True)
    if not supported:
        raise ConfigError(
            f"float8 is {config.float8}, but {torch.cuda.get_device_name(device)} does not support "
            f"it: {reason} Set float8 to none."
        )
