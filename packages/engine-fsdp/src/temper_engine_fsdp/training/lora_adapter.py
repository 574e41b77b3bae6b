"""LoRA adapters through peft: attach, disable, merge, export and load.

Only this module and `lora_targets` import peft. Elsewhere, adapter tensors are named as in
`adapter_model.safetensors`.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from temper_engine_api import adapter_checks
from temper_engine_api.adapter_checks import PEFT_PREFIX
from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_fsdp.model.weight_names import (
    hf_name,
    is_adapter_parameter,
    peft_name,
)
from temper_engine_fsdp.runtime.numerics import fork_rng, restart_rng
from temper_engine_fsdp.sharding.sharded_parameter import ShardedParameters
from temper_engine_fsdp.training.lora_targets import (
    convert_saved_targets,
    exclude_encoder,
    keep_target_names,
    name_converted_layers,
    target_linears_as_modules,
)

_ADAPTER = "default"
"""Name that peft gives to a single adapter."""
_EXPERT_TENSORS = ("gate_up_proj", "up_proj", "down_proj")
"""Tensors [experts, rows, columns] that transformers joins a layer's experts into.

Experts without a gate, as in Nemotron-H, have `up_proj` instead of `gate_up_proj`."""


class LoraAdapter:
    """One model's adapter; its parameters are part of the model and may be sharded."""

    def __init__(self, hf_model: PreTrainedModel, *, config: LoraConfig) -> None:
        self._config = config
        self._is_adapter_disabled = False
        self.has_replaced_base = False
        """True if the base weights were replaced, so that checkpoints must contain them."""
        modules = dict(hf_model.named_modules())
        self._switchable = [
            m for m in modules.values() if isinstance(m, BaseTunerLayer | ModulesToSaveWrapper)
        ]
        self._linears = {
            name: module for name, module in modules.items() if isinstance(module, LoraLinear)
        }
        self._experts = {
            _expert_weight_name(name, module): (name, module)
            for name, module in _expert_wrappers(hf_model)
        }
        self._fully_trained = tuple(
            name for name, module in modules.items() if isinstance(module, ModulesToSaveWrapper)
        )

    @property
    def targets_experts(self) -> bool:
        """True if the adapter changes expert tensors, not only linear layers."""
        return bool(self._experts)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapter inside the context; may be nested."""
        was_disabled = self._is_adapter_disabled
        self._set_disabled(is_disabled=True)
        try:
            yield
        finally:
            self._set_disabled(is_disabled=was_disabled)

    def _set_disabled(self, *, is_disabled: bool) -> None:
        self._is_adapter_disabled = is_disabled
        for module in self._switchable:
            # A private field: enable_adapters() would also change requires_grad, which FSDP reads
            # only once, when it first gathers a parameter.
            module._disable_adapters = is_disabled

    def make_module_getter(self, module: nn.Module) -> Callable[[], nn.Module]:
        """Return a function that returns the module to use in place of `module`.

        That is its trained copy, if it has one and the adapter is not disabled.
        """

        def get_module() -> nn.Module:
            if not isinstance(module, ModulesToSaveWrapper):
                return module
            original_or_trained: nn.Module = (
                module.original_module
                if self._is_adapter_disabled
                else module.modules_to_save[_ADAPTER]
            )
            return original_or_trained

        return get_module

    def merge_weight(
        self, name: str, weight: Tensor, *, adapter_parameters: ShardedParameters
    ) -> Tensor:
        """Merge the adapter into a full weight, in float32. Collective.

        Args:
            name: The weight's Hugging Face name.
            weight: Full weight.
            adapter_parameters: Parameters of the adapter.

        Returns:
            The merged weight; `weight` itself if the adapter is disabled or does not change it.
        """
        owner, _, kind = name.rpartition(".")
        if self._is_adapter_disabled:
            return weight
        if any(name.startswith(f"{module}.") for module in self._fully_trained):
            return _gather_tensor(PEFT_PREFIX + name, adapter_parameters)
        if name in self._experts:
            return self._merge_experts(name, weight, adapter_parameters=adapter_parameters)
        if owner not in self._linears or kind != "weight":
            return weight
        down, up = (
            _gather_tensor(f"{PEFT_PREFIX}{owner}.{part}.weight", adapter_parameters)
            for part in ("lora_A", "lora_B")
        )
        merged = torch.addmm(
            weight.float(), up.float(), down.float(), alpha=self._linears[owner].scaling[_ADAPTER]
        )
        magnitude = f"{PEFT_PREFIX}{owner}.lora_magnitude_vector"
        if magnitude in adapter_parameters:
            # DoRA rescales each row to a trained norm; arXiv:2402.09353, equation 5.
            merged *= (
                _gather_tensor(magnitude, adapter_parameters).float()
                / torch.linalg.vector_norm(merged, dim=1)
            )[:, None]
        return merged

    def _merge_experts(
        self, name: str, weight: Tensor, *, adapter_parameters: ShardedParameters
    ) -> Tensor:
        """Merge into a joined expert tensor; PEFT stacks A by expert and interleaves B."""
        module_name, module = self._experts[name]
        down, up = (
            _gather_tensor(f"{PEFT_PREFIX}{module_name}.{part}.weight", adapter_parameters).float()
            for part in ("lora_A", "lora_B")
        )
        num_experts = len(weight)
        down, up = (
            down.unflatten(0, (num_experts, -1)),
            up.unflatten(1, (-1, num_experts)).permute(2, 0, 1),
        )
        if getattr(module.get_base_layer(), "is_transposed", False):
            # gpt-oss stores [experts, input, output].
            up, down = down.mT, up.mT
        return torch.baddbmm(weight.float(), up, down, alpha=module.scaling[_ADAPTER])

    def export(
        self, adapter_parameters: ShardedParameters
    ) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return the contents of PEFT's two files: config and full float32 tensors. Collective."""
        return self.peft_config(), {
            name: _gather_tensor(name, adapter_parameters).float() for name in adapter_parameters
        }

    def peft_config(self) -> dict[str, object]:
        """Return the contents of adapter_config.json."""
        return adapter_checks.to_adapter_config(self._config.to_dict())

    @torch.no_grad()
    def load(
        self,
        config: Mapping[str, object],
        tensors: Mapping[str, Tensor],
        *,
        adapter_parameters: ShardedParameters,
    ) -> None:
        """Replace the parameters of the adapter with full tensors. No communication.

        Raises:
            ConfigError: If the same tensors would compute something else with that config.
            WeightError: If a name is missing or unexpected, or a shape differs; nothing is loaded
                then.
        """
        adapter_checks.check_same_adapter(config, own_config=self.peft_config())
        adapter_checks.check_adapter_tensors(
            {name: parameter.shape for name, parameter in adapter_parameters.items()}, tensors
        )
        for name, parameter in adapter_parameters.items():
            parameter.local_shard().copy_(parameter.take_shard(tensors[name]))

    def check_base_weights(self, has_weights: bool, *, directory: str) -> None:
        """Check before a load that base weights match the adapter; record if they were replaced.

        Args:
            has_weights: True if the checkpoint contains base weights.
            directory: Directory of the checkpoint.

        Raises:
            CheckpointError: If it does not, and the base weights were replaced in this engine.
        """
        adapter_checks.check_base_weights(
            has_replaced_base=self.has_replaced_base, has_weights=has_weights, directory=directory
        )
        self.has_replaced_base = has_weights


