"""Test overrides of Megatron's own configs: which are accepted, and how others are refused."""

from dataclasses import fields, replace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from temper_engine_api.errors import ConfigError
from temper_engine_megatron.bridge_compat import VERSION_PAIRS, find_installed_pair
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.model import config_overrides
from temper_engine_megatron.model.config_overrides import check_overrides

SINCE_0_19 = {
    *(
        "use_mup",
        "mup_base_hidden_size",
        "mup_width_mult",
        "mup_embedding_mult",
        "mup_output_mult",
        "mup_base_head_dim",
    ),
    *(
        "mup_attn_scale_power",
        "num_buckets",
        "moe_grad_scale_func",
        "mtp_grad_scale_func",
        "grad_norm_skip_threshold",
    ),
    *(
        "optimizer_cuda_graph",
        "tensor_parallel_num_weight_shards",
        "gtp_weight_remat_size",
        "use_layer_wise_distributed_optimizer",
    ),
    *("expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size"),
}

PREFIXES_SINCE_0_19 = {"megatron_fsdp_", "lion_", "soap_", "adaptive_muon_"}


@pytest.mark.parametrize(
    ("key", "name", "match"),
    [
        (
            "override_transformer_config",
            "bias_activation_fussion",
            "does not have: did you mean bias_activation_fusion",
        ),
        (
            "override_transformer_config",
            "tensor_model_parallel_size",
            "tensor_parallel of this config decides",
        ),
        ("override_transformer_config", "num_layers", "the model's own config decides"),
        (
            "override_transformer_config",
            "calculate_per_token_loss",
            "which the engine sets and depends on",
        ),
        (
            "override_transformer_config",
            "deallocate_pipeline_outputs",
            "which the engine sets and depends on",
        ),
        (
            "override_transformer_config",
            "hybrid_context_parallel",
            "context_parallel is the same for all micro-batches",
        ),
        (
            "override_ddp_config",
            "overlap_grad_reduce",
            "which the engine sets and depends on",
        ),
        ("override_optimizer_config", "lr", "optimizer.lr of this config decides"),
        (
            "override_transformer_config",
            "moe_z_loss_coeff",
            "router_z_loss of this config decides",
        ),
        ("override_transformer_config", "window_size", "the model's own config decides"),
        (
            "override_transformer_config",
            "layernorm_zero_centered_gamma",
            "the model's own config decides",
        ),
        (
            "override_transformer_config",
            "num_layers_in_first_pipeline_stage",
            "layers_per_stage of this config decides",
        ),
        (
            "override_transformer_config",
            "fp8",
            "which only layers of TransformerEngine read: remove it. .* with float8",
        ),
        ("override_transformer_config", "transformer_impl", "only layers of TransformerEngine"),
        (
            "override_transformer_config",
            "attention_softmax_in_fp32",
            "this engine never reads, so it would have no effect: remove it",
        ),
        ("override_transformer_config", "moe_grouped_gemm", "this engine never reads"),
        ("override_ddp_config", "fsdp_double_buffer", "this engine never reads"),
        ("override_optimizer_config", "decoupled_lr", "this engine never reads"),
        ("override_optimizer_config", "muon_momentum", "this engine never reads"),
        (
            "override_optimizer_config",
            "loss_scale_window",
            "precision.loss_scale_growth_interval of this config decides",
        ),
        (
            "override_optimizer_config",
            "nonesuch",
            "which OptimizerConfig of megatron-core [0-9.]+ does not have",
        ),
    ],
)
def test_field_that_cannot_be_overridden_is_refused_with_what_to_do(config, key, name, match):
    with pytest.raises(ConfigError, match=match) as caught:
        check_overrides(replace(config, **{key: {name: 1}}))
    assert key in str(caught.value)


def test_every_refused_field_exists_in_megatron():
    # A renamed field would be refused for the wrong reason, or accepted under its new name.
    known = {
        field.name
        for config in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
        for field in fields(config)
    }
    named = (
        config_overrides._SET_BY_MODEL,
        config_overrides._SET_BY_FIELD.keys(),
        config_overrides._SET_BY_ENGINE,
        config_overrides._CHOSEN_PER_BATCH,
        config_overrides._ONLY_TRANSFORMER_ENGINE,
        config_overrides._UNUSED,
    )
    refused = set().union(*named)
    assert sum(map(len, named)) == len(refused), "a name is refused for two reasons"
    assert refused - known == (set() if find_installed_pair() is VERSION_PAIRS[-1] else SINCE_0_19)


def test_every_refused_prefix_occurs_in_megatron():
    known = {
        field.name
        for config in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
        for field in fields(config)
    }
    unknown = {
        prefix
        for prefix in (
            *config_overrides._UNUSED_PREFIXES,
            *config_overrides._TRANSFORMER_ENGINE_PREFIXES,
        )
        if not any(name.startswith(prefix) for name in known)
    }
    assert unknown == (set() if find_installed_pair() is VERSION_PAIRS[-1] else PREFIXES_SINCE_0_19)


def test_recompute_and_its_overrides_exclude_each_other(config):
    twice = replace(
        config, recompute="layers", override_transformer_config={"recompute_num_layers": 2}
    )
    with pytest.raises(
        ConfigError,
        match="recompute is layers, which also sets recompute_num_layers",
    ):
        check_overrides(twice)


def test_boolean_field_must_be_true_or_false(config):
    with pytest.raises(
        ConfigError,
        match="sets bias_activation_fusion to 'maybe', but it must be true or false",
    ):
        check_overrides(
            replace(config, override_transformer_config={"bias_activation_fusion": "maybe"})
        )


def test_value_that_megatron_rejects_is_reported_with_its_reason(config):
    wrong = replace(config, override_transformer_config={"recompute_granularity": "some"})
    with pytest.raises(
        ConfigError,
        match=r"megatron-core rejects override_transformer_config .*recompute_granul.* must be",
    ):
        MegatronEngine(wrong).init_model()
    assert not torch.distributed.is_initialized()


def test_overrides_reach_megatron(start):
    engine = start(
        override_transformer_config={
            "bias_activation_fusion": True,
            "recompute_granularity": "selective",
            "recompute_modules": ("mlp",),
        },
        override_ddp_config={"pad_buckets_for_high_nccl_busbw": True},
        override_optimizer_config={"log_num_zeros_in_grad": True},
    )
    chunks = engine._components.runner._chunks
    assert chunks.transformer_config.bias_activation_fusion
    assert chunks.transformer_config.recompute_modules == ["mlp"]
    assert chunks.wrapped[0].ddp_config.pad_buckets_for_high_nccl_busbw
    assert engine._components.optimizer._chain.config.log_num_zeros_in_grad


@pytest.mark.parametrize(
    "changes",
    [{"remove_padding": False}, {"recompute": "layers"}, {"recompute": "attention"}],
    ids=lambda changes: next(iter(changes)),
)
def test_padding_and_recomputation_do_not_change_gradient_norms(start, batch, changes):
    expected, actual = (run_three_updates(start(**fields), batch) for fields in ({}, changes))
    assert actual == pytest.approx(expected, rel=1e-5)


def run_three_updates(engine, batch):
    """Return the gradient norms of three updates of two micro-batches each."""
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    norms = []
    for _ in range(3):
        engine.optimizer_zero_grad()
        for part in (batch.select(range(2)), batch.select(range(2, 4))):
            with engine.train_mode():
                engine.forward_backward_step(part)
        norms.append(engine.optimizer_step())
    return norms
