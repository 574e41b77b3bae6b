"""Test the registry of objectives, and reading outputs that were not requested."""

import pytest
import torch

from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.objective import (
    HeadOutput,
    HeadOutputs,
    Objective,
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
