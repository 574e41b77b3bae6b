"""The ``huggingface/`` folder: shards, index, config and tokenizer files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from temper_engine_api.weights import NamedWeight
from temper_engine_fsdp import huggingface

WEIGHTS = [NamedWeight(f"w{i}", torch.full((4,), float(i))) for i in range(3)]


def test_few_weights_are_one_file(tmp_path: Path) -> None:
    files = huggingface.write_weights(iter(WEIGHTS), directory=str(tmp_path), is_writer=True)
    assert files == ["huggingface/model.safetensors"]
    assert load_file(tmp_path / files[0])["w2"].tolist() == [2.0] * 4


def test_many_weights_are_numbered_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 32)  # two tensors of 16 bytes
    files = huggingface.write_weights(iter(WEIGHTS), directory=str(tmp_path), is_writer=True)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert files == [f"huggingface/{name}" for name in (first, second, "model.safetensors.index.json")]
    index = json.loads((tmp_path / files[-1]).read_text())
    assert index == {"metadata": {"total_size": 48}, "weight_map": {"w0": first, "w1": first, "w2": second}}
    assert set(load_file(tmp_path / files[1])) == {"w2"}


def test_a_rank_that_does_not_write_still_consumes_the_stream(tmp_path: Path) -> None:
    stream = iter(WEIGHTS)
    assert huggingface.write_weights(stream, directory=str(tmp_path), is_writer=False) == []
    assert next(stream, None) is None
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_is_copied_beside_the_config(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"")
    config = AutoConfig.for_model("qwen2", vocab_size=7)
    files = huggingface.write_description(config, directory=str(tmp_path), source=str(source), dtype=torch.bfloat16)
    assert files == ["huggingface/config.json", "huggingface/tokenizer.json"]
    read = AutoConfig.from_pretrained(tmp_path / "huggingface")
    assert (read.model_type, read.vocab_size, read.dtype) == ("qwen2", 7, torch.bfloat16)
