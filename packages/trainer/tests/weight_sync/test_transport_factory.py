"""Test which transport is chosen for the locations of actor and servers."""

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
    ("senders", "receivers", "transport", "reason"),
    [
        ([GPU_0], [GPU_1, GPU_2], "collective", "GPUs of their own (NCCL)"),
        ([GPU_0], [GPU_1, FAR_GPU], "collective", "GPUs of their own (NCCL)"),
        ([GPU_0], [GPU_0], "cuda_ipc", "on the GPUs of the actor's ranks"),
        ([GPU_0], [GPU_0, GPU_0], "cuda_ipc", "on the GPUs of the actor's ranks"),
        ([GPU_0, GPU_1], [GPU_1, GPU_0], "cuda_ipc", "on the GPUs of the actor's ranks"),
        ([GPU_0, FAR_GPU], [GPU_0, FAR_GPU], "cuda_ipc", "on the GPUs of the actor's ranks"),
        (
            [GPU_0, GPU_2],
            [GPU_0, GPU_1],
            "shared_memory",
            "some workers of servers are on GPUs of the actor and some are not",
        ),
        ([GPU_0], [GPU_1, GPU_1], "shared_memory", "several workers of servers share a GPU"),
        ([CPU], [CPU, CPU], "shared_memory", "on the CPUs of one host"),
        ([CPU, CPU], [CPU, CPU], "shared_memory", "on the CPUs of one host"),
        ([CPU], [CPU, FAR_CPU], "collective", "on the CPUs of several hosts (gloo)"),
        ([GPU_0], [CPU], "shared_memory", "only one side has a GPU"),
        ([CPU], [GPU_0], "shared_memory", "only one side has a GPU"),
    ],
)
def test_fastest_working_transport_is_chosen(
    senders: list[DeviceLocation], receivers: list[DeviceLocation], transport: str, reason: str
) -> None:
    choice = choose_transport(senders, receivers)
    assert (choice.transport, reason in choice.reason) == (transport, True), choice


@pytest.mark.parametrize(
    ("sender", "receivers"), [(GPU_0, [GPU_0, FAR_GPU]), (GPU_0, [FAR_CPU]), (CPU, [FAR_GPU])]
)
def test_missing_transport_to_all_servers_is_an_error(
    sender: DeviceLocation, receivers: list[DeviceLocation]
) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"weight_sync\.transport is auto, but no transport reaches all servers: .*on "
            r"the actor's host"
        ),
    ):
        choose_transport([sender], receivers)


def test_server_on_the_actors_gpu_in_another_container_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the actor's GPU GPU-0 in another container .* is b\)"):
        choose_transport([GPU_0], [DeviceLocation(host="b", gpu="GPU-0")])


def test_processes_of_one_host_have_the_same_location() -> None:
    location = locate_device(torch.device("cpu"))
    assert location.gpu is None
    assert location.host.startswith(os.uname().nodename)
    assert location == locate_device(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, such as one H200")
def test_gpu_is_identified_by_its_uuid() -> None:
    location = locate_device(torch.device("cuda", 0))
    assert location.gpu is not None
    assert len(location.gpu) == 36
