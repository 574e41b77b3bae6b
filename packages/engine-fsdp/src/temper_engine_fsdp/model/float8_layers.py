"""Compute the linear decoder layers of a Hugging Face model in float8, with torchao.

Only products change. Parameters, gradients and exported weights keep their names and dtypes, and so
do the embedding, the output head, routers, and experts that are stored as one tensor.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import torch
from torch import nn
from transformers import PreTrainedModel

from temper_engine_api.errors import CapabilityError, ConfigError, format_install
from temper_engine_fsdp.model.packed_model import find_layers

ALIGNMENT = 16
"""Sizes of a float8 product are multiples of this."""
ROUTER_NAMES = frozenset({"gate", "router"})
"""Names of routers in transformers. Rounded scores would send tokens to other experts, and some
routers are subclasses of `nn.Linear` that return more than a product."""
MIN_COMPUTE_CAPABILITY = (8, 9)
"""First CUDA compute capability with float8 products."""


def import_torchao() -> ModuleType:
    """Import torchao's float8 module.

    Raises:
        ConfigError: If torchao is not installed.
    """
    try:
        # torchao is an optional dependency.
        return import_module("torchao.float8")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("torchao"):
            raise
        raise ConfigError(
            "float8 is on, but torchao is not installed: run "
            f"{format_install('temper-engine-fsdp[float8]')}, or set float8 to none."
        ) from error


def convert_to_float8(hf: PreTrainedModel, *, scaling: str, device: torch.device) -> None:
    """Replace the linear layers of the decoder by layers that multiply in float8.

    On a CPU the products are emulated: operands are rounded to float8 and multiplied in float32.

    Raises:
        ConfigError: If torchao is not installed, or the GPU has no float8 products.
        CapabilityError: If the model has no layer with sizes that float8 products accept.
    """
    float8 = import_torchao()
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_COMPUTE_CAPABILITY:
        raise ConfigError(
            f"float8 is {scaling}, but {torch.cuda.get_device_name(device)} has no float8 "
            "products: set float8 to none, or use an Ada, Hopper or newer GPU."
        )
    num_converted = 0

    def is_convertible(module: nn.Module, name: str) -> bool:
        nonlocal num_converted
        accepted = (
            isinstance(module, nn.Linear)
            and ROUTER_NAMES.isdisjoint(name.split("."))
            and not (module.in_features % ALIGNMENT or module.out_features % ALIGNMENT)
        )
        num_converted += accepted
        return accepted

    config = replace(
        float8.Float8LinearConfig.from_recipe_name(scaling),
        # The number of tokens is the inner size of the product for the weight's gradient. Packs
        # have any number.
        pad_inner_dim=True,
        emulate=device.type == "cpu",
    )
    convert: Callable[..., nn.Module] = float8.convert_to_float8_training
    for layer in find_layers(hf, names=()):
        convert(layer, module_filter_fn=is_convertible, config=config)
    if not num_converted:
        raise CapabilityError(
            f"float8 is {scaling}, but {type(hf).__name__} has no linear decoder layer whose sizes "
            f"are multiples of {ALIGNMENT}: set float8 to none."
        )
