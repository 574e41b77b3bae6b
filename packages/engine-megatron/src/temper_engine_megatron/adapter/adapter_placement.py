"""Place an adapter in one rank's model chunks: freeze the base and attach LoRA layers."""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import nn
from transformers import PretrainedConfig

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.file_names import FileNames
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
from temper_engine_megatron.bridge_compat.bridge_translation import (
    find_sparse_layers,
    has_expert_stacks,
)
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.huggingface.huggingface_model import has_tied_head, list_weight_modules
from temper_engine_megatron.huggingface.weight_names import (
    ATTENTION_LINEARS,
    EXPERT_LINEARS,
    EXPERTS_PATH,
    FULL_RANK_LATENT_LINEARS,
    LATENT_LINEARS,
    MIXER,
    MIXER_LINEARS,
    MLP_LINEARS,
    SHARED_EXPERT_LINEARS,
    TRAINED_BIAS,
    TRAINED_WEIGHT,
    hf_experts_module,
    hf_modules,
)
from temper_engine_megatron.runtime.process_groups import Membership


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """Output layer parameters trained in place of the base model's."""

    weight: nn.Parameter
    """Same shape as the base weight."""
    bias: nn.Parameter | None
    """Bias [1] of a scalar head; None for a language model."""
    switch: AdapterSwitch


@dataclass(slots=True, kw_only=True)
class AdapterPlacement:
    """An adapter in one rank's chunks."""

    plan: AdapterPlan
    translation: BridgeTranslation
    """Maps names between Megatron and Hugging Face."""
    file_names: FileNames
    """Maps tensors in memory to their names in files."""
    context: LayerContext
    linear_adapters: dict[str, LinearAdapter] = field(default_factory=dict)
    """Adapters by Hugging Face module; filled by `attach`."""
    head: TrainedHead | None = None
    """Set by `attach` on the last stage if the head is trained."""

    def attach(self, chunk: Any, *, transformer_config: Any) -> None:
        """Freeze a chunk and attach the adapter to its layers.

        Raises:
            ConfigError: If no parameter of the chunk would be trained.
        """
        # Freeze first: adapter parameters, attached below, stay trainable.
        chunk.requires_grad_(False)
        chunk.inputs_require_grad = True
        for layer in chunk.decoder.layers:
            # Megatron counts layers from 1.
            self._attach_to_layer(
                layer, number=layer.layer_number - 1, transformer_config=transformer_config
            )
        if chunk.post_process and self.plan.trains_head:
            self.head = self._add_trained_head(chunk.output_layer)
        if not any(parameter.requires_grad for parameter in chunk.parameters()):
            raise ConfigError(
                "lora.target_modules leaves a pipeline stage with nothing to train, and Megatron's "
                "optimizer needs a parameter on each stage: name modules of every stage's layers, "
                "or use fewer stages."
            )

    def _attach_to_layer(self, layer: nn.Module, *, number: int, transformer_config: Any) -> None:
        modules = {
            path: hf_modules(
                self.translation.find_mapping(f"decoder.layers.{number}.{path}.weight"),
                self.file_names,
            )
            for path in _adaptable_linears(self.translation, number)
        }
        last_parts = {
            path: tuple(name.rpartition(".")[2] for name in names)
            for path, names in modules.items()
        }
        for path, linear in find_linear_layers(
            layer,
            transformer_config=transformer_config,
            tp_size=self.context.tp.size(),
            paths=last_parts,
        ).items():
            targets = self.plan.select_targets(modules[path])
            if targets:
                adapter = attach_to_linear(
                    linear, targets=targets, settings=self.plan.settings, context=self.context
                )
                self.linear_adapters |= {
                    name: adapter for name in modules[path] if name in self.plan.targets
                }
        if self.plan.expert_targets and number in find_sparse_layers(transformer_config):
            expert_targets = self.plan.select_expert_targets(
                hf_experts_module(
                    number,
                    find_mapping=self.translation.find_mapping,
                    file_names=self.file_names,
                )
            )
            if expert_targets:
                attach_to_experts(
                    layer.get_submodule(EXPERTS_PATH),
                    targets=expert_targets,
                    settings=self.plan.settings,
                    context=self.context,
                )

    def _add_trained_head(self, layer: nn.Module) -> TrainedHead:
        weight = layer.get_parameter("weight")
        bias = dict(layer.named_parameters(recurse=False)).get("bias")
        is_split = bool(vars(weight).get("tensor_model_parallel"))
        layer.register_parameter(TRAINED_WEIGHT, nn.Parameter(torch.empty_like(weight)))
        trained_weight = layer.get_parameter(TRAINED_WEIGHT)
        # The copy is split like the base weight. The gradient norm reads these attributes.
        set_tensor_model_parallel_attributes(trained_weight, is_split, 0 if is_split else -1, 1)
        trained_bias = None
        if bias is not None:
            layer.register_parameter(TRAINED_BIAS, nn.Parameter(torch.empty_like(bias)))
            trained_bias = layer.get_parameter(TRAINED_BIAS)
        return TrainedHead(weight=trained_weight, bias=trained_bias, switch=self.context.switch)

    @property
    def generators(self) -> dict[str, torch.Generator]:
        """Dropout generators by name, whose states a checkpoint needs; empty without dropout."""
        if self.plan.settings.dropout == 0:
            return {}
        return {
            "adapter_shared": self.context.shared_generator,
            "adapter_own": self.context.rank_generator,
        }


