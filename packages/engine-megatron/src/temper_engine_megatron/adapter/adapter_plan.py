"""Plan of an adapter: the modules it changes and its initial tensors, new or from a PEFT folder.

The only module that imports peft. PEFT's config decides which modules match; the computation is in
`linear_adapters` and `expert_adapters`.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from temper_engine_api import adapter_checks
from temper_engine_api.adapter_checks import (
    ADAPTER_CONFIG,
    PEFT_PREFIX,
    format_targets,
    has_suffix,
)
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_megatron.adapter.linear_adapters import LoraSettings
from temper_engine_megatron.huggingface.weight_names import SHARED_EXPERT_GATE, peft_expert_prefix

_UNSUPPORTED_FIELDS = (
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "use_qalora",
    "fan_in_fan_out",
)
"""Fields of PEFT's config that change the computation and are not implemented here."""
_EXPERT_MATRICES = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Names of expert matrices in files. transformers stacks a layer's expert matrices."""
_UNADAPTED_LAYERS: Mapping[str, str] = {
    SHARED_EXPERT_GATE: "which is a parameter and no linear layer in Megatron",
    **dict.fromkeys(
        ("fc1_latent_proj", "fc2_latent_proj"),
        "which projects tokens for the narrow experts of this engine outside Megatron's layers",
    ),
}
"""Names of layers that the FSDP engine adapts and this one does not, and the reasons."""
_PRIVATE_ADAPTER_FILES = ("adapter_checkpoint", "mp_rank_*_adapter.pt", "dist_ckpt")
"""Adapter files in other systems' private layouts."""


