"""The model directory that a run leaves."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from packages.trainer.tests.checkpoint.exports_for_tests import SPEC, full_disk, make_tokenizer
from packages.trainer.tests.rollout.models_for_tests import make_pair
from temper_engine_api.errors import CheckpointError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_trainer.checkpoint import huggingface_export


def weights() -> list[NamedWeight]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(huggingface_export.build_model_config(SPEC))
    return [
        NamedWeight(name, tensor)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    ]


@pytest.mark.parametrize("shard_bytes", [4 << 30, 600])
def test_written_model_loads_with_the_same_weights_and_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(huggingface_export, "SHARD_BYTES", shard_bytes)
    sent = weights()
    huggingface_export.write_model_directory(
        iter(sent), model=SPEC, tokenizer=make_tokenizer(), directory=tmp_path / "model"
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in sent)
    assert loaded.config.use_cache, "without it generate runs without its cache, silently"
    index = tmp_path / "model" / "model.safetensors.index.json"
    assert index.exists() == (shard_bytes == 600)
    if index.exists():
        assert set(json.loads(index.read_text())["weight_map"]) == {name for name, _ in sent}


def test_config_of_a_written_model_has_no_quantization(tmp_path: Path) -> None:
    fields = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = huggingface_export.build_model_config(ModelSpec(path=str(tmp_path)))
    assert "quantization_config" not in config.to_dict()


def test_vision_language_model_is_written_with_its_class_and_image_processor(
    tmp_path: Path,
) -> None:
    base = tmp_path / "base"
    network = make_pair("qwen3_vl", base).model
    (base / "preprocessor_config.json").write_text('{"patch_size": 4}')
    huggingface_export.write_model_directory(
        (NamedWeight(name, tensor) for name, tensor in network.state_dict().items()),
        model=ModelSpec(path=str(base)),
        tokenizer=make_tokenizer(),
        directory=tmp_path / "model",
    )
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    assert fields["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert (tmp_path / "model" / "preprocessor_config.json").read_text() == '{"patch_size": 4}'


def test_existing_directory_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists and is never overwritten"):
        huggingface_export.write_model_directory(
            iter(weights()), model=SPEC, tokenizer=make_tokenizer(), directory=tmp_path / "model"
        )
    assert (tmp_path / "model" / "mine.txt").read_text() == "mine"


def test_failing_weight_stream_leaves_no_directory(tmp_path: Path) -> None:
    def broken() -> "object":
        yield weights()[0]
        raise OSError("no space left on device")

    with pytest.raises(CheckpointError, match="no space left on device"):
        huggingface_export.write_model_directory(
            broken(), model=SPEC, tokenizer=make_tokenizer(), directory=tmp_path / "model"
        )  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# Smaller than the weights, which safetensors writes; larger, and smaller than the tokenizer's file,
# which the tokenizers library writes.
@pytest.mark.parametrize(
    ("at", "vocabulary", "what"), [(1000, 2, "model"), (20_000, 200, "tokenizer")]
)
def test_full_disk_is_a_checkpoint_error_and_leaves_no_directory(
    tmp_path: Path, at: int, vocabulary: int, what: str
) -> None:
    large = make_tokenizer()
    large.add_tokens([f"word-{i}" for i in range(vocabulary)])
    with (
        full_disk(at=at),
        pytest.raises(
            CheckpointError,
            match=rf"the {what} could not be written to .*File too large.*Free space and run",
        ),
    ):
        huggingface_export.write_model_directory(
            iter(weights()), model=SPEC, tokenizer=large, directory=tmp_path / "model"
        )
    assert list(tmp_path.iterdir()) == []
