"""A low-rank adapter on Megatron's model: filled, switched off, merged, exchanged in the format of HF PEFT.

Its parameters live in the model; outside, its tensors go by the names of an ``adapter_model.safetensors``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from temper_engine_api.errors import CheckpointError, ConfigError
from temper_engine_api.weights import NamedWeight
from temper_engine_megatron.adapter.adapter_placement import AdapterPlacement
from temper_engine_megatron.adapter.adapter_plan import AdapterPlan
from temper_engine_megatron.adapter.linear_adapters import AdapterSwitch
from temper_engine_megatron.huggingface.expert_names import ExpertSlice, find_expert_slice
from temper_engine_megatron.huggingface.huggingface_model import TensorReader
from temper_engine_megatron.huggingface.weight_names import PEFT_PREFIX
from temper_engine_megatron.weights.sharded_state import Merge, ShardedState

_MUST_AGREE = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Fields of PEFT's configuration that decide what the same tensors compute."""


class LoraAdapter:
    """The adapter of one model; its parameters live in the model."""

    def __init__(self, plan: AdapterPlan, *, state: ShardedState, switch: AdapterSwitch) -> None:
        self._plan, self._switch = plan, switch
        self.state = state
        """Its parameters, by PEFT name."""
        self.has_replaced_base = False
        """Whether the model's weights are no longer those that the adapter was started on, so that checkpoints must hold them."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base model alone inside; nested entries are harmless."""
        before, self._switch.is_off = self._switch.is_off, True
        try:
            yield
        finally:
            self._switch.is_off = before

    def merging(self) -> Merge:
        """What does to the weights of one export what the adapter does to them; those of a layer's experts may be asked in a row."""
        kept: dict[str, tuple[Tensor, Tensor]] = {}
        return lambda name, weight: self._merged(name, weight, kept)

    def _merged(self, name: str, weight: Tensor, kept: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        """In float32 arithmetic; itself while the adapter is disabled. Collective."""
        owner, _, kind = name.rpartition(".")
        if self._switch.is_off:
            return weight
        if self._plan.trains_head and owner == self._plan.head:
            return self.state.full(PEFT_PREFIX + name)
        place = find_expert_slice(name)
        if place is not None and place.joined in self._plan.experts:
            return self._merged_expert(place, weight, kept)
        if owner not in self._plan.targets or kind != "weight":
            return weight
        down, up = (
            self.state.full(f"{PEFT_PREFIX}{owner}.{part}.weight") for part in ("lora_A", "lora_B")
        )
        whole = torch.addmm(weight.float(), up, down, alpha=self._plan.settings.scale)
        if self._plan.settings.dora:
            # Each row has a trained length; arXiv:2402.09353, equation 5.
            magnitude = self.state.full(f"{PEFT_PREFIX}{owner}.lora_magnitude_vector")
            whole *= (magnitude / torch.linalg.vector_norm(whole, dim=1))[:, None]
        return whole

    def _merged_expert(
        self, place: ExpertSlice, weight: Tensor, kept: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        stem = self._plan.peft_prefix(place.joined)
        if place.joined not in kept:
            # Two tensors a layer, which every expert has a part of.
            for other in [
                name for name in kept if name.rpartition(".")[0] != place.joined.rpartition(".")[0]
            ]:
                del kept[other]
            kept[place.joined] = (
                self.state.full(f"{stem}.lora_A.weight"),
                self.state.full(f"{stem}.lora_B.weight"),
            )
        down, up = kept[place.joined]
        rank = self._plan.settings.rank
        own_down, own_up = (
            down[place.expert * rank : (place.expert + 1) * rank],
            up[:, place.expert :: down.shape[0] // rank],
        )
        rows = own_up.chunk(place.num_parts)[place.part]
        return torch.addmm(weight.float(), rows, own_down, alpha=self._plan.settings.scale)

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """What PEFT's two files hold: the configuration, and full float32 tensors. Collective."""
        return self._plan.description(), dict(self.state.iterate_masters())

    def load(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Replace the adapter's parameters by these full tensors.

        Raises:
            ConfigError: with that configuration the same tensors would compute something else.
            WeightError: a name is missing or unexpected, or a shape differs; nothing has been loaded then.
        """
        ours = self._plan.description()
        for key in _MUST_AGREE:
            if config.get(key, ours[key]) != ours[key]:
                raise ConfigError(
                    f"the adapter to load has {key} {config[key]}, but this engine has {ours[key]}: configure lora like it."
                )
        self.state.load_weights(NamedWeight(name, tensor) for name, tensor in tensors.items())

    def check_base_weights(self, are_there: bool, *, directory: str) -> None:
        """Before a checkpoint is read: whether it holds the weights around the adapter too.

        Raises:
            CheckpointError: it does not, but those that it was made on were replaced here.
        """
        if self.has_replaced_base and not are_there:
            raise CheckpointError(
                f"the checkpoint in {directory} holds an adapter alone, but load_weights() has replaced the weights that this engine "
                "started with: load the checkpoint in a new engine."
            )
        self.has_replaced_base = are_there


def initialize_adapter(
    site: AdapterPlacement, state: ShardedState, read: TensorReader
) -> LoraAdapter:
    """Give an adapter what it begins with, once the base is filled; collective."""
    plan = site.plan
    tensors = plan.tensors({entry.name: entry.shape for entry in state.expected()}, read)
    state.fill(tensors.__getitem__, names=tensors.keys())
    if plan.settings.dora and plan.spec.path is None:
        for module, beside in site.beside.items():
            part = module.rpartition(".")[2]
            magnitude = beside.part(part).lora_magnitude_vector
            assert magnitude is not None
            state.write_local(magnitude, beside.lengths(part))
    return LoraAdapter(plan, state=state, switch=site.around.switch)
