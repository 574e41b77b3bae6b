"""The hf sampler on families with experts, sinks, soft-capping, linear attention or Mamba."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from packages.trainer.tests.rollout.conftest import Pairs
from packages.trainer.tests.rollout.models_for_tests import (
    FAMILIES,
    SHAPE,
    make_prompts,
    make_requests,
    make_tokenizer,
)
from temper_engine_api.conformance.inputs.tiny_models import quantize_as_published
from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.rollout import RolloutConfig, SamplingConfig
from temper_trainer.rollout.hf_model import WeightTargets, build_model
from temper_trainer.rollout.hf_sampler import HfSampler

SAMPLED = SamplingConfig(temperature=0.8, max_tokens=12)


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_logprobs_equal_those_of_full_forward_passes(family: str, pairs: Pairs) -> None:
    pair, prompts = pairs.get(family), make_prompts(5, seed=1)
    completions = pair.sampler(max_concurrent=3).sample(make_requests(prompts, SAMPLED))
    for prompt, completion in zip(prompts, completions, strict=True):
        for i, token in enumerate(completion.tokens):
            logits = pair.next_logits([*prompt, *completion.tokens[:i]]) / SAMPLED.temperature
            expected = float(logits.log_softmax(-1)[token])
            assert completion.rollout_logprobs[i] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "family",
    ["gpt_oss", "deepseek_v3", "mixtral", "qwen3_next", "nemotron_h", "granitemoehybrid"],
)
def test_recorded_experts_are_those_of_a_full_forward_pass(family: str, pairs: Pairs) -> None:
    pair, prompts = pairs.get(family), [*make_prompts(4, seed=1), (7,)]
    sampler = pair.sampler(max_concurrent=3, routing_replay="sampler")
    # Two completions of each prompt, which is prefilled once for both; one prompt has one token.
    twice = [prompt for prompt in prompts for _ in range(2)]
    completions = sampler.sample(make_requests(twice, SAMPLED))
    chosen: list[torch.Tensor] = []
    routers = [m for m in pair.model.modules() if type(m).__name__.endswith("Router")]
    hooks = [
        router.register_forward_hook(
            lambda _, __, output: chosen.extend(x for x in output if x.dtype == torch.int64)
        )
        for router in routers
    ]
    for prompt, completion in zip(twice, completions, strict=True):
        chosen.clear()
        pair.next_logits([*prompt, *completion.tokens[:-1]])
        assert completion.routed_experts is not None
        # Without order, which has no meaning.
        expected = torch.stack(chosen, dim=1).sort().values
        assert completion.routed_experts.long().sort().values.equal(expected)
    for hook in hooks:
        hook.remove()


def test_replay_of_a_model_without_experts_is_refused(pairs: Pairs) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.routing_replay is sampler, but .* has no routers of experts"
    ):
        pairs.get("gemma2").sampler(routing_replay="sampler")


def test_published_fp8_weights_are_dequantized_on_every_device(
    pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On GPUs with FP8 this check of transformers passes, and it would build FP8 layers.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    published, plain = tmp_path / "published", tmp_path / "plain"
    for folder in (published, plain):
        shutil.copytree(pairs.get("deepseek_v3").directory, folder)
    weights = quantize_as_published(published)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    actual, expected = (
        build_model(
            ModelSpec(path=str(folder)), dtype=torch.float32, device=torch.device("cpu")
        ).state_dict()
        for folder in (published, plain)
    )
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_files_are_loaded_bit_for_bit(family: str, pairs: Pairs) -> None:
    pair = pairs.get(family)
    spec = ModelSpec(architecture=pair.model.config.to_diff_dict(), seed=3)
    model = build_model(spec, dtype=torch.float32, device=torch.device("cpu"))
    weights = load_file(pair.directory / "model.safetensors")
    WeightTargets(model).load(NamedWeight(name, tensor) for name, tensor in weights.items())
    expected = pair.model.state_dict()
    assert all(tensor.equal(expected[name]) for name, tensor in model.state_dict().items())


def test_lists_of_an_architecture_reach_the_config() -> None:
    kinds = ("sliding_attention", "full_attention")
    fields = {**SHAPE, "model_type": "gemma3_text", "head_dim": 8, "layer_types": kinds}
    spec = ModelSpec(architecture=fields)
    model = build_model(spec, dtype=torch.float32, device=torch.device("cpu"))
    assert model.config.layer_types == list(kinds)


def test_model_with_chunked_attention_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama4_text", **SHAPE, num_local_experts=2, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Llama4ForCausalLM, which has layers with chunked"):
        HfSampler(
            model=ModelSpec(path=str(tmp_path)), tokenizer=make_tokenizer(), config=RolloutConfig()
        )
