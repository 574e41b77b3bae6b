"""Which transport takes the weights, by where actor and servers are."""

import os

import pytest
import torch

from temper_engine_api.errors import ConfigError
from temper_trainer.rollout.weight_channel import DeviceLocation, locate_device
from temper_trainer.weight_sync.transport_factory import choose_transport

CPU = DeviceLocation(host="a")
GPU_0, GPU_1, GPU_2 = (DeviceLocation(host="a", gpu=f"GPU-{i}") for i in range(3))
FAR_CPU, FAR_GPU = DeviceLocation(host="b"), DeviceLocation(host="b", gpu="GPU-9")


@pytest.mark.parametrize(
    ("sender", "receivers", "transport", "reason"),
    [
        (GPU_0, [GPU_1, GPU_2], "collective", "GPUs of their own (NCCL)"),
        (GPU_0, [GPU_1, FAR_GPU], "collective", "GPUs of their own (NCCL)"),
        (GPU_0, [GPU_0], "cuda_ipc", "on the GPU of the actor's rank 0"),
        (GPU_0, [GPU_0, GPU_0], "cuda_ipc", "on the GPU of the actor's rank 0"),
        (
            GPU_0,
            [GPU_0, GPU_1],
            "shared_memory",
            "some servers share the GPU of the actor's rank 0 and some do not",
        ),
        (GPU_0, [GPU_1, GPU_1], "shared_memory", "several workers of servers share a GPU"),
        (CPU, [CPU, CPU], "shared_memory", "on the CPUs of one host"),
        (CPU, [CPU, FAR_CPU], "collective", "on the CPUs of several hosts (gloo)"),
        (GPU_0, [CPU], "shared_memory", "only one side has a GPU"),
        (CPU, [GPU_0], "shared_memory", "only one side has a GPU"),
    ],
)
def test_the_fastest_way_that_works_is_taken(
    sender: DeviceLocation, receivers: list[DeviceLocation], transport: str, reason: str
) -> None:
    choice = choose_transport(sender, receivers)
    assert (choice.transport, reason in choice.reason) == (transport, True), choice


@pytest.mark.parametrize(
    ("sender", "receivers"), [(GPU_0, [GPU_0, FAR_GPU]), (GPU_0, [FAR_CPU]), (CPU, [FAR_GPU])]
)
def test_where_no_way_leads_to_all_servers_it_is_said(
    sender: DeviceLocation, receivers: list[DeviceLocation]
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"weight_sync\.transport is auto, but no transport reaches all servers: .*on the actor's host",
    ):
        choose_transport(sender, receivers)


def test_processes_of_one_machine_have_one_place() -> None:
    place = locate_device(torch.device("cpu"))
    assert place.gpu is None
    assert place.host.startswith(os.uname().nodename)
    assert place == locate_device(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, such as one H200")
def test_a_gpu_is_named_by_its_uuid() -> None:
    place = locate_device(torch.device("cuda", 0))
    assert place.gpu is not None
    assert len(place.gpu) == 36