class AdapterPlan:
    """Hugging Face modules that are adapted or trained in full; made before the model is built."""

    def __init__(
        self,
        spec: LoraSpec,
        *,
        model: ModelSpec,
        hf_config: PretrainedConfig,
        modules: tuple[str, ...],
        other_modules: tuple[str, ...],
        expert_tensors: tuple[str, ...],
        head: str,
    ) -> None:
        """Match the settings with the model's modules.

        Args:
            spec: Adapter settings.
            model: Model of the engine.
            hf_config: Its config.
            modules: Hugging Face modules that can have an adapter, in model order.
            other_modules: Hugging Face modules with weights that cannot.
            expert_tensors: Joined expert tensors of transformers, in model order.
            head: Hugging Face module of the output layer.

        Raises:
            ConfigError: If no module matches, or if one matches that cannot have an adapter.
            CapabilityError: If the directory has another kind of adapter.
        """
        self.spec, self.head = spec, head
        self.config = (
            LoraConfig(**adapter_checks.build_lora_config(spec, model=model))
            if spec.path is None
            else _saved_config(spec.path, dropout=spec.dropout)
        )
        all_modules = (*modules, *other_modules)
        expert_names = _find_expert_names(hf_config)
        if spec.path is None:
            _check_no_expert_modules(
                self.config, all_modules=all_modules, expert_tensors=expert_tensors
            )
        else:
            _check_saved_targets(
                self.config, path=spec.path, modules=modules, expert_names=expert_names
            )
        adapter_checks.check_target_names(spec, module_names=all_modules)
        self.expert_targets = self._match_expert_tensors(expert_tensors, modules=modules)
        """Joined expert tensors that are adapted."""
        self.targets = self._match_linears(modules, other_modules)
        """Linear layers that are adapted."""
        self.trains_head = self._trains_head(all_modules)
        if spec.path is None or self.config.target_modules == "all-linear":
            self._set_exported_targets(all_modules, expert_names=expert_names)
        scale = math.sqrt(self.config.r) if self.config.use_rslora else self.config.r
        self.settings = LoraSettings(
            rank=self.config.r,
            scale=self.config.lora_alpha / scale,
            dropout=spec.dropout,
            dora=bool(self.config.use_dora),
        )
        self._seed = model.seed

    def _match_linears(
        self, modules: tuple[str, ...], other_modules: tuple[str, ...]
    ) -> tuple[str, ...]:
        requested = self.config.target_modules
        if requested == "all-linear":
            targets = tuple(name for name in modules if not _is_excluded(self.config, name))
            _check_no_unadapted(
                [name for name in other_modules if not _is_excluded(self.config, name)],
                modules=modules,
            )
        else:
            targets = tuple(
                name
                for name in modules
                if _is_matched(self.config, name) or self._names_weight(name)
            )
            wrong = [name for name in other_modules if _is_matched(self.config, name)]
            _check_no_unadapted(wrong, modules=modules)
            if wrong:
                raise ConfigError(
                    f"lora.target_modules matches {wrong[0]}, which cannot be adapted: the "
                    f"Megatron engine adapts {format_targets(_last_parts(modules))} of this model. "
                    "Name it in lora.exclude_modules, or a head in lora.modules_to_save, which "
                    "trains it in full."
                )
        if not targets and not self.expert_targets:
            raise ConfigError(
                f"lora.target_modules {format_targets(requested)} matches no linear layer of this "
                f"model: name some of {format_targets(_last_parts(modules))}."
            )
        return targets

    def _names_weight(self, module: str) -> bool:
        """Return True if a saved adapter names a linear layer by its weight."""
        return self.spec.path is not None and any(
            has_suffix((f"{module}.weight",), suffix=name)
            for name in self.config.target_parameters or ()
        )

    def _match_expert_tensors(
        self, expert_tensors: tuple[str, ...], *, modules: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return the joined expert tensors that the config names by the ends of their names.

        Raises:
            ConfigError: If it names others; saved adapters may name weights of linear layers.
        """
        requested = self.config.target_parameters or ()
        known = expert_tensors
        if self.spec.path is not None:
            known += tuple(f"{module}.weight" for module in modules)
        unknown = sorted(name for name in requested if not has_suffix(known, suffix=name))
        if unknown:
            available = (
                format_targets(_short_tensor_names(expert_tensors))
                if expert_tensors
                else "no experts"
            )
            raise ConfigError(
                f"lora.target_parameters names {', '.join(unknown)}, but only tensors of experts "
                f"can be named, and this model has {available}."
            )
        return tuple(
            tensor
            for tensor in expert_tensors
            if any(has_suffix((tensor,), suffix=name) for name in requested)
        )

    def _set_exported_targets(
        self, all_modules: tuple[str, ...], *, expert_names: frozenset[str]
    ) -> None:
        """Set the targets in adapter_config.json so that PEFT finds exactly the adapted layers.

        Linear layers with names that PEFT takes for experts are named by their weights, in
        target_parameters.

        Raises:
            ConfigError: If there are such layers, and dropout or DoRA, which PEFT does not have
                for target_parameters.
        """
        requested = self.config.target_modules
        is_converted = bool(expert_names.intersection(_last_parts(self.targets)))
        # In models with such names, PEFT takes a pattern for the last parts of what it matches.
        is_pattern = bool(expert_names) and isinstance(requested, str)
        if requested != "all-linear" and not is_converted and not is_pattern:
            return
        # Save names instead of "all-linear", which other loaders may resolve differently.
        names = _shorten(self.targets, all_modules=all_modules)
        converted = {name for name in names if _last_part(name) in expert_names}
        self.config.target_modules = names - converted
        if not converted:
            return
        if self.spec.dora or self.spec.dropout > 0:
            setting = "dora" if self.spec.dora else "dropout"
            raise ConfigError(
                f"lora.{setting} is {getattr(self.spec, setting)}, but in models of this type PEFT "
                f"can load adapters of {', '.join(_last_parts(tuple(converted)))} only without it: "
                f"remove lora.{setting}, or name them in lora.exclude_modules."
            )
        self.config.target_parameters = sorted(
            {*(self.config.target_parameters or ()), *(f"{name}.weight" for name in converted)}
        )

    def _trains_head(self, modules: tuple[str, ...]) -> bool:
        # PEFT adds all head names that it knows to modules_to_save, so a name that the model does
        # not have is an error only if the user gave it, which check_target_names has found.
        requested = set(self.config.modules_to_save or ())
        matched = {
            name for name in modules for suffix in requested if has_suffix((name,), suffix=suffix)
        }
        if unsupported := matched - {self.head}:
            raise ConfigError(
                f"lora.modules_to_save names {', '.join(sorted(unsupported))}, but the Megatron "
                f"engine can train only the output layer in full ({self.head}): remove the others."
            )
        return self.head in matched

    def peft_config(self) -> dict[str, object]:
        """Return the contents of adapter_config.json."""
        return adapter_checks.to_adapter_config(self.config.to_dict())

    def select_targets(self, modules: tuple[str, ...]) -> tuple[str, ...]:
        """Return the last parts of those modules that are adapted."""
        return tuple(name.rpartition(".")[2] for name in modules if name in self.targets)

    def select_expert_targets(self, module: str) -> tuple[str, ...]:
        """Return the last name parts of the adapted tensors in a module with experts."""
        return tuple(
            name.rpartition(".")[2]
            for name in self.expert_targets
            if name.rpartition(".")[0] == module
        )

    def peft_prefix(self, expert_tensor: str) -> str:
        """Return what PEFT puts before `.lora_A` for a joined expert tensor."""
        module, _, last_part = expert_tensor.rpartition(".")
        return peft_expert_prefix(module, last_part, adapted=self.select_expert_targets(module))

    def initial_tensors(
        self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """Return the initial full tensors by PEFT name, without the magnitudes of a new DoRA.

        Args:
            shapes: Shapes by PEFT name.
            read: Reads a full base weight, for modules that are trained in full.

        Raises:
            WeightError: If the tensors in the directory do not match its config.
        """
        if self.spec.path is not None:
            tensors = load_file(adapter_checks.find_adapter_weights(self.spec.path))
            adapter_checks.check_adapter_tensors(shapes, tensors)
            return tensors
        new: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            # Seed only the CPU generator, because torch.manual_seed would also seed every GPU.
            torch.default_generator.manual_seed(self._seed)
            # Draw in peft's initialization order: linear layers first, then experts.
            for prefix in (
                *(PEFT_PREFIX + module for module in self.targets),
                *map(self.peft_prefix, self.expert_targets),
            ):
                a, b = (f"{prefix}.{part}.weight" for part in ("lora_A", "lora_B"))
                new[a], new[b] = _draw_pair(shapes[a], shapes[b])
        for name in shapes.keys() - new.keys():
            if not name.endswith("lora_magnitude_vector"):
                new[name] = read(name.removeprefix(PEFT_PREFIX))
        return new


def _saved_config(path: str, *, dropout: float) -> LoraConfig:
    folder = Path(path)
    if not (folder / ADAPTER_CONFIG).is_file() and any(
        next(folder.glob(pattern), None) for pattern in _PRIVATE_ADAPTER_FILES
    ):
        raise ConfigError(
            f"lora.path is {path!r}, which has an adapter in another system's private layout: "
            f"convert it with `temper-migrate checkpoint {path} --to peft --out NEW` and set "
            "lora.path to NEW."
        )
    adapter_checks.check_adapter_directory(path)
    config = LoraConfig.from_pretrained(path)
    assert isinstance(config, LoraConfig)
    unsupported = [name for name in _UNSUPPORTED_FIELDS if vars(config).get(name)]
    unsupported += ["bias"] if config.bias != "none" else []
    if unsupported:
        raise CapabilityError(
            f"the adapter in {path} sets {', '.join(unsupported)}, which the Megatron engine does "
            "not support: use the FSDP engine, or an adapter without these settings."
        )
    if config.target_parameters and (dropout > 0 or config.use_dora):
        setting = (
            f"lora.dropout is {dropout}" if dropout > 0 else f"the adapter in {path} uses DoRA"
        )
        raise ConfigError(
            f"{setting}, but PEFT supports that for linear layers only, and the adapter in {path} "
            "has target_parameters: set lora.dropout to 0, or choose another adapter."
        )
    # Saved adapters have it set, and peft would freeze them.
    config.inference_mode = False
    config.lora_dropout = dropout
    return config


def _draw_pair(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return A and B with the numbers that peft draws.

    peft creates two linear layers, whose constructors draw numbers too, then draws A again and sets
    B to zero.
    """
    a = nn.Linear(a_shape[1], a_shape[0], bias=False)
    b = nn.Linear(b_shape[1], b_shape[0], bias=False)
    nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
    return a.weight.detach(), torch.zeros_like(b.weight)


def _is_matched(config: LoraConfig, name: str) -> bool:
    # peft returns a bool, a match object, or a falsy mark for excluded modules.
    return bool(check_target_module_exists(config, name))


def _is_excluded(config: LoraConfig, name: str) -> bool:
    excluded = config.exclude_modules
    if not excluded:
        return False
    # PEFT cannot match exclusions alone, so match them as if they were targets.
    probe = LoraConfig(target_modules=excluded if isinstance(excluded, str) else list(excluded))
    return bool(check_target_module_exists(probe, name))


def _find_expert_names(hf_config: PretrainedConfig) -> frozenset[str]:
    """Return the module names that PEFT takes for matrices of experts in models of this type.

    PEFT turns such a name into target_parameters, for adapters from before transformers joined the
    experts of a layer. It does so for names of dense MLPs and shared experts, too.
    """
    config = LoraConfig(target_modules=sorted(_EXPERT_MATRICES))
    # The function reads only the model's config.
    model: Any = SimpleNamespace(config=hf_config)
    convert_peft_config_for_transformers(config, model=model, conversions=None)
    return _EXPERT_MATRICES.difference(config.target_modules or ())


def _check_saved_targets(
    config: LoraConfig, *, path: str, modules: tuple[str, ...], expert_names: frozenset[str]
) -> None:
    """Reject a saved adapter of which PEFT applies some target_modules to experts."""
    requested = config.target_modules or ()
    named = (
        (name for name in modules if _is_matched(config, name))
        if isinstance(requested, str)
        else requested
    )
    includes_experts = requested == "all-linear" and bool(expert_names)
    if includes_experts or expert_names.intersection(map(_last_part, named)):
        raise ConfigError(
            f"the adapter in {path} has target_modules {format_targets(requested)}, of which PEFT "
            "applies some to the experts of this model: load the adapter in PEFT 0.21 or later and "
            "save it again, which names experts in target_parameters."
        )


def _check_no_expert_modules(
    config: LoraConfig, *, all_modules: tuple[str, ...], expert_tensors: tuple[str, ...]
) -> None:
    """Reject names that only matrices inside experts have."""
    requested = config.target_modules
    if isinstance(requested, str) or not expert_tensors:
        return
    known = set(_last_parts(all_modules))
    inside = {*_EXPERT_MATRICES, *map(_last_part, expert_tensors)} - known
    if named := sorted(inside.intersection(map(_last_part, requested or ()))):
        raise ConfigError(
            f"lora.target_modules is {format_targets(requested)}, but {', '.join(named)} are only "
            "inside this model's experts: name them as "
            f"{format_targets(_short_tensor_names(expert_tensors))} in lora.target_parameters."
        )


def _check_no_unadapted(matched: list[str], *, modules: tuple[str, ...]) -> None:
    """Reject layers that have adapters in the FSDP engine, but not in this one."""
    unadapted = [name for name in matched if _last_part(name) in _UNADAPTED_LAYERS]
    if unadapted:
        raise ConfigError(
            f"lora.target_modules includes {unadapted[0]}, "
            f"{_UNADAPTED_LAYERS[_last_part(unadapted[0])]}, so it cannot be adapted: name "
            f"{', '.join(_last_parts(tuple(unadapted)))} in lora.exclude_modules, use some of "
            f"{format_targets(_last_parts(modules))} in lora.target_modules, or use the FSDP "
            "engine."
        )


def _shorten(targets: tuple[str, ...], *, all_modules: tuple[str, ...]) -> set[str]:
    """Return last parts of names, or full names where a module that is no target has the same."""
    unadapted = {_last_part(name) for name in all_modules if name not in targets}
    return {name if _last_part(name) in unadapted else _last_part(name) for name in targets}


def _short_tensor_names(expert_tensors: tuple[str, ...]) -> list[str]:
    """Return the ends of tensor names; they are the same in all layers."""
    return sorted({".".join(name.split(".")[-3:]) for name in expert_tensors})


def _last_parts(modules: tuple[str, ...]) -> list[str]:
    return sorted({_last_part(name) for name in modules})


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]
