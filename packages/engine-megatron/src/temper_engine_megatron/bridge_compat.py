"""Megatron-Bridge, imported here and nowhere else, with everything that depends on its version or on Megatron-Core's.

In: a Hugging Face configuration. Out: a Megatron configuration, and for each of Megatron's parameters what it is made of.
Other lines than megatron-core 0.16 and Megatron-Bridge 0.3 are refused.
"""

import builtins
import copy
import importlib.metadata
import importlib.util
import logging
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from packaging.specifiers import SpecifierSet
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from temper_engine_api.errors import CapabilityError, ConfigError

PIP_LINE = "pip install --no-deps megatron-bridge==0.3.1"
"""Its requirements can't be resolved by pip (one of them needs torch to be built); none of those that are missing is used here."""

_LINES = {"megatron-core": (SpecifierSet(">=0.16.1,<0.17"), "0.16.1"), "megatron-bridge": (SpecifierSet(">=0.3.1,<0.4"), "0.3.1")}
"""By distribution: the versions that are taken, and the one that is tested."""

USE_ANOTHER = "use a qwen2, qwen3, qwen3_moe or llama model."

ParameterKind = Literal["plain", "qkv", "gated"]

_NEEDS_TRANSFORMER_ENGINE = "megatron.bridge.peft."
_NEEDS_TRITON = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What one of Megatron's parameters is made of."""

    kind: ParameterKind
    """plain: one tensor. qkv: query, key and value, interleaved by group of heads. gated: gate and up, one above the other."""
    names: tuple[str, ...]
    """Hugging Face names in the order that the kind says."""


class Translation:
    """A Hugging Face architecture in Megatron's words."""

    def __init__(self, hf_config: PretrainedConfig) -> None:
        bridge = _import_bridge()
        described = _as_causal_lm(hf_config)
        try:
            auto = bridge.AutoBridge.from_hf_config(described)
        except ValueError as error:
            raise CapabilityError(f"Megatron-Bridge has no translation of {described.architectures}: {USE_ANOTHER}") from error
        self.settings: Any = auto.to_megatron_provider(load_weights=False)
        self._registry = _model_bridge().get_model_bridge(getattr(transformers, described.architectures[0])).mapping_registry()

    def recipe_of(self, name: str) -> Recipe:
        """Of a parameter by Megatron's name with the layer's global number.

        Raises:
            CapabilityError: the bridge does not know it.
        """
        mapping = self._registry.megatron_to_hf_lookup(name)
        if mapping is None:
            raise CapabilityError(f"Megatron-Bridge does not say what {name} is made of: this architecture is not supported.")
        parts: str | Mapping[str, str] = mapping.hf_param
        if isinstance(parts, str):
            return Recipe(kind="plain", names=(parts,))
        if parts.keys() == {"q", "k", "v"}:
            return Recipe(kind="qkv", names=(parts["q"], parts["k"], parts["v"]))
        if parts.keys() == {"gate", "up"}:
            return Recipe(kind="gated", names=(parts["gate"], parts["up"]))
        raise CapabilityError(f"{name} is made of {sorted(parts)}, which this engine can't put together: {USE_ANOTHER}")

    def join_heads(self, parts: Sequence[Tensor]) -> Tensor:
        """Query, key and value as Megatron's interleaved tensor, full size."""
        conversion = _param_mapping()
        join = conversion.merge_qkv_weights if parts[0].ndim > 1 else conversion.merge_qkv_biases
        joined: Tensor = join(self.settings, *parts)
        return joined

    def split_heads(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The reverse."""
        conversion = _param_mapping()
        split = conversion.split_qkv_weights if tensor.ndim > 1 else conversion.split_qkv_biases
        return tuple(split(self.settings, tensor))


def _as_causal_lm(hf_config: PretrainedConfig) -> PretrainedConfig:
    """The bridge finds a translation by the name of the class with a language-model head, whatever head a model has."""
    described = copy.deepcopy(hf_config)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if name is None:
        raise CapabilityError(f"{type(hf_config).__name__} has no causal language model in transformers: {USE_ANOTHER}")
    described.architectures = [name]
    # transformers 5 moved it; bridge 0.3 reads the old place, and without it takes 10000.
    rotary: Mapping[str, object] = described.to_dict().get("rope_parameters") or {}
    if "rope_theta" in rotary:
        described.rope_theta = rotary["rope_theta"]
    return described


def _import_bridge() -> Any:
    if importlib.util.find_spec("megatron.bridge") is None:
        raise ConfigError(f"the Megatron engine needs Megatron-Bridge, which is not installed: {PIP_LINE}")
    for name, (taken, tested) in _LINES.items():
        _check_line(name, taken=taken, tested=tested)
    try:
        with _stand_ins():
            import megatron.bridge
    except (ImportError, RuntimeError) as error:
        # The empty package "transformer-engine" raises a RuntimeError when it is imported.
        raise ConfigError(
            f"Megatron-Bridge is installed, but importing it failed with {type(error).__name__} ({error}): "
            "install what is missing, or remove the package that does not work."
        ) from error
    _mend_core()
    # It adds a handler and a level to the root logger's children; ours stay as they are.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    return megatron.bridge


def _mend_core() -> None:
    """Without TransformerEngine the router asks for a name that core 0.16 then does not define."""
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)


def _check_line(name: str, *, taken: SpecifierSet, tested: str) -> None:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = "without a version"
    if found == "without a version" or not taken.contains(found, prereleases=True):
        raise ConfigError(
            f"{name} is {found}, but the Megatron engine uses names of it that other versions change and takes {taken} "
            f'({tested} is tested): pip install --no-deps "{name}=={tested}"'
        )


def _model_bridge() -> Any:
    from megatron.bridge.models.conversion import model_bridge

    return model_bridge


def _param_mapping() -> Any:
    from megatron.bridge.models.conversion import param_mapping

    return param_mapping


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Two modules import TransformerEngine and Triton without asking; where those are absent they get names without content.

    Only the importing modules see them: a fake in ``sys.modules`` would make Megatron-Core believe that it has TransformerEngine.
    """
    absent = {name for name in ("transformer_engine", "triton") if importlib.util.find_spec(name) is None}
    real = builtins.__import__

    def choose(
        name: str, globals: Mapping[str, object] | None = None, locals: Any = None, fromlist: Sequence[str] = (), level: int = 0
    ) -> Any:
        importer = str((globals or {}).get("__name__") or "")
        root = name.partition(".")[0]
        if level == 0 and root in absent:
            if root == "transformer_engine" and importer.startswith(_NEEDS_TRANSFORMER_ENGINE):
                return _EMPTY_ENGINE.pytorch if fromlist else _EMPTY_ENGINE
            if root == "triton" and importer == _NEEDS_TRITON:
                return _EMPTY_TRITON.language if fromlist and "." in name else _EMPTY_TRITON
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


_EMPTY_ENGINE = types.SimpleNamespace(
    pytorch=types.SimpleNamespace(Linear=_Absent, LayerNormLinear=_Absent, ops=types.SimpleNamespace(Sequential=_Absent))
)
_EMPTY_TRITON = types.SimpleNamespace(jit=_decorate, language=types.SimpleNamespace(constexpr=object(), tensor=object))
