"""Test models whose weights are loaded module by module while they are sharded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.tiny_models import quantize_as_published, write_model
from temper_engine_api.errors import CapabilityError, WeightError
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_fsdp import components
from temper_engine_fsdp.checkpoint import huggingface_files
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model.streaming_load import WeightStreamer


@pytest.fixture(params=[1 << 30, 4096], ids=["one file", "many files"])
def folder(
    start: Callable[..., FSDPEngine], tmp_path: Path, request: pytest.FixtureRequest
) -> Path:
    """Return a model directory with tied embeddings."""
    engine = start(save_huggingface_weights=True, huggingface_shard_bytes=request.param)
    return Path(
        engine.save_checkpoint(str(tmp_path), global_step=0), "engine", huggingface_files.FOLDER
    )


def weights_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    with engine.export_weights() as stream:
        return dict(stream)


def test_no_more_than_one_module_is_full_at_a_time(
    start: Callable[..., FSDPEngine], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, filled, models = WeightStreamer.materialize, [], []

    def watched(self: WeightStreamer, module: nn.Module) -> None:
        models.append(module)
        fill(self, module)
        full = {
            name
            for name, p in module.named_parameters()
            if not p.is_meta and not isinstance(p.data, DTensor)
        }
        filled.append(full)

    monkeypatch.setattr(WeightStreamer, "materialize", watched)
    engine = start(model=ModelSpec(path=str(folder)))
    root = models[-1]
    # Two layers, then what is left: the embedding, which is also the head, and the last norm.
    assert len(filled) == 3
    assert filled[2] == {"hf.model.embed_tokens.weight", "hf.model.norm.weight"}
    assert all(isinstance(parameter.data, DTensor) for parameter in root.parameters())
    assert weights_of(engine).keys() == {
        n for path in folder.glob("*.safetensors") for n in load_file(path)
    }


def test_streamed_weights_are_those_of_the_directory(
    start: Callable[..., FSDPEngine], folder: Path
) -> None:
    expected = {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    loaded = weights_of(start(model=ModelSpec(path=str(folder))))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora": LoraSpec(rank=4, alpha=8.0)},
        {"model_type": "language_model"},
        {"model_type": "value_model"},
    ],
    ids=["fresh", "adapter", "streamed", "new head"],
)
def test_initializing_weights_preserves_the_rng_states_of_cpu_and_gpus(
    start: Callable[..., FSDPEngine],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    def seeds_gpus(seed: int) -> None:
        raise AssertionError(f"every GPU would be seeded with {seed}")

    given = (
        {"model": ModelSpec(path=str(folder), **settings)} if "model_type" in settings else settings
    )
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds_gpus)
    before = torch.get_rng_state()
    start(**given)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "lora",
    [
        LoraSpec(rank=4, alpha=8.0),
        LoraSpec(rank=4, alpha=8.0, dora=True),
        LoraSpec(rank=4, alpha=8.0, modules_to_save=("norm",)),
    ],
    ids=str,
)
def test_base_weights_are_streamed_unless_the_adapter_needs_them(
    start: Callable[..., FSDPEngine], folder: Path, monkeypatch: pytest.MonkeyPatch, lora: LoraSpec
) -> None:
    loaded = []
    build = components.build_model
    monkeypatch.setattr(
        components,
        "build_model",
        lambda *args, **kwargs: loaded.append(1) or build(*args, **kwargs),
    )
    streamed = start(model=ModelSpec(path=str(folder)), lora=lora)
    assert loaded == ([1] if lora.dora or lora.modules_to_save else [])
    monkeypatch.setattr(components, "build_streaming_model", lambda *args, **kwargs: None)
    full = start(model=ModelSpec(path=str(folder)), lora=lora)
    (config, actual), (other, expected) = streamed.export_adapter(), full.export_adapter()
    assert config == other
    assert actual.keys() == expected.keys()
    assert any(tensor.any() for tensor in actual.values()), (
        "an adapter begins with random numbers on one side"
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
    weights = weights_of(full)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(streamed).items())


def test_a_value_model_is_streamed_from_a_language_model(
    start: Callable[..., FSDPEngine], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    build = components.build_model
    monkeypatch.setattr(
        components,
        "build_model",
        lambda *args, **kwargs: loaded.append(1) or build(*args, **kwargs),
    )
    spec = ModelSpec(path=str(folder), model_type="value_model", seed=3)
    streamed = weights_of(start(model=spec))
    assert not loaded
    monkeypatch.setattr(components, "build_streaming_model", lambda *args, **kwargs: None)
    full = weights_of(start(model=spec))
    assert streamed.keys() == full.keys()
    assert streamed["score.weight"].any()
    assert all(torch.equal(tensor, full[name]) for name, tensor in streamed.items())


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """Return a model directory of an MoE model in many files."""
    architecture = {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture)).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_headers_of_experts_are_compared_with_the_joined_tensors(mixture: Path) -> None:
    config = FSDPConfig(model=ModelSpec(path=str(mixture)))
    components.check_model(config)
    path = mixture / "config.json"
    path.write_text(path.read_text().replace('size": 24', 'size": 20'))
    with pytest.raises(WeightError, match="of another shape"):
        components.check_model(config)


def _refused(*args: object, **kwargs: object) -> None:
    raise AssertionError("built in full")


def test_experts_are_streamed_into_the_joined_tensors_of_a_layer(
    start: Callable[..., FSDPEngine], mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_files = {
        name: tensor
        for path in mixture.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in in_files
    monkeypatch.setattr(components, "build_model", _refused)
    loaded = weights_of(start(model=ModelSpec(path=str(mixture))))
    assert loaded.keys() == in_files.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in in_files.items())


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_published_fp8_weights_are_dequantized_on_every_device(
    start: Callable[..., FSDPEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    # On GPUs with FP8 this check of transformers passes, and it would build FP8 layers.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    published = write_model(FAMILIES["deepseek_v3"], folder=tmp_path)
    expected = quantize_as_published(published)
    components.check_model(FSDPConfig(model=ModelSpec(path=str(published))))
    if strategy == "fsdp2":
        # Biases of routers are buffers, and layers for multi-token prediction are not in the model.
        monkeypatch.setattr(components, "build_model", _refused)
    engine = start(
        model=ModelSpec(path=str(published)), strategy=strategy, save_huggingface_weights=True
    )
    loaded = weights_of(engine)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
    step = engine.save_checkpoint(str(tmp_path / "saved"), global_step=0)
    saved = Path(step, "engine", huggingface_files.FOLDER, "config.json").read_text()
    assert "quantization_config" not in saved


def test_quantization_that_cannot_be_undone_is_refused_before_the_start(mixture: Path) -> None:
    path = mixture / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}}
    path.write_text(json.dumps(config))
    with pytest.raises(CapabilityError, match="quant_method of the model is 'awq'"):
        components.check_model(FSDPConfig(model=ModelSpec(path=str(mixture))))


def test_directory_with_other_names_is_loaded_by_transformers(
    start: Callable[..., FSDPEngine], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tied head is stored in addition to the embedding, as some exporters write it.
    full = {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    embedding = full["model.embed_tokens.weight"]
    save_file(
        {**full, "lm_head.weight": embedding.clone()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    loaded = []
    build = components.build_model
    monkeypatch.setattr(
        components,
        "build_model",
        lambda *args, **kwargs: loaded.append(1) or build(*args, **kwargs),
    )
    weights = weights_of(start(model=ModelSpec(path=str(folder))))
    assert loaded == [1]
    assert torch.equal(weights["model.embed_tokens.weight"], embedding)
