"""Test refusals, several engines in a process, and models from scratch or with new heads."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import READ_GRADIENTS
from temper_engine_api.conformance.harness.tolerances import GRADIENT, assert_all_close
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.conformance.oracle.oracle_engine import OracleEngine
from temper_engine_api.conformance.oracle.oracle_routers import OracleConfig
from temper_engine_api.errors import CapabilityError, ConfigError, WeightError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import ModelSpec, OffloadSpec, PrecisionSpec
from temper_engine_megatron.components import check_model
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.huggingface.model_comparison import (
    TESTED_ROPE_TYPES,
    accept_untested_models,
)


def mean_loss(data, predictions, ctx):
    return -predictions["logprob"][data.loss_mask].mean(), ctx


def test_training_reduces_the_loss_of_a_new_model(start, batch):
    engine = start()
    engine.set_loss_fn(mean_loss)
    losses = []
    for _ in range(12):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(batch)
        engine.optimizer_step()
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


def test_same_seed_gives_the_same_weights_and_preserves_the_rng_state(start):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second = (dict(export(start())) for _ in range(2))
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.embed_tokens.weight"].shape == (61, 32)


def export(engine):
    with engine.export_weights() as stream:
        return list(stream)


def test_cpu_is_refused_if_cuda_is_available(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="empty CUDA_VISIBLE_DEVICES"):
        MegatronEngine(config).init_model()


def test_sizes_that_do_not_divide_the_ranks_are_refused(config):
    engine = MegatronEngine(replace(config, tensor_parallel=2))
    with pytest.raises(ConfigError, match="must divide the 1 ranks"):
        engine.init_model()
    assert not torch.distributed.is_initialized()


def test_unsupported_architecture_is_refused_without_process_groups(config):
    other = ModelSpec(
        architecture={
            "model_type": "gpt2",
            "vocab_size": 61,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 2,
        }
    )
    with pytest.raises(CapabilityError, match="GPT2"):
        MegatronEngine(replace(config, model=other)).init_model()
    assert not torch.distributed.is_initialized()


MISTRAL = {"model_type": "mistral", "head_dim": 8, "tie_word_embeddings": False}


def check_gradients(config, start, batch, *, model):
    """Compare the gradients of one update with the oracle's, and return these."""
    oracle = OracleEngine(
        OracleConfig(
            model=model, optimizer=READ_GRADIENTS, precision=config.precision, device="cpu"
        )
    )
    oracle.init_model()
    gradients = []
    for engine in (oracle, start(model=model, optimizer=READ_GRADIENTS)):
        engine.set_loss_fn(SftProbe())
        gradients.append(
            run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)]).gradients
        )
    assert_all_close(gradients[1], gradients[0], GRADIENT, quantity="gradient")
    return gradients[0]


@pytest.mark.parametrize(
    "fields",
    [
        {**MISTRAL, "sliding_window": None},
        {**MISTRAL, "sliding_window": 4},
        # The second layer has a window.
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        # transformers' Llama has no windows, and passes over the key.
        {"model_type": "llama", "sliding_window": 4},
    ],
    ids=["without", "mistral", "qwen2", "llama"],
)
def test_model_with_a_window_has_the_gradients_of_transformers(config, start, batch, fields):
    model = ModelSpec(
        architecture={**config.model.architecture, **fields, "initializer_range": 0.3}
    )
    # Mistral's are compared in another process at the first start, and here.
    with accept_untested_models():
        check_gradients(config, start, batch, model=model)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8, "tie_word_embeddings": False}
LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    # Queries are not compressed.
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    **EXPERTS,
}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXTENDED = {
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "rope_parameters": YARN,
        **EXPERTS,
    },
    "deepseek_v3": {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    # Half of the dimensions of a head rotate, and only these have the factor.
    "glm4_moe": {
        **LATENT,
        "model_type": "glm4_moe",
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 4,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
        },
    },
    # These two have no head_dim, as published.
    "qwen2": {"rope_parameters": YARN},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "rope_parameters": YARN,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "rope_parameters": YARN},
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3},
}


@pytest.mark.parametrize("model_type", TESTED_ROPE_TYPES)
def test_extended_context_has_the_gradients_of_transformers(config, start, batch, model_type):
    fields = EXTENDED[model_type]
    rope = fields["rope_parameters"]
    assert rope.get("full_attention", rope)["rope_type"] == TESTED_ROPE_TYPES[model_type]
    model = ModelSpec(
        architecture={**config.model.architecture, **fields, "initializer_range": 0.3}
    )
    check_gradients(config, start, batch, model=model)


