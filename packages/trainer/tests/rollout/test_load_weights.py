"""A weight update is atomic, and every completion names its weight version."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from packages.trainer.tests.rollout.conftest import Pairs
from packages.trainer.tests.rollout.models_for_tests import (
    ARCHITECTURES,
    Pair,
    make_prompts,
    make_requests,
    make_tokenizer,
)
from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.rollout import RolloutConfig, SamplingConfig
from temper_trainer.rollout.hf_model import WeightTargets, build_model
from temper_trainer.rollout.hf_sampler import HfSampler

Change = Callable[[list[NamedWeight]], list[NamedWeight]]
GREEDY = SamplingConfig(temperature=0.0, max_tokens=8)


def stream(pair: Pair) -> Iterator[NamedWeight]:
    """Yield every tensor once; a tied head is left out."""
    for name, tensor in pair.model.state_dict().items():
        if name != "lm_head.weight" or not pair.model.config.tie_word_embeddings:
            yield NamedWeight(name, tensor.clone())


def from_scratch(name: str) -> HfSampler:
    """Build a sampler with random weights."""
    spec = ModelSpec(architecture=ARCHITECTURES[name], seed=3)
    return HfSampler(model=spec, tokenizer=make_tokenizer(), config=RolloutConfig(), device="cpu")


def test_weights_are_copied_from_the_file_to_aligned_memory(pairs: Pairs, tmp_path: Path) -> None:
    pair = pairs.get("qwen2")
    folder = shutil.copytree(pair.directory, tmp_path / "model")
    model = build_model(
        ModelSpec(path=str(folder)), dtype=torch.float32, device=torch.device("cpu")
    )
    # Someone writes another model into the same file.
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert all(
        torch.equal(tensor, pair.model.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )
    # Matrix libraries may sum in another order where memory begins elsewhere.
    assert {tensor.data_ptr() % 64 for tensor in model.state_dict().values()} == {0}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_loaded_weights_are_used_and_their_version_is_returned(name: str, pairs: Pairs) -> None:
    pair, sampler, prompts = pairs.get(name), from_scratch(name), make_prompts(3)
    assert sampler.weight_version == 0
    sampler.load_weights(stream(pair), version=7)
    completions = sampler.sample(make_requests(prompts, GREEDY))
    assert [c.tokens for c in completions] == [
        pair.greedy(prompt, max_tokens=8) for prompt in prompts
    ]
    assert {c.weight_version for c in completions} == {sampler.weight_version} == {7}


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda weights: weights[1:], "missing model.embed_tokens.weight"),
        (
            lambda weights: [*weights, NamedWeight("model.extra", torch.zeros(1))],
            "unexpected model.extra",
        ),
        (lambda weights: [*weights, weights[0]], "1 names came twice"),
        (
            lambda weights: [NamedWeight(weights[0].name, torch.zeros(2, 2)), *weights[1:]],
            r"shape \(2, 2\), expected \(41, 24\)",
        ),
    ],
)
def test_mismatching_weights_change_nothing(broken: Change, complaint: str, qwen2: Pair) -> None:
    sampler = from_scratch("qwen2")
    before = sampler.compute_logprobs([[3, 4, 5]], temperature=1.0)
    with pytest.raises(WeightError, match=complaint):
        sampler.load_weights(broken(list(stream(qwen2))), version=1)
    assert sampler.weight_version == 0
    assert sampler.compute_logprobs([[3, 4, 5]], temperature=1.0) == before


def test_nonfinite_logits_stop_sampling(qwen2: Pair) -> None:
    sampler = from_scratch("qwen2")
    sampler.load_weights(
        (NamedWeight(name, tensor * float("nan")) for name, tensor in stream(qwen2)), version=1
    )
    with pytest.raises(WeightError, match="logits are not finite"):
        sampler.sample(make_requests([[3, 4]], GREEDY))


def test_random_weights_depend_only_on_the_seed_of_the_spec() -> None:
    torch.manual_seed(1)
    first = from_scratch("qwen2").compute_logprobs([[3, 4, 5]], temperature=1.0)
    torch.manual_seed(2)
    assert from_scratch("qwen2").compute_logprobs([[3, 4, 5]], temperature=1.0) == first


def test_model_that_cannot_be_built_is_refused() -> None:
    for spec in (ModelSpec(path="absent"), ModelSpec(architecture={"model_type": "qwen99"})):
        with pytest.raises(
            ConfigError, match=r"cannot (load|build) a model from .*(absent|qwen99)"
        ):
            HfSampler(model=spec, tokenizer=make_tokenizer(), config=RolloutConfig())


@pytest.mark.parametrize("are_joined", [False, True])
def test_experts_can_be_loaded_separately_or_joined(are_joined: bool, tmp_path: Path) -> None:
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 8,
    }
    config = AutoConfig.for_model(
        **{**ARCHITECTURES["qwen2"], **experts, "tie_word_embeddings": False}
    )
    source, target = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    source.save_pretrained(tmp_path)
    weights = source.state_dict() if are_joined else load_file(tmp_path / "model.safetensors")
    assert any("experts.3.up_proj" in name for name in weights) is not are_joined
    WeightTargets(target).load(NamedWeight(name, tensor) for name, tensor in weights.items())
    assert all(
        target.state_dict()[name].equal(tensor) for name, tensor in source.state_dict().items()
    )