def plan_placement(
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    translation: BridgeTranslation,
    file_names: FileNames,
    membership: Membership,
) -> AdapterPlacement:
    """Plan where to attach the adapter, before the model is built; raises as `plan_adapter`."""
    return AdapterPlacement(
        plan=plan_adapter(
            config, hf_config=hf_config, translation=translation, file_names=file_names
        ),
        translation=translation,
        file_names=file_names,
        context=_build_layer_context(config, membership=membership, model=config.model),
    )


def plan_adapter(
    config: MegatronConfig,
    *,
    hf_config: PretrainedConfig,
    translation: BridgeTranslation,
    file_names: FileNames,
) -> AdapterPlan:
    """Match the adapter's settings with the model.

    Raises:
        ConfigError: If no module matches, or if one matches that cannot have an adapter.
        CapabilityError: If the adapter directory has another kind of adapter, or experts are
            adapted that have no gates or one tensor for all.
    """
    if config.recompute != "none" and config.lora.dropout > 0:
        raise ConfigError(
            f"recompute is {config.recompute} and lora.dropout is {config.lora.dropout}, but "
            "recomputation in the backward pass would draw other dropout masks: set recompute to "
            "none or lora.dropout to 0."
        )
    candidates = {
        module
        for number in range(translation.transformer_config.num_layers)
        for path in _adaptable_linears(translation, number)
        for module in hf_modules(
            translation.find_mapping(f"decoder.layers.{number}.{path}.weight"), file_names
        )
    }
    modules = list_weight_modules(config.model, hf_config)
    has_gates = translation.transformer_config.gated_linear_unit
    expert_tensors = tuple(
        f"{module}.{tensor}"
        for module in modules
        if module.endswith(".experts")
        for tensor in (EXPERT_LINEARS if has_gates else ("up_proj", "down_proj"))
    )
    head = "lm_head" if config.model.model_type == "language_model" else "score"
    plan = AdapterPlan(
        config.lora,
        model=config.model,
        hf_config=hf_config,
        modules=tuple(name for name in modules if name in candidates),
        other_modules=tuple(name for name in modules if name not in candidates),
        expert_tensors=expert_tensors,
        head=head,
    )
    if plan.trains_head and head == "lm_head" and has_tied_head(hf_config):
        raise ConfigError(
            "lora.modules_to_save names lm_head, but this model ties it to the input embedding: "
            "choose an untied model."
        )
    if plan.expert_targets and not has_gates:
        raise CapabilityError(
            "lora.target_parameters names expert tensors, but the Megatron engine has no adapters "
            f"for experts without gates, such as those of {hf_config.model_type}: use the FSDP "
            "engine, or name linear layers in lora.target_modules."
        )
    if plan.expert_targets and has_expert_stacks(hf_config):
        raise CapabilityError(
            "lora.target_parameters names expert tensors, but the Megatron engine has no adapters "
            f"for those of {hf_config.model_type}, which are one tensor for all experts: use the "
            "FSDP engine, or name linear layers in lora.target_modules."
        )
    _check_key_heads(plan, config=config, translation=translation)
    if plan.expert_targets and config.expert_tensor_parallel_size not in (
        1,
        config.tensor_parallel,
    ):
        raise ConfigError(
            "lora.target_parameters names expert tensors and expert_tensor_parallel is "
            f"{config.expert_tensor_parallel_size}, for which Megatron's gradient norm would count "
            "replicated parameters wrongly: set it to 1 or to tensor_parallel "
            f"({config.tensor_parallel})."
        )
    return plan


