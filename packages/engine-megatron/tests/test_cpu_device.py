"""Test that Megatron's CUDA calls use the CPU where there is no CUDA, inside the context only."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.layout import default_layout
from temper_engine_megatron.runtime import cpu_device
from temper_engine_megatron.runtime.cpu_device import support_missing_cuda


def test_cuda_device_names_mean_the_cpu_inside_the_context():
    with support_missing_cuda():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert (
            torch.empty(1, device=torch.cuda.current_device(), pin_memory=True).device.type == "cpu"
        )
        assert torch.ones(1).cuda().device.type == "cpu"


def test_patches_are_undone_after_the_context():
    before = [getattr(owner, name) for owner, name, _ in cpu_device._replacements()]
    with pytest.raises(ZeroDivisionError), support_missing_cuda():
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name, _ in cpu_device._replacements()] == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_context_can_be_nested():
    with support_missing_cuda(), support_missing_cuda():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.Tensor.type is cpu_device._REAL_TYPE


def test_only_megatrons_optimizers_see_cuda_type_names():
    source = "def type_of(tensor):\n    return tensor.type()\n"
    optimizer: dict[str, Any] = {}
    exec(compile(source, "/somewhere/megatron/core/optimizer/optimizer.py", "exec"), optimizer)
    assert optimizer["type_of"](torch.zeros(1)) == "torch.FloatTensor"
    with support_missing_cuda():
        assert optimizer["type_of"](torch.zeros(1)) == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type() == "torch.FloatTensor"
        assert torch.zeros(1).type(torch.float64).dtype is torch.float64


def test_nothing_is_patched_if_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    current_device = torch.cuda.current_device
    with support_missing_cuda():
        assert torch.cuda.current_device is current_device
        assert torch.Tensor.type is cpu_device._REAL_TYPE


def test_ranks_gather_tensors_of_different_lengths_as_with_nccl(rank_pool, oracle):
    setup = oracle.make_setup(QWEN2_GROUPED)
    for parts in rank_pool.run(
        gather_parts, engine="megatron", layout=default_layout(2), arguments={"setup": setup}
    ):
        assert parts == [[[0.0, 0.0]] * 3, [[1.0, 1.0]]]


def gather_parts(rank, *, setup):
    """Gather three rows of the first rank and one of the second."""
    rank.temporary_engine(setup)
    local_rank = dist.get_rank()
    parts = [torch.empty(3, 2), torch.empty(1, 2)]
    with support_missing_cuda():
        dist.all_gather(parts, torch.full(parts[local_rank].shape, float(local_rank)))
    return [part.tolist() for part in parts]