def test_glm_with_an_extended_context_needs_no_head_dim(config):
    fields = {name: value for name, value in EXTENDED["glm4_moe"].items() if name != "head_dim"}
    model = ModelSpec(architecture={**config.model.architecture, **fields})
    MegatronEngine.check_model(replace(config, model=model))


def test_latent_attention_is_scaled_for_an_extended_context_only(config, start, batch):
    rope = {**YARN, "rope_type": "default", "mscale_all_dim": 0.5}
    fields = {**LATENT, "rope_parameters": rope, "initializer_range": 0.3}
    model = ModelSpec(architecture={**config.model.architecture, **fields})
    check_gradients(config, start, batch, model=model)


def test_mistral_with_an_extended_context_has_the_gradients_of_transformers(config, start, batch):
    model = ModelSpec(
        architecture={**config.model.architecture, **MISTRAL, "rope_parameters": YARN}
        | {"initializer_range": 0.3}
    )
    with accept_untested_models():
        check_gradients(config, start, batch, model=model)


def test_yarn_of_mixtral_is_refused_without_the_head_dim_that_transformers_reads(config):
    fields = {"model_type": "mixtral", "rope_parameters": YARN}
    model = ModelSpec(architecture={**config.model.architecture, **fields})
    with pytest.raises(ConfigError, match=r"model\.architecture: .* yarn .* set head_dim to 8\."):
        MegatronEngine.check_model(replace(config, model=model))


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mixtral", "num_local_experts": 4, "norm_topk_prob": False},
        {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "n_group": 2,
            "topk_group": 1,
        },
    ],
    ids=["mixtral", "qwen3_moe"],
)
def test_keys_that_the_config_class_does_not_have_are_passed_over(config, start, batch, fields):
    # As in transformers. The other keys are fields of DeepSeek-V3.
    model = ModelSpec(
        architecture={**config.model.architecture, **EXPERTS, **fields, "initializer_range": 0.3}
    )
    check_gradients(config, start, batch, model=model)


def test_sigmoid_router_that_chooses_one_expert_is_refused(config):
    fields = {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        **EXPERTS,
        "num_experts_per_tok": 1,
    }
    other = ModelSpec(architecture={**config.model.architecture, **fields})
    with pytest.raises(CapabilityError, match="num_experts_per_tok is 1"):
        MegatronEngine(replace(config, model=other)).init_model()


def test_new_weights_that_the_engine_lacks_are_refused(config):
    fields = {"model_type": "qwen3", "head_dim": 8, "attention_bias": True}
    other = ModelSpec(architecture={**config.model.architecture, **fields})
    # Without the comparison of a tiny model, which refuses it too.
    with (
        accept_untested_models(),
        pytest.raises(CapabilityError, match=r"layers\.0\.self_attn\.\w_proj\.bias"),
    ):
        MegatronEngine(replace(config, model=other)).init_model()


def test_head_that_the_bridge_does_not_know_is_refused_before_the_start(config):
    fields = {"model_type": "gemma3_text", "tie_word_embeddings": False, "head_dim": 8}
    other = replace(config, model=ModelSpec(architecture={**config.model.architecture, **fields}))
    with pytest.raises(CapabilityError, match="gemma3_text only with a head that is tied"):
        check_model(other)
    with pytest.raises(CapabilityError, match="gemma3_text only with a head that is tied"):
        MegatronEngine(other).init_model()


def test_dropout_is_refused(config):
    other = ModelSpec(architecture={**config.model.architecture, "attention_dropout": 0.1})
    with pytest.raises(CapabilityError, match="dropout"):
        MegatronEngine(replace(config, model=other)).init_model()


def test_critic_from_a_language_model_has_a_new_head(config, start, batch, tmp_path):
    network = write_language_model(tmp_path / "model", config)
    first, second = (
        start(model=ModelSpec(path=str(network), model_type="value_model", seed=seed))
        for seed in (0, 1)
    )
    exported = [dict(export(engine)) for engine in (first, second)]
    assert exported[0].keys() >= {"score.weight", "score.bias"}
    assert not torch.equal(exported[0]["score.weight"], exported[1]["score.weight"])
    with first.eval_mode():
        local_batch = first.shard_data(batch, max_tokens=64)
        values = first.forward_backward_batch(
            local_batch, forward_only=True, outputs=[HeadOutput.VALUE]
        ).outputs
    assert values is not None
    assert (
        int((values.columns[HeadOutput.VALUE] != 0).sum()) == batch.num_tokens - batch.num_sequences
    )