def _check_key_heads(
    plan: AdapterPlan, *, config: MegatronConfig, translation: BridgeTranslation
) -> None:
    """Reject adapters of query, key and value if ranks share a key head.

    The rows of these modules would not split into equal shards.
    """
    transformer_config = translation.transformer_config
    num_key_heads = transformer_config.num_query_groups or transformer_config.num_attention_heads
    qkv_targets = {"q_proj", "k_proj", "v_proj"}.intersection(
        name.rpartition(".")[2] for name in plan.targets
    )
    if config.tensor_parallel > num_key_heads and qkv_targets:
        raise ConfigError(
            f"lora.target_modules matches {', '.join(sorted(qkv_targets))}, and tensor_parallel is "
            f"{config.tensor_parallel}, more than the model's {num_key_heads} key heads: lower "
            f"tensor_parallel to {num_key_heads}, or name these modules in lora.exclude_modules."
        )


def _adaptable_linears(translation: BridgeTranslation, number: int) -> tuple[str, ...]:
    """Return the linear layers of a decoder layer that can have adapters."""
    config = translation.transformer_config
    attention: tuple[str, ...] = ATTENTION_LINEARS
    if config.multi_latent_attention:
        attention = FULL_RANK_LATENT_LINEARS if config.q_lora_rank is None else LATENT_LINEARS
    if number in config.linear_layers:
        attention = tuple(MIXER + name for name in MIXER_LINEARS[translation.model_type])
    mlp: tuple[str, ...] = MLP_LINEARS
    if number in find_sparse_layers(config):
        mlp = SHARED_EXPERT_LINEARS if config.moe_shared_expert_intermediate_size else ()
    if config.has_paired_layers:
        return (*attention, *mlp)
    return mlp if number in config.tokenwise_layers else attention


def _build_layer_context(
    config: MegatronConfig, *, membership: Membership, model: ModelSpec
) -> LayerContext:
    topology = membership.topology
    # Ranks with different samples, tokens or layers draw different masks.
    replica_index = (
        topology.dp.rank * topology.cp.size + topology.cp.rank
    ) * topology.pp.size + topology.pp.rank
    # replica_index begins at bit 12 and the tensor-parallel rank at bit 0. No two seeds are equal
    # with up to 2^20 replicas and fewer than 2^12 tensor-parallel ranks.
    shared_seed, rank_seed = (
        (model.seed << 32) + (replica_index << 12) + offset for offset in (0, 1 + topology.tp.rank)
    )
    return LayerContext(
        tp=membership.tp,
        expert_tp=membership.expert_tp,
        is_sequence_parallel=config.sequence_parallel,
        switch=AdapterSwitch(),
        shared_generator=torch.Generator(membership.device).manual_seed(shared_seed),
        rank_generator=torch.Generator(membership.device).manual_seed(rank_seed),
    )
