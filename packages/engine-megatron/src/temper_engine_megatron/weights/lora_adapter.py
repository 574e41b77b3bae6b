"""The LoRA adapter of an engine: initialize, disable, merge, export and load.

Its parameters are part of Megatron's model. In exports, checkpoints and loaded files, its tensors
are named as in PEFT's `adapter_model.safetensors`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from temper_engine_api import adapter_checks
from temper_engine_api.adapter_checks import PEFT_PREFIX
from temper_engine_api.file_names import FileNames
from temper_engine_api.weights import NamedWeight
from temper_engine_megatron.adapter.adapter_placement import AdapterPlacement
from temper_engine_megatron.adapter.adapter_plan import AdapterPlan
from temper_engine_megatron.adapter.linear_adapters import AdapterSwitch
from temper_engine_megatron.huggingface.huggingface_model import TensorReader
from temper_engine_megatron.huggingface.weight_names import ExpertSlice, find_expert_slice
from temper_engine_megatron.weights.sharded_state import MergeAdapter, ShardedState


class LoraAdapter:
    """One model's adapter; its parameters are part of the model."""

    def __init__(
        self,
        plan: AdapterPlan,
        *,
        state: ShardedState,
        switch: AdapterSwitch,
        file_names: FileNames,
    ) -> None:
        self._plan, self._switch, self._file_names = plan, switch, file_names
        self.state = state
        """Parameters and optimizer states of the adapter, by PEFT name."""
        self.has_replaced_base = False
        """True if the base weights were replaced, so that checkpoints must contain them."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapter inside the context; may be nested."""
        previous, self._switch.is_off = self._switch.is_off, True
        try:
            yield
        finally:
            self._switch.is_off = previous

    def make_merge(self) -> MergeAdapter:
        """Return a function that merges the adapter into one export's weights.

        A and B for all experts in a layer are gathered once and kept until the next layer: an
        export yields the experts of a layer one after another.
        """
        cached_pairs: dict[str, tuple[Tensor, Tensor]] = {}
        return lambda name, weight: self._merge_weight(name, weight, cached_pairs)

    def _merge_weight(
        self, name: str, weight: Tensor, cached_pairs: dict[str, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Merge in float32; return the same tensor if no adapter changes it. Collective."""
        if self._switch.is_off:
            return weight
        # Targets are modules in memory, and files of some models have other names.
        owner = self._file_names.find_owner(name)
        module, _, kind = (name if owner is None else owner[0]).rpartition(".")
        if self._plan.trains_head and module == self._plan.head:
            return self.state.gather_master(PEFT_PREFIX + name)
        expert_slice = find_expert_slice(name, self._file_names)
        if expert_slice is not None and expert_slice.joined in self._plan.expert_targets:
            return self._merge_expert(expert_slice, weight, cached_pairs)
        if module not in self._plan.targets or kind != "weight":
            return weight
        a, b = (
            self.state.gather_master(f"{PEFT_PREFIX}{module}.{part}.weight")
            for part in ("lora_A", "lora_B")
        )
        merged = torch.addmm(weight.float(), b, a, alpha=self._plan.settings.scale)
        if self._plan.settings.dora:
            # DoRA rescales each row to a trained norm; arXiv:2402.09353, equation 5.
            magnitude = self.state.gather_master(f"{PEFT_PREFIX}{module}.lora_magnitude_vector")
            merged *= (magnitude / torch.linalg.vector_norm(merged, dim=1))[:, None]
        return merged

    def _merge_expert(
        self,
        expert_slice: ExpertSlice,
        weight: Tensor,
        cached_pairs: dict[str, tuple[Tensor, Tensor]],
    ) -> Tensor:
        joined = expert_slice.joined
        if joined not in cached_pairs:
            # Keep the pairs of this layer only.
            layer = joined.rpartition(".")[0]
            for other in [name for name in cached_pairs if name.rpartition(".")[0] != layer]:
                del cached_pairs[other]
            prefix = self._plan.peft_prefix(joined)
            cached_pairs[joined] = (
                self.state.gather_master(f"{prefix}.lora_A.weight"),
                self.state.gather_master(f"{prefix}.lora_B.weight"),
            )
        a, b = cached_pairs[joined]
        rank, expert = self._plan.settings.rank, expert_slice.expert
        # PEFT stacks A by expert and interleaves B.
        expert_a = a[expert * rank : (expert + 1) * rank]
        expert_b = b[:, expert :: a.shape[0] // rank]
        rows = expert_b.chunk(expert_slice.num_matrices)[expert_slice.index]
        return torch.addmm(weight.float(), rows, expert_a, alpha=self._plan.settings.scale)

    def export(self) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return the contents of PEFT's two files: config and full float32 tensors. Collective."""
        return self._plan.peft_config(), dict(self.state.iterate_masters())

    def load(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        """Replace the parameters of the adapter with full tensors.

        Raises:
            ConfigError: If `config` and the config of this engine's adapter differ in a field that
                changes what the tensors compute.
            WeightError: If a name is missing or unexpected, or a shape differs; nothing is loaded
                then.
        """
        adapter_checks.check_same_adapter(config, own_config=self._plan.peft_config())
        self.state.load_weights(NamedWeight(name, tensor) for name, tensor in tensors.items())

    def check_base_weights(self, has_weights: bool, *, directory: str) -> None:
        """Check before a load that base weights match the adapter; record if they were replaced.

        Args:
            has_weights: True if the checkpoint contains base weights.
            directory: Directory of the checkpoint.

        Raises:
            CheckpointError: If the checkpoint contains no base weights, but this engine's were
                replaced.
        """
        adapter_checks.check_base_weights(
            has_replaced_base=self.has_replaced_base, has_weights=has_weights, directory=directory
        )
        self.has_replaced_base = has_weights


def initialize_adapter(
    placement: AdapterPlacement, state: ShardedState, read: TensorReader
) -> LoraAdapter:
    """Set the initial tensors of an adapter, after the base weights are set. Collective.

    Args:
        placement: The adapter in this rank's chunks.
        state: Its parameters.
        read: Reads a full base weight.
    """
    plan = placement.plan
    tensors = plan.initial_tensors(
        {entry.name: entry.shape for entry in state.list_weight_entries()}, read
    )
    state.fill(tensors.__getitem__, names=tensors.keys())
    if plan.settings.dora and plan.spec.path is None:
        # A new DoRA starts with the row norms of the base weights.
        for module, linear_adapter in placement.linear_adapters.items():
            target = module.rpartition(".")[2]
            magnitude = linear_adapter.get_pair(target).lora_magnitude_vector
            assert magnitude is not None
            state.write_shard(magnitude, linear_adapter.row_norms(target))
    return LoraAdapter(
        plan,
        state=state,
        switch=placement.context.switch,
        file_names=placement.file_names,
    )
