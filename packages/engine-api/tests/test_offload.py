"""Test offloading tensors to host memory and loading them again."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from temper_engine_api.offload import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Mode,
    Offloader,
    OffloadPolicy,
)
from temper_engine_api.specs import OffloadSpec


@pytest.fixture
def weight() -> Tensor:
    return torch.arange(6.0)


@pytest.fixture
def offloader(weight: Tensor) -> Offloader:
    # A view shares its storage: both move once.
    def tensors() -> Iterator[Tensor]:
        yield weight
        yield weight[2:4]

    return Offloader({"model": tensors}, device=torch.device("cpu"))


def test_tensors_that_are_not_on_the_device_stay_as_they_are(weight: Tensor) -> None:
    """An update on the CPU keeps optimizer states in host memory while the device is a GPU."""
    offloader = Offloader({"optimizer": lambda: [weight]}, device=torch.device("meta"))
    offloader.offload("optimizer")
    assert weight.untyped_storage().nbytes() == 24
    offloader.load("optimizer")
    assert weight.tolist() == [0, 1, 2, 3, 4, 5]


def test_offloaded_tensor_has_no_device_memory_and_loads_completely(
    offloader: Offloader, weight: Tensor
) -> None:
    view = weight[2:4]
    offloader.offload("model")
    assert weight.untyped_storage().nbytes() == 0
    offloader.load("model")
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert view.tolist() == [2.0, 3.0]


def test_move_takes_only_the_named_groups() -> None:
    tensors = {name: torch.ones(3) for name in (PARAMETERS, GRADIENTS, OPTIMIZER)}
    offloader = Offloader(
        {name: partial(list, [each]) for name, each in tensors.items()}, device=torch.device("cpu")
    )
    offloader.move("cpu", model=True, optimizer=False)
    assert [each.untyped_storage().nbytes() for each in tensors.values()] == [0, 0, 12]
    offloader.move("device", model=True, optimizer=False)
    offloader.move("cpu", model=False, optimizer=True)
    assert [each.untyped_storage().nbytes() for each in tensors.values()] == [12, 12, 0]


def test_changes_inside_a_context_survive_offloading(offloader: Offloader, weight: Tensor) -> None:
    offloader.offload("model")
    with offloader.loaded("model"):
        weight.add_(1.0)
    assert weight.untyped_storage().nbytes() == 0
    offloader.load("model")
    assert weight.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_nested_contexts_move_nothing_and_the_outer_one_offloads(
    offloader: Offloader, weight: Tensor
) -> None:
    offloader.offload("model")
    with offloader.loaded("model"):
        with offloader.loaded("model"):
            pass
        assert weight.untyped_storage().nbytes() == 24
    assert offloader.is_offloaded("model")


def test_what_was_on_the_device_stays_there(offloader: Offloader, weight: Tensor) -> None:
    with offloader.loaded("model"):
        pass
    assert not offloader.is_offloaded("model")


def test_an_exception_offloads_again(offloader: Offloader) -> None:
    offloader.offload("model")
    with pytest.raises(KeyError), offloader.loaded("model"):
        raise KeyError
    assert offloader.is_offloaded("model")


def test_offloading_twice_and_loading_twice_are_harmless(
    offloader: Offloader, weight: Tensor
) -> None:
    offloader.offload("model")
    offloader.offload("model")
    offloader.load("model")
    offloader.load("model")
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.fixture
def groups() -> Offloader:
    tensors = {name: torch.arange(3.0) for name in (PARAMETERS, GRADIENTS, OPTIMIZER)}
    return Offloader(
        {name: (lambda tensor=tensor: [tensor]) for name, tensor in tensors.items()},
        device=torch.device("cpu"),
    )


def offloaded_groups(offloader: Offloader) -> set[str]:
    return {name for name in (PARAMETERS, GRADIENTS, OPTIMIZER) if offloader.is_offloaded(name)}


@pytest.mark.parametrize(
    ("spec", "gone"),
    [
        (OffloadSpec(), set()),
        (OffloadSpec(parameters=True), {PARAMETERS, GRADIENTS}),
        (OffloadSpec(parameters=True, gradients=False), {PARAMETERS}),
        (OffloadSpec(gradients=True), {GRADIENTS}),
        (OffloadSpec(optimizer=True), {OPTIMIZER}),
    ],
)
def test_each_group_is_offloaded_as_configured(
    groups: Offloader, spec: OffloadSpec, gone: set[str]
) -> None:
    offloading = OffloadPolicy(groups, spec=spec)
    assert offloaded_groups(groups) == gone
    with offloading.load_for_mode("update"):
        assert offloaded_groups(groups) == set()
    assert offloaded_groups(groups) == gone


def test_optimizer_states_prefetched_in_train_mode_stay_for_the_step(groups: Offloader) -> None:
    offloading = OffloadPolicy(
        groups, spec=OffloadSpec(optimizer=True, load_optimizer_in="train_mode")
    )
    # (mode, whether optimizer states are on the device inside it, and after it)
    steps: list[tuple[Mode, bool, bool]] = [
        ("train", True, True),
        ("train", True, True),
        ("update", True, False),
        ("train", True, True),
    ]
    for mode, inside, after in [*steps, ("eval", False, False)]:
        with offloading.load_for_mode(mode):
            assert groups.is_offloaded(OPTIMIZER) != inside, mode
        assert groups.is_offloaded(OPTIMIZER) != after, mode


def test_prefetched_states_are_offloaded_after_an_exception_in_the_step(groups: Offloader) -> None:
    offloading = OffloadPolicy(
        groups, spec=OffloadSpec(optimizer=True, load_optimizer_in="train_mode")
    )
    with offloading.load_for_mode("train"):
        pass
    with pytest.raises(KeyError), offloading.load_for_mode("update"):
        raise KeyError
    assert offloaded_groups(groups) == {OPTIMIZER}