def write_language_model(folder, config):
    fields = dict(config.model.architecture)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields)
    )
    network.save_pretrained(folder)
    return folder


def test_weights_of_another_model_are_refused(config, tmp_path):
    write_language_model(tmp_path / "model", config)
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(
        json.dumps({**fields, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    with pytest.raises(WeightError, match=r"model\.layers\.2"):
        MegatronEngine(replace(config, model=ModelSpec(path=str(tmp_path / "model")))).init_model()


def test_language_model_cannot_compute_values(start, batch):
    engine = start()
    with (
        engine.eval_mode(),
        pytest.raises(CapabilityError, match="a language_model cannot compute value"),
    ):
        engine.forward_backward_batch(
            engine.shard_data(batch, max_tokens=64), forward_only=True, outputs=[HeadOutput.VALUE]
        )


def test_bf16_keeps_master_weights_in_float32(start, batch):
    engine = start(precision=PrecisionSpec(compute="bf16"))
    assert all(tensor.dtype is torch.bfloat16 for _, tensor in export(engine))
    masters = {entry.name: entry.master for entry in engine.export_state()}
    exact = {entry.name: entry.master for entry in start().export_state()}
    # Equal to the float32 weights: not rounded to bf16 while loading.
    assert all(torch.equal(masters[name], exact[name]) for name in exact)


def bytes_on_device(engine):
    """Return the bytes of all storages that the engine can offload."""
    tensors = (
        *engine._components.iterate_model_tensors(),
        *engine._components.iterate_optimizer_tensors(),
    )
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_offloaded_tensors_leave_the_device_between_modes(start, batch):
    everything = OffloadSpec(parameters=True, optimizer=True)
    engine = start(offload=everything, precision=PrecisionSpec(compute="bf16"))
    engine.set_loss_fn(mean_loss)
    for _ in range(2):
        assert bytes_on_device(engine) == 0
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_step(batch)
            assert bytes_on_device(engine) > 0
        engine.optimizer_step()
    assert bytes_on_device(engine) == 0


def test_optimizer_on_cpu_is_refused(config):
    with pytest.raises(CapabilityError, match=r"use offload\.optimizer"):
        MegatronEngine(replace(config, offload=OffloadSpec(optimizer_on_cpu=True))).init_model()
    assert not torch.distributed.is_initialized()


def test_config_imports_neither_torch_nor_megatron():
    modules = "temper_engine_megatron.config, temper_engine_megatron.layouts"
    program = f"import sys, {modules}; sys.exit(bool({{'torch', 'megatron'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_first_engine_of_a_process_does_not_warn_or_configure_logging(config):
    program = (
        "import logging, warnings; from temper_engine_megatron.engine import MegatronEngine; "
        "from temper_engine_megatron.config import MegatronConfig; "
        "from temper_engine_api.specs import ModelSpec; "
        f"model = ModelSpec(architecture={dict(config.model.architecture)!r}); "
        "engine = MegatronEngine(MegatronConfig(model=model, device='cpu')); "
        "engine.init_model(); engine.close(); warnings.warn('shown'); "
        "print(logging.root.handlers, logging.root.level)"
    )
    completed = subprocess.run(
        [sys.executable, "-W", "default::UserWarning", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout == "[] 30\n"
    assert [line for line in completed.stderr.splitlines() if "UserWarning" in line] == [
        "<string>:1: UserWarning: shown"
    ]


@pytest.mark.parametrize("is_tied", [True, False])
def test_padding_token_has_the_embedding_gradient_of_transformers(config, start, batch, is_tied):
    # A policy may sample the padding token. Its input embedding gets no gradient, because
    # transformers builds the embedding with padding_idx.
    padding = int(batch.tokens[2])
    model = ModelSpec(
        architecture={
            **config.model.architecture,
            "pad_token_id": padding,
            "tie_word_embeddings": is_tied,
        }
    )
    expected = check_gradients(config, start, batch, model=model)
    assert bool(expected["model.embed_tokens.weight"][padding].any()) is is_tied
