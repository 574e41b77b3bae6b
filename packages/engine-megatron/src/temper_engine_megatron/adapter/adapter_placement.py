"""Where an adapter lies in a model: everything of the base frozen, updates beside the layers that are adapted, a head of its own.

In: a plan and the chunks of this rank, before they are wrapped. Out: what the chunks and the head need of it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import nn
from transformers import PretrainedConfig

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import ModelSpec
from temper_engine_megatron.adapter.adapter_plan import AdapterPlan
from temper_engine_megatron.adapter.expert_adapters import attach_to_experts
from temper_engine_megatron.adapter.linear_adapters import (
    AdapterSwitch,
    LayerContext,
    LinearAdapter,
    attach_to_linear,
    find_linear_layers,
)
from temper_engine_megatron.bridge_compat import BridgeTranslation
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.huggingface.huggingface_model import list_weight_modules
from temper_engine_megatron.huggingface.weight_names import (
    ATTENTION_LINEARS,
    DENSE_LINEARS,
    EXPERT_LINEARS,
    EXPERTS_PATH,
    TRAINED_BIAS,
    TRAINED_WEIGHT,
    hf_experts_module,
    hf_modules,
)
from temper_engine_megatron.runtime.process_groups import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """The output layer that is trained in the place of the base's."""

    weight: nn.Parameter
    """Of the shape of the base's."""
    bias: nn.Parameter | None
    """Of a scalar head."""
    switch: AdapterSwitch
    """Of the adapter."""


@dataclass(slots=True, kw_only=True)
class AdapterPlacement:
    """An adapter in the chunks of one rank."""

    plan: AdapterPlan
    """What is adapted."""
    translation: BridgeTranslation
    """Of names."""
    around: LayerContext
    """Where layers compute."""
    beside: dict[str, LinearAdapter] = field(default_factory=dict)
    """By the Hugging Face module that is adapted."""
    head: TrainedHead | None = None
    """On the last stage, where it is trained."""

    def enter(self, chunk: Any, *, settings: Any) -> None:
        """Freeze a chunk and put the adapter into it.

        Raises:
            ConfigError: nothing of the chunk would be trained.
        """
        chunk.requires_grad_(False)
        chunk.inputs_require_grad = True
        for layer in chunk.decoder.layers:
            self._enter_layer(layer, number=layer.layer_number - 1, settings=settings)
        if chunk.post_process and self.plan.trains_head:
            self.head = self._own_head(chunk.output_layer)
        if not any(parameter.requires_grad for parameter in chunk.parameters()):
            raise ConfigError(
                "lora.target_modules leaves a stage with nothing to train, and Megatron's optimizer wants a parameter on each: "
                "name modules of every stage's layers, or use fewer stages."
            )

    def _enter_layer(self, layer: nn.Module, *, number: int, settings: Any) -> None:
        names = {
            path: f"decoder.layers.{number}.{path}.weight" for path in _hosts(self.translation)
        }
        modules = {
            path: hf_modules(self.translation.find_mapping(name)) for path, name in names.items()
        }
        short = {
            path: tuple(name.rpartition(".")[2] for name in names)
            for path, names in modules.items()
        }
        for path, host in find_linear_layers(
            layer, settings=settings, tp_size=self.around.tp.size(), paths=short
        ).items():
            targets = self.plan.select_targets(modules[path])
            if targets:
                beside = attach_to_linear(
                    host, targets=targets, settings=self.plan.settings, around=self.around
                )
                self.beside |= {name: beside for name in modules[path] if name in self.plan.targets}
        if self.plan.experts:
            inside = self.plan.select_expert_targets(
                hf_experts_module(number, find_mapping=self.translation.find_mapping)
            )
            if inside:
                attach_to_experts(
                    layer.get_submodule(EXPERTS_PATH),
                    targets=inside,
                    settings=self.plan.settings,
                    around=self.around,
                )

    def _own_head(self, layer: nn.Module) -> TrainedHead:
        weight, bias = (
            layer.get_parameter("weight"),
            dict(layer.named_parameters(recurse=False)).get("bias"),
        )
        is_split = bool(vars(weight).get("tensor_model_parallel"))
        layer.register_parameter(TRAINED_WEIGHT, nn.Parameter(torch.empty_like(weight)))
        own = layer.get_parameter(TRAINED_WEIGHT)
        set_tensor_model_parallel_attributes(own, is_split, 0 if is_split else -1, 1)
        own_bias = None
        if bias is not None:
            layer.register_parameter(TRAINED_BIAS, nn.Parameter(torch.empty_like(bias)))
            own_bias = layer.get_parameter(TRAINED_BIAS)
        return TrainedHead(weight=own, bias=own_bias, switch=self.around.switch)

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """Of dropout, whose states belong into a checkpoint; none where there is no dropout."""
        if self.plan.settings.dropout == 0:
            return {}
        return {
            "adapter_shared": self.around.shared_generator,
            "adapter_own": self.around.rank_generator,
        }


