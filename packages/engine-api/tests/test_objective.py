"""Test the registry of objectives, unrequested outputs, and the check of experts to replay."""

import re

import pytest
import torch

from temper_engine_api.batch import SequenceBatch, from_sequences, make_dummy_sequence
from temper_engine_api.errors import BatchError, ConfigError, EngineStateError
from temper_engine_api.objective import (
    ROUTED_EXPERTS,
    HeadOutput,
    HeadOutputs,
    Objective,
    check_routed_experts,
    get_objective_class,
    list_objectives,
    register_objective,
)


@pytest.fixture
def objective_class(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> type[Objective]:
    """Return a class to register; the registry of this test is empty."""
    monkeypatch.setattr("temper_engine_api.objective._REGISTRY", {})

    class Likelihood(type(objective)):  # type: ignore[misc]
        """A subclass that no other test registers."""

    return Likelihood


def test_registered_objective_is_returned_by_name(objective_class: type[Objective]) -> None:
    register_objective("likelihood")(objective_class)
    assert get_objective_class("likelihood") is objective_class
    assert dict(list_objectives()) == {"likelihood": objective_class}
    assert objective_class.name == "likelihood"


def test_error_for_an_unknown_name_lists_the_registered_ones(
    objective_class: type[Objective],
) -> None:
    register_objective("likelihood")(objective_class)
    with pytest.raises(
        ConfigError, match=r"no objective is registered as 'ppo'; registered: likelihood\."
    ):
        get_objective_class("ppo")


def test_two_classes_cannot_have_the_same_name(objective_class: type[Objective]) -> None:
    register_objective("likelihood")(objective_class)
    register_objective("likelihood")(objective_class)

    class Other(objective_class):  # type: ignore[misc, valid-type]
        """Another class."""

    with pytest.raises(
        ConfigError, match=r"'likelihood' is already used by .*Likelihood: choose another"
    ):
        register_objective("likelihood")(Other)


def test_reading_an_output_that_was_not_requested_is_an_error() -> None:
    head_outputs = HeadOutputs(columns={HeadOutput.LOGPROB: torch.zeros(2, requires_grad=True)})
    assert not head_outputs.detach()[HeadOutput.LOGPROB].requires_grad
    with pytest.raises(EngineStateError, match=r"output 'entropy' was not requested from the head"):
        _ = head_outputs[HeadOutput.ENTROPY]


def test_loss_without_gradient_is_connected_to_the_outputs() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropies = torch.tensor([0.5, 0.5])
    head_outputs = HeadOutputs(
        columns={HeadOutput.LOGPROB: logprobs, HeadOutput.ENTROPY: entropies}
    )
    loss = head_outputs.connect(torch.tensor(0.25))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0.25
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]
    connected = -logprobs.sum()
    assert head_outputs.connect(connected) is connected


def test_loss_of_an_evaluation_stays_without_gradient() -> None:
    head_outputs = HeadOutputs(columns={HeadOutput.LOGPROB: torch.zeros(2)})
    assert not head_outputs.connect(torch.tensor(0.25)).requires_grad


def replay(*experts: list[int]) -> SequenceBatch:
    """Return a sequence whose tokens go to these experts of one layer."""
    batch = from_sequences(
        [torch.arange(len(experts))], loss_masks=[torch.arange(len(experts)) > 0]
    )
    column = torch.tensor(experts, dtype=torch.int16)[:, None]
    return batch.with_columns({ROUTED_EXPERTS: column})


def test_different_experts_or_none_are_accepted() -> None:
    check_routed_experts(replay([3, 0, 1], [-1, -1, -1]), num_layers=1, num_experts=4)


def test_experts_of_dummies_are_not_checked() -> None:
    dummy = make_dummy_sequence(replay([3, 0, 1], [-1, -1, -1]))
    assert dummy.columns[ROUTED_EXPERTS].tolist() == [[[0, 0, 0]]]
    check_routed_experts(dummy, num_layers=1, num_experts=4)


@pytest.mark.parametrize(
    "experts", [[0, 1, 4], [-2, -2, -2], [2, 1, 2], [-1, 1, 2], [1, 2, -1], [1, -1, -1]]
)
def test_experts_that_a_router_cannot_choose_are_refused(experts: list[int]) -> None:
    with pytest.raises(BatchError, match=re.escape(f"sends a token to experts {experts}")):
        check_routed_experts(replay([3, 0, 1], experts), num_layers=1, num_experts=4)


def test_experts_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(BatchError, match=r"has shape \(1, 1, 2\), but must be .* the 2 layers"):
        check_routed_experts(replay([0, 1]), num_layers=2, num_experts=4)
