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
from temper_engine_megatron.adapter import AdapterPlan
from temper_engine_megatron.adapter_experts import put_beside_experts
from temper_engine_megatron.adapter_layers import (
    BesideHost,
    Surroundings,
    Switch,
    hosts_of,
    put_beside,
)
from temper_engine_megatron.adapter_names import (
    ATTENTION_HOSTS,
    DENSE_HOSTS,
    EXPERT_HOSTS,
    EXPERTS,
    TRAINED_BIAS,
    TRAINED_WEIGHT,
    experts_module,
    modules_of,
)
from temper_engine_megatron.bridge_compat import Translation
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.groups import Membership
from temper_engine_megatron.huggingface import modules_with_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """The output layer that is trained in the place of the base's."""

    weight: nn.Parameter
    """Of the shape of the base's."""
    bias: nn.Parameter | None
    """Of a scalar head."""
    switch: Switch
    """Of the adapter."""


@dataclass(slots=True, kw_only=True)
class AdapterSite:
    """An adapter in the chunks of one rank."""

    plan: AdapterPlan
    """What is adapted."""
    translation: Translation
    """Of names."""
    around: Surroundings
    """Where layers compute."""
    beside: dict[str, BesideHost] = field(default_factory=dict)
    """By the Hugging Face module that is adapted."""
    head: TrainedHead | None = None
    """On the last stage, where it is trained."""

    def enter(self, chunk: Any, *, settings: Any) -> None:
        """Freeze a chunk and put the adapter into it.

        Raises:
            ConfigError: nothing of the chunk would be trained.
        """
        chunk.requires_grad_(False)
        chunk.starts_gradient = True
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
            path: modules_of(self.translation.recipe_of(name)) for path, name in names.items()
        }
        short = {
            path: tuple(name.rpartition(".")[2] for name in names)
            for path, names in modules.items()
        }
        for path, host in hosts_of(
            layer, settings=settings, tp_size=self.around.tp.size(), paths=short
        ).items():
            targets = self.plan.targets_of(modules[path])
            if targets:
                beside = put_beside(
                    host, targets=targets, settings=self.plan.settings, around=self.around
                )
                self.beside |= {name: beside for name in modules[path] if name in self.plan.targets}
        if self.plan.experts:
            inside = self.plan.experts_of(
                experts_module(number, recipe_of=self.translation.recipe_of)
            )
            if inside:
                put_beside_experts(
                    layer.get_submodule(EXPERTS),
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
        return {"adapter_shared": self.around.shared_draws, "adapter_own": self.around.own_draws}


def plan_adapter(
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    translation: Translation,
    membership: Membership,
) -> AdapterSite:
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
        for module in modules_of(translation.recipe_of(f"decoder.layers.{number}.{path}.weight"))
    }
    found = modules_with_weights(config.model, hf_config)
    joined = tuple(
        f"{module}.{part}"
        for module in found
        if module.endswith(".experts")
        for part in EXPERT_HOSTS
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
    return AdapterSite(
        plan=plan,
        translation=translation,
        around=_surroundings(config, membership=membership, model=config.model),
    )


def _refuse_shared_key_heads(
    plan: AdapterPlan, *, config: MegatronConfig, translation: Translation
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


def _hosts(translation: Translation) -> tuple[str, ...]:
    return ATTENTION_HOSTS if translation.settings.num_moe_experts else DENSE_HOSTS


def _surroundings(
    config: MegatronConfig, *, membership: Membership, model: ModelSpec
) -> Surroundings:
    topology = membership.topology
    place = (
        topology.dp.rank * topology.cp.size + topology.cp.rank
    ) * topology.pp.size + topology.pp.rank
    shared, own = (
        (model.seed << 32) + (place << 12) + offset for offset in (0, 1 + topology.tp.rank)
    )
    return Surroundings(
        tp=membership.tp,
        expert_tp=membership.expert_tp,
        is_sequence_parallel=config.sequence_parallel,
        switch=Switch(),
        shared_draws=torch.Generator(membership.device).manual_seed(shared),
        own_draws=torch.Generator(membership.device).manual_seed(own),
    )
