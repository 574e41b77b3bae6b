"""Objectives by name, and answers that were never asked for."""

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
def mine(objective: Objective, monkeypatch: pytest.MonkeyPatch) -> type[Objective]:
    """A class to register, in a registry of this test's own."""
    monkeypatch.setattr("temper_engine_api.objective._REGISTRY", {})

    class Mine(type(objective)):  # type: ignore[misc]
        """A class of its own."""

    return Mine


def test_a_registered_objective_is_found_by_name(mine: type[Objective]) -> None:
    register_objective("mine")(mine)
    assert get_objective_class("mine") is mine
    assert dict(list_objectives()) == {"mine": mine}
    assert mine.name == "mine"


def test_an_unknown_objective_names_those_there_are(mine: type[Objective]) -> None:
    register_objective("mine")(mine)
    with pytest.raises(
        ConfigError, match=r"no objective is registered as 'yours'; registered: mine\."
    ):
        get_objective_class("yours")


def test_a_name_belongs_to_one_class(mine: type[Objective]) -> None:
    register_objective("mine")(mine)
    register_objective("mine")(mine)

    class Other(mine):  # type: ignore[misc, valid-type]
        """Another class."""

    with pytest.raises(ConfigError, match=r"'mine' is already used by .*Mine: choose another"):
        register_objective("mine")(Other)


def test_an_answer_that_was_not_asked_for_is_an_error() -> None:
    head_outputs = HeadOutputs(columns={HeadOutput.LOGPROB: torch.zeros(2, requires_grad=True)})
    assert not head_outputs.detach()[HeadOutput.LOGPROB].requires_grad
    with pytest.raises(EngineStateError, match=r"the head was not asked for 'entropy'"):
        _ = head_outputs[HeadOutput.ENTROPY]