def attach_adapter(
    hf_model: PreTrainedModel,
    *,
    spec: LoraSpec,
    model: ModelSpec,
    computes_magnitudes: bool = True,
) -> LoraAdapter:
    """Add an adapter to the model, new or from a directory; freeze all other parameters.

    Args:
        hf_model: Model without an adapter.
        spec: Adapter settings.
        model: Model settings.
        computes_magnitudes: False leaves out DoRA's magnitudes, which PEFT computes from the base
            weights. A check of a model without values does so.

    Raises:
        ConfigError: If no module matches, or if one matches that cannot have an adapter.
        CapabilityError: If the directory has another kind of adapter.
        WeightError: If the tensors in the directory do not match its config.
    """
    config = (
        LoraConfig(**adapter_checks.build_lora_config(spec, model=model))
        if spec.path is None
        else _saved_config(spec.path, dropout=spec.dropout)
    )
    adapter_checks.check_target_names(
        spec, module_names=[name for name, _ in hf_model.named_modules()]
    )
    if spec.path is None:
        config.exclude_modules = exclude_encoder(hf_model, config.exclude_modules)
    else:
        convert_saved_targets(config, hf_model, path=spec.path)
    module_targets, parameter_targets = config.target_modules, tuple(config.target_parameters or ())
    if spec.path is not None:
        target_linears_as_modules(config, hf_model)
    expert_targets = tuple(config.target_parameters or ())
    uses_dora = config.use_dora
    config.use_dora = uses_dora and computes_magnitudes
    head = hf_model.get_output_embeddings()
    # Every rank draws the same values; the streams of the process stay as they were.
    with fork_rng(model.seed), warnings.catch_warnings(), keep_target_names():
        # peft warns of tied embeddings and missing modules; the checks below make both errors.
        warnings.simplefilter("ignore")
        try:
            inject_adapter_in_model(config, hf_model)
        except ValueError as error:
            targets = f"target_modules {adapter_checks.format_targets(module_targets)}" + (
                f" with lora.target_parameters {', '.join(parameter_targets)}"
                if parameter_targets
                else ""
            )
            raise ConfigError(
                f"lora.{targets} cannot be adapted in {type(hf_model).__name__}: {error}"
            ) from error
        _initialize(hf_model, seed=model.seed)
    _refuse_unsupported(hf_model, head=head)
    _check_target_parameters(hf_model, requested=expert_targets)
    config.use_dora = uses_dora
    config.target_parameters = set(parameter_targets) or None
    # Save names instead of "all-linear", which other loaders may resolve differently.
    config.target_modules = (
        _short_target_names(hf_model) if module_targets == "all-linear" else module_targets
    )
    name_converted_layers(config, hf_model, names=_short_target_names(hf_model))
    adapter = LoraAdapter(hf_model, config=config)
    if spec.path is not None:
        _set_initial_tensors(hf_model, load_file(adapter_checks.find_adapter_weights(spec.path)))
    return adapter


