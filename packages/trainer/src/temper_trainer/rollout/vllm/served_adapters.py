"""Check whether vLLM can serve an adapter: it lacks features that engines train. Needs no vLLM."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from temper_engine_api.specs import LoraSpec

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Allowed values for vLLM's max_lora_rank."""

_TYPES_WITH_STACKED_EXPERTS = ("gpt_oss", "qwen3_5_moe", "qwen3_vl_moe")
"""Model types whose class in vLLM sets `is_3d_moe_weight`.

vLLM loads PEFT's adapters of stacked expert tensors for these only, and only if both tensors of
the experts are adapted (vLLM 0.27.1, `LoRAModelManager._stack_moe_lora_weights`).
"""
_STACKED_TENSORS = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """The settings of an adapter that decide whether a vLLM server can load it."""

    rank: int
    dora: bool
    modules_to_save: tuple[str, ...]
    target_parameters: tuple[str, ...]

    @classmethod
    def from_spec(cls, lora: LoraSpec) -> "ServedAdapter | None":
        """Return the settings, from the folder of a saved adapter; None if it cannot be read."""
        if lora.path is None:
            return cls(
                rank=lora.rank,
                dora=lora.dora,
                modules_to_save=lora.modules_to_save,
                target_parameters=lora.target_parameters,
            )
        try:
            fields = json.loads((Path(lora.path) / "adapter_config.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(fields, Mapping) or not isinstance(fields.get("r"), int):
            return None
        return cls(
            rank=fields["r"],
            dora=bool(fields.get("use_dora")),
            modules_to_save=tuple(fields.get("modules_to_save") or ()),
            target_parameters=tuple(fields.get("target_parameters") or ()),
        )

    @property
    def server_rank(self) -> int | None:
        """Value of vLLM's max_lora_rank; None if no value is large enough."""
        return next((rank for rank in _RANKS if rank >= self.rank), None)


def find_adapter_problems(lora: LoraSpec, *, key: str, model_type: str) -> Iterator[str]:
    """Yield why vLLM's servers could not load an adapter.

    Args:
        lora: Settings of the adapter.
        key: The settings' dotted key.
        model_type: Type of the base model, from its config.json.
    """
    adapter = ServedAdapter.from_spec(lora)
    if adapter is None:
        return  # reported with the folder
    location = key if lora.path is None else f"{key}.path {lora.path}"
    problems = []
    if adapter.server_rank is None:
        problems.append(f"rank {adapter.rank}, but vLLM serves adapters up to rank {_RANKS[-1]}")
    if adapter.dora:
        problems.append("DoRA, which vLLM does not serve")
    if adapter.modules_to_save:
        names = ", ".join(adapter.modules_to_save)
        problems.append(f"modules_to_save ({names}), which vLLM does not load")
    if experts := [name for name in adapter.target_parameters if ".experts." in f".{name}"]:
        names = f"target_parameters ({', '.join(experts)})"
        if model_type not in _TYPES_WITH_STACKED_EXPERTS:
            *others, last = _TYPES_WITH_STACKED_EXPERTS
            problems.append(
                f"{names}, which vLLM loads for {', '.join(others)} and {last} only, and not for "
                f"{model_type}"
            )
        elif not all(any(each.endswith(name) for each in experts) for name in _STACKED_TENSORS):
            problems.append(f"{names}, but vLLM needs both gate_up_proj and down_proj of experts")
    for problem in problems:
        yield (
            f"weight_sync.content is adapter, and {location} has {problem}: set "
            "weight_sync.content=full, which sends the merged weights, or change the adapter."
        )