def plan_placement(
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    translation: BridgeTranslation,
    membership: Membership,
) -> AdapterPlacement:
    """Decide what is adapted.

    Raises:
        ConfigError: no module matches, or one that can't be adapted.
        CapabilityError: the directory holds another kind of adapter.
    """
    if config.recompute != "none" and config.lora.dropout > 0:
        raise ConfigError(
            f"recompute is {config.recompute} and lora.dropout {config.lora.dropout}, whose masks the backward pass would draw anew: "
            "set recompute to none or lora.dropout to 0."
        )
    candidates = {
        module
        for number in range(translation.settings.num_layers)
        for path in _hosts(translation)
        for module in hf_modules(translation.find_mapping(f"decoder.layers.{number}.{path}.weight"))
    }
    found = list_weight_modules(config.model, hf_config)
    joined = tuple(
        f"{module}.{part}"
        for module in found
        if module.endswith(".experts")
        for part in EXPERT_LINEARS
    )
    head = "lm_head" if config.model.model_type == "language_model" else "score"
    plan = AdapterPlan(
        config.lora,
        model=config.model,
        modules=tuple(name for name in found if name in candidates),
        others=tuple(name for name in found if name not in candidates),
        joined=joined,
        head=head,
    )
    if plan.trains_head and head == "lm_head" and hf_config.tie_word_embeddings:
        raise ConfigError(
            "lora.modules_to_save names lm_head, which this model ties to its other embedding: take an untied model."
        )
    _refuse_shared_key_heads(plan, config=config, translation=translation)
    if plan.experts and config.expert_ranks_of_a_matrix not in (1, config.tensor_parallel):
        raise ConfigError(
            f"lora.target_parameters names tensors of experts and expert_tensor_parallel is {config.expert_ranks_of_a_matrix}, where "
            f"Megatron's gradient norm would miscount what ranks hold twice: set it to 1 or to tensor_parallel ({config.tensor_parallel})."
        )
    return AdapterPlacement(
        plan=plan,
        translation=translation,
        around=_surroundings(config, membership=membership, model=config.model),
    )


def _refuse_shared_key_heads(
    plan: AdapterPlan, *, config: MegatronConfig, translation: BridgeTranslation
) -> None:
    """Where ranks share a key head, a rank's rows of query, key and value have no equal sizes."""
    groups = translation.settings.num_query_groups or translation.settings.num_attention_heads
    inputs = {"q_proj", "k_proj", "v_proj"}.intersection(
        name.rpartition(".")[2] for name in plan.targets
    )
    if config.tensor_parallel > groups and inputs:
        raise ConfigError(
            f"lora.target_modules takes in {', '.join(sorted(inputs))}, and tensor_parallel is {config.tensor_parallel}, more than the "
            f"model's {groups} key heads: lower tensor_parallel to {groups}, or name these modules in lora.exclude_modules."
        )


def _hosts(translation: BridgeTranslation) -> tuple[str, ...]:
    return ATTENTION_LINEARS if translation.settings.num_moe_experts else DENSE_LINEARS


def _surroundings(
    config: MegatronConfig, *, membership: Membership, model: ModelSpec
) -> LayerContext:
    topology = membership.topology
    place = (
        topology.dp.rank * topology.cp.size + topology.cp.rank
    ) * topology.pp.size + topology.pp.rank
    shared, own = (
        (model.seed << 32) + (place << 12) + offset for offset in (0, 1 + topology.tp.rank)
    )
    return LayerContext(
        tp=membership.tp,
        expert_tp=membership.expert_tp,
        is_sequence_parallel=config.sequence_parallel,
        switch=AdapterSwitch(),
        shared_generator=torch.Generator(membership.device).manual_seed(shared),
        rank_generator=torch.Generator(membership.device).manual_seed(own),
    )