def _initialize(hf_model: nn.Module, *, seed: int) -> None:
    """Initialize the adapter with the numbers that peft draws.

    peft leaves adapters of meta-device layers on the meta device.
    """
    restart_rng(seed)
    for layer in _sort_like_peft(hf_model):
        for part in (layer.lora_A, layer.lora_B):
            if any(parameter.is_meta for parameter in part.parameters()):
                part.to_empty(device="cpu")
            # The constructor of nn.Linear draws numbers, too.
            part[_ADAPTER].reset_parameters()
        layer.reset_lora_parameters(_ADAPTER, init_lora_weights=True)


def _sort_like_peft(hf_model: nn.Module) -> Iterator[LoraLinear | ParamWrapper]:
    """Yield layers in peft's initialization order.

    Linear layers come first, then expert tensors. Wrappers around the same module are yielded
    from the innermost to the outermost.
    """
    yield from (module for module in hf_model.modules() if isinstance(module, LoraLinear))
    nests: dict[str, list[ParamWrapper]] = {}
    for name, wrapper in _expert_wrappers(hf_model):
        nests.setdefault(name.replace(".base_layer", ""), []).append(wrapper)
    for nest in nests.values():
        yield from reversed(nest)


def requires_loaded_weights(spec: LoraSpec, *, model: ModelSpec) -> bool:
    """Return True if the adapter can only be attached to a model with loaded weights.

    DoRA computes its magnitudes from the base weights, and `modules_to_save` start as copies of
    them.

    Raises:
        ConfigError: If `spec.path` is set but contains no adapter.
        CapabilityError: If `spec.path` contains another kind of adapter.
    """
    config = (
        LoraConfig(**adapter_checks.build_lora_config(spec, model=model))
        if spec.path is None
        else _saved_config(spec.path, dropout=spec.dropout)
    )
    return bool(
        config.use_dora
        or config.modules_to_save
        or config.init_lora_weights not in (True, False, "gaussian")
    )


def _saved_config(path: str, *, dropout: float) -> LoraConfig:
    adapter_checks.check_adapter_directory(path)
    config = LoraConfig.from_pretrained(path)
    assert isinstance(config, LoraConfig)
    if config.target_parameters and dropout > 0:
        raise ConfigError(
            f"lora.dropout is {dropout}, but the adapter in {path} has target_parameters, for "
            "which PEFT has no dropout: set it to 0."
        )
    # Saved configs set inference_mode, with which peft would freeze the adapter.
    config.inference_mode = False
    config.lora_dropout = dropout
    return config


