"""Targets of a LoRA adapter: the names in a PEFT config, and the modules that they mean.

In models whose experts transformers 5 joins, PEFT converts some names in `target_modules`:
`gate_proj`, `up_proj` and `down_proj` become the joined tensors of the experts, as in transformers
4, and no longer mean the dense layers and shared experts that have these names. This engine adapts
the modules that have the names, and exports a config from which PEFT builds the same adapter.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import transformers_weight_conversion
from torch import nn
from transformers import PreTrainedModel

from temper_engine_api import adapter_checks
from temper_engine_api.errors import ConfigError
from temper_engine_api.vision_language import list_encoder_modules


@contextmanager
def keep_target_names() -> Iterator[None]:
    """Keep PEFT from converting `target_modules` inside the context; no setting of PEFT does."""
    convert = transformers_weight_conversion.convert_peft_config_for_transformers
    transformers_weight_conversion.convert_peft_config_for_transformers = _keep_config
    try:
        yield
    finally:
        transformers_weight_conversion.convert_peft_config_for_transformers = convert


def _keep_config(*_args: object, **_kwargs: object) -> None:
    """Leave a config as it is."""


def exclude_encoder(
    hf_model: PreTrainedModel, excluded: str | set[str] | None
) -> str | set[str] | None:
    """Return modules to exclude, as PEFT expects them, with the encoder of images among them."""
    encoders = [
        re.escape(name)
        for name in list_encoder_modules(hf_model, model_type=hf_model.config.model_type)
    ]
    if not encoders:
        return excluded
    pattern = rf"(?:{'|'.join(encoders)})\..*"
    if not excluded:
        return pattern
    if not isinstance(excluded, str):  # suffixes
        names = "|".join(re.escape(name) for name in sorted(excluded))
        excluded = rf"(?:.*\.)?(?:{names})"
    # In front and not in a group: `re` takes flags such as (?i) only at the start of a pattern.
    return f"{excluded}|{pattern}"


def convert_saved_targets(config: LoraConfig, hf_model: PreTrainedModel, *, path: str) -> None:
    """Convert the targets of a saved adapter as PEFT does.

    Raises:
        ConfigError: If PEFT applies some of them to experts.
    """
    modules, parameters = config.target_modules, set(config.target_parameters or ())
    try:
        transformers_weight_conversion.convert_peft_config_for_transformers(
            config, model=hf_model, conversions=None
        )
        is_on_experts = set(config.target_parameters or ()) != parameters
    except ValueError:
        # PEFT converts gate_proj and up_proj only together.
        is_on_experts = True
    if is_on_experts:
        raise ConfigError(
            f"the adapter in {path} has target_modules {adapter_checks.format_targets(modules)}, "
            f"of which PEFT applies some to the experts of {type(hf_model).__name__}: load the "
            "adapter in PEFT 0.21 or later and save it again, which names experts in "
            "target_parameters."
        )


def target_linears_as_modules(config: LoraConfig, hf_model: PreTrainedModel) -> None:
    """Make linear layers that `target_parameters` names by their weights module targets.

    Both have the same tensors. PEFT would add the adapter to the weight before each product, which
    takes more memory and rounds small changes away in bf16.
    """
    modules = dict(hf_model.named_modules())
    parameters = set(config.target_parameters or ())
    linears = {
        name: {each for each in parameters if f".{name}.weight".endswith(f".{each}")}
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
    }
    named = set().union(*linears.values())
    if named:
        matched = {name for name in modules if check_target_module_exists(config, name)}
        config.target_modules = matched | {name for name, each in linears.items() if each}
        config.target_parameters = parameters - named


def name_converted_layers(
    config: LoraConfig, hf_model: PreTrainedModel, *, names: set[str]
) -> None:
    """Name the linear layers whose names PEFT would convert by their weights.

    PEFT adapts what `target_parameters` names with the same tensors, but without dropout or DoRA.

    Args:
        config: Config to export, whose `target_modules` are the requested ones; changed.
        hf_model: Model with the adapter.
        names: Names of the adapted linear layers, short where that is not ambiguous.

    Raises:
        ConfigError: If there are such layers, and dropout or DoRA.
    """
    if not _converts_targets(config.target_modules, hf_model):
        return
    converted = {name for name in names if _converts_targets({name}, hf_model)}
    config.target_modules = names - converted
    if converted and (config.use_dora or config.lora_dropout > 0):
        setting, value = ("dora", True) if config.use_dora else ("dropout", config.lora_dropout)
        last_parts = sorted({name.rpartition(".")[2] for name in converted})
        raise ConfigError(
            f"lora.{setting} is {value}, but in {type(hf_model).__name__} PEFT can load adapters "
            f"of {', '.join(last_parts)} only without it: remove lora.{setting}, or name them in "
            "lora.exclude_modules."
        )
    weights = {f"{name}.weight" for name in converted}
    config.target_parameters = {*(config.target_parameters or ()), *weights} or None


def _converts_targets(targets: str | set[str], hf_model: PreTrainedModel) -> bool:
    """Return True if PEFT would load these `target_modules` as other targets."""
    probe = LoraConfig(target_modules=targets)
    try:
        transformers_weight_conversion.convert_peft_config_for_transformers(
            probe, model=hf_model, conversions=None
        )
    except ValueError:
        # PEFT converts gate_proj and up_proj only together.
        return True
    return bool(probe.target_modules != targets)
