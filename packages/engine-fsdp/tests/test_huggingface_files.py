"""Test the `huggingface/` folder: shards, index, config and tokenizer files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from temper_engine_api.weights import NamedWeight, WeightEntry
from temper_engine_fsdp.checkpoint import huggingface_files

WEIGHTS = [NamedWeight(f"w{i}", torch.full((4,), float(i))) for i in range(3)]
MEASURE = Path(__file__).with_name("measure_export.py")


def entries(weights: list[NamedWeight]) -> list[WeightEntry]:
    return [
        WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
        for name, tensor in weights
    ]


def write(weights: list[NamedWeight], folder: Path, *, shard_bytes: int = 1 << 30) -> list[str]:
    return huggingface_files.write_weights(
        iter(weights),
        entries(weights),
        directory=str(folder),
        is_writer=True,
        shard_bytes=shard_bytes,
    )


def test_few_weights_are_one_file(tmp_path: Path) -> None:
    files = write(WEIGHTS, tmp_path)
    assert files == ["huggingface/model.safetensors"]
    assert load_file(tmp_path / files[0])["w2"].tolist() == [2.0] * 4


def test_many_weights_are_numbered_files_with_an_index(tmp_path: Path) -> None:
    files = write(WEIGHTS, tmp_path, shard_bytes=32)  # two tensors of 16 bytes
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert files == [
        f"huggingface/{name}" for name in (first, second, "model.safetensors.index.json")
    ]
    index = json.loads((tmp_path / files[-1]).read_text())
    assert index == {
        "metadata": {"total_size": 48},
        "weight_map": {"w0": first, "w1": first, "w2": second},
    }
    assert set(load_file(tmp_path / files[1])) == {"w2"}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_every_dtype_and_shape_can_be_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = [
        NamedWeight("matrix", torch.arange(15).reshape(3, 5).to(dtype)),
        NamedWeight("scalar", torch.tensor(1).to(dtype)),
        NamedWeight("empty", torch.empty(0, 4, dtype=dtype)),
        NamedWeight("transposed", torch.arange(6).reshape(2, 3).to(dtype).t()),
    ]
    loaded = load_file(tmp_path / write(weights, tmp_path)[0])
    for name, tensor in weights:
        assert loaded[name].dtype == dtype
        assert torch.equal(loaded[name], tensor), name


def test_a_rank_that_does_not_write_still_consumes_the_stream(tmp_path: Path) -> None:
    stream = iter(WEIGHTS)
    done = huggingface_files.write_weights(
        stream, entries(WEIGHTS), directory=str(tmp_path), is_writer=False, shard_bytes=32
    )
    assert done == []
    assert next(stream, None) is None
    assert list(tmp_path.iterdir()) == []


def test_export_uses_less_memory_than_a_file(tmp_path: Path) -> None:
    # Eight tensors of 32 MiB, files of 128 MiB: 1.3 files would be 166 MiB; one tensor and its
    # buffers are what is held.
    done = subprocess.run(
        [sys.executable, str(MEASURE), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) < 1.3 * (128 << 20)
    assert len(list((tmp_path / "huggingface").glob("*.safetensors"))) == 2


def test_the_tokenizer_is_copied_next_to_the_config(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"")
    config = AutoConfig.for_model("qwen2", vocab_size=7)
    files = huggingface_files.write_model_config(
        config, directory=str(tmp_path), source=str(source), dtype=torch.bfloat16
    )
    assert files == ["huggingface/config.json", "huggingface/tokenizer.json"]
    read = AutoConfig.from_pretrained(tmp_path / "huggingface")
    assert (read.model_type, read.vocab_size, read.dtype) == ("qwen2", 7, torch.bfloat16)