def _refuse_unsupported(hf_model: PreTrainedModel, *, head: nn.Module | None) -> None:
    modules = dict(hf_model.named_modules())
    for name, module in modules.items():
        if isinstance(module, ParamWrapper):
            continue
        if isinstance(module, BaseTunerLayer) and (
            not isinstance(module, LoraLinear) or module.base_layer is head
        ):
            raise ConfigError(
                f"lora.target_modules matches {name}, which cannot be adapted: only linear layers "
                "below the head can. Name it in lora.exclude_modules, or train it in full through "
                "lora.modules_to_save."
            )
        is_embedding = isinstance(module, ModulesToSaveWrapper) and module.original_module in (
            head,
            hf_model.get_input_embeddings(),
        )
        if is_embedding and hf_model.config.tie_word_embeddings:
            raise ConfigError(
                f"lora.modules_to_save names {name}, which this model ties to its other embedding: "
                "choose an untied model."
            )


def _expert_wrappers(hf_model: nn.Module) -> Iterator[tuple[str, ParamWrapper]]:
    """Yield the modules that adapt expert tensors, with their names."""
    for name, module in hf_model.named_modules():
        if isinstance(module, ParamWrapper):
            yield name, module


def _expert_weight_name(name: str, module: ParamWrapper) -> str:
    return hf_name(f"{name}.base_layer.{module.parameter_name}")


def _list_expert_tensors(hf_model: nn.Module) -> list[str]:
    """Return the last parts of the names of expert tensors, such as `mlp.experts.down_proj`."""
    names = (hf_name(name) for name, _ in hf_model.named_parameters())
    return list(
        dict.fromkeys(
            ".".join(name.split(".")[-3:])
            for name in names
            if name.rpartition(".experts.")[2] in _EXPERT_TENSORS
        )
    )


def _check_target_parameters(hf_model: nn.Module, *, requested: Collection[str]) -> None:
    """Reject target parameters other than expert tensors given by name.

    Other names would give expert tensors a different rank.
    """
    adapted = {_expert_weight_name(name, module) for name, module in _expert_wrappers(hf_model)}
    tensors = " and ".join(_list_expert_tensors(hf_model))
    not_experts = sorted(
        name for name in adapted if name.rpartition(".experts.")[2] not in _EXPERT_TENSORS
    )
    unknown = sorted(
        name for name in requested if not any(f".{each}".endswith(f".{name}") for each in adapted)
    )
    if not_experts or unknown:
        raise ConfigError(
            f"lora.target_parameters names {', '.join(not_experts or unknown)}, but only tensors "
            f"of experts can be named: {f'use {tensors}' if tensors else 'this model has none'}."
        )


def _short_target_names(hf_model: PreTrainedModel) -> set[str]:
    """Return the last part of each adapted layer's name, or the full name if ambiguous."""
    linears = {
        name: module
        for name, module in hf_model.named_modules()
        if isinstance(module, nn.Linear | LoraLinear)
        # Linear layers inside an adapted layer: the two of the adapter, and the original one.
        and ".lora_" not in name
        and ".base_layer" not in name
    }
    adapted = [name for name, module in linears.items() if isinstance(module, LoraLinear)]
    unadapted_endings = {name.rpartition(".")[2] for name in linears.keys() - set(adapted)}
    return {
        name if name.rpartition(".")[2] in unadapted_endings else name.rpartition(".")[2]
        for name in adapted
    }


def _gather_tensor(name: str, adapter_parameters: ShardedParameters) -> Tensor:
    return adapter_parameters[name].gather(adapter_parameters[name].local_shard())


@torch.no_grad()
def _set_initial_tensors(hf_model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Set the adapter of a model that is not sharded yet."""
    targets = {
        peft_name(name): parameter
        for name, parameter in hf_model.named_parameters()
        if is_adapter_parameter(name)
    }
    adapter_checks.check_adapter_tensors(
        {name: parameter.shape for name, parameter in targets.items()}, tensors
    )
    for name, parameter in targets.items():
        parameter.copy_(tensors[name])
