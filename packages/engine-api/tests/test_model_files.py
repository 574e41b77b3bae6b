"""Test that weights are read as if a model directory were not quantized."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from temper_engine_api.errors import CapabilityError, WeightError
from temper_engine_api.model_files import (
    ModelFiles,
    dequantize_fp8,
    dequantize_mxfp4,
    drop_quantization,
)

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def write(folder: Path, tensors: dict[str, Tensor], quantization: object = None) -> ModelFiles:
    save_file(tensors, folder / "model.safetensors")
    config = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelFiles(folder, open_file=safe_open)


def test_last_block_of_fp8_may_be_smaller() -> None:
    # As `kv_a_proj_with_mqa` of DeepSeek-V3: 576 rows in five blocks of 128.
    weight = torch.randn(576, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(5, 2) + 0.5
    expected = weight.float().clone()
    for row in range(5):
        for column in range(2):
            block = slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1))
            expected[block] *= scales[row, column]
    assert torch.equal(dequantize_fp8(weight, scales, block_size=(128, 128)), expected)


def test_fp8_weight_may_have_one_scale() -> None:
    weight = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    assert dequantize_fp8(weight, torch.tensor(0.5)).tolist() == [[0.5, 1.0]]


@pytest.mark.parametrize(
    ("scales", "match"),
    [
        (torch.ones(3, 1), "does not fit scales of shape"),
        (torch.ones(2, 1).to(torch.uint8), "must be floating point"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scales: Tensor, match: str, tmp_path: Path) -> None:
    weight = torch.ones(200, 100).to(torch.float8_e4m3fn)
    files = write(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scales}, FP8)
    with files.open() as read, pytest.raises(WeightError, match=match):
        read("a.weight")


def test_mxfp4_is_dequantized_as_in_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(117, 137, (3, 6, 2), dtype=torch.uint8, generator=generator)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize_mxfp4(blocks, scales), expected)


def test_names_and_shapes_are_those_without_quantization(tmp_path: Path) -> None:
    (tmp_path / "fp8").mkdir()
    files = write(
        tmp_path / "fp8",
        {
            "a.weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
            "a.weight_scale_inv": torch.full((1, 1), 2.0),
            "norm.weight": torch.ones(8, dtype=torch.bfloat16),
        },
        FP8,
    )
    assert files.read_shapes() == {"a.weight": (4, 8), "norm.weight": (8,)}
    with files.open() as read:
        assert torch.equal(read("a.weight"), torch.full((4, 8), 2.0))
        assert read("norm.weight").dtype == torch.bfloat16
    (tmp_path / "mxfp4").mkdir()
    files = write(
        tmp_path / "mxfp4",
        {
            "experts.down_proj_blocks": torch.zeros(2, 6, 1, 16, dtype=torch.uint8),
            "experts.down_proj_scales": torch.zeros(2, 6, 1, dtype=torch.uint8),
            "experts.down_proj_bias": torch.zeros(2, 6),
        },
        {"quant_method": "mxfp4"},
    )
    shapes = {"experts.down_proj": (2, 32, 6), "experts.down_proj_bias": (2, 6)}
    assert files.read_shapes() == shapes
    with files.open() as read:
        assert read("experts.down_proj").shape == shapes["experts.down_proj"]


@pytest.mark.parametrize("quantization", [None, FP8])
def test_fp8_without_scales_is_refused(quantization: object, tmp_path: Path) -> None:
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    files = write(tmp_path, {"a.weight": weight}, quantization)
    with pytest.raises(WeightError, match=r"a\.weight in \S+ is FP8, but has no scales"):
        files.read_shapes()
    with files.open() as read, pytest.raises(WeightError, match="is FP8, but has no scales"):
        read("a.weight")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_integer_weight_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2, 2, dtype=dtype), "a.bias": torch.ones(2)}
    files = write(tmp_path, tensors)
    with pytest.raises(WeightError, match=r"a\.weight in \S+ has integers, so it is quantized"):
        files.read_shapes()
    with files.open() as read, pytest.raises(WeightError, match="convert the weights to bf16"):
        read("a.weight")


def test_buffers_may_be_integers(tmp_path: Path) -> None:
    positions, mask = torch.arange(3), torch.ones(2, dtype=torch.bool)
    files = write(tmp_path, {"position_ids": positions, "mask": mask})
    assert files.read_shapes() == {"position_ids": (3,), "mask": (2,)}
    with files.open() as read:
        assert torch.equal(read("position_ids"), positions)


def test_other_quantization_is_refused_by_name(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4}
    with pytest.raises(CapabilityError, match=r"is 'awq'.*: convert the weights to bf16"):
        write(tmp_path, {"a": torch.ones(1)}, settings)
    with pytest.raises(CapabilityError, match="is 'awq'"):
        drop_quantization(AutoConfig.for_model("qwen3", quantization_config=settings))


def test_config_keeps_no_quantization() -> None:
    config = AutoConfig.for_model("qwen3", quantization_config=FP8)
    drop_quantization(config)
    assert "quantization_config" not in config.to_dict()
