"""The trainer's own part of a checkpoint."""

import pytest

from temper_engine_api.errors import DamagedCheckpointError
from temper_trainer.checkpoint.state import TrainerState
from temper_trainer.types import DataCursor


def test_the_state_survives_its_file() -> None:
    state = TrainerState(
        phase="rl",
        step=7,
        cursor=DataCursor(epoch=2, index=5),
        weight_version=8,
        config_digest="ab",
        kl_coef=0.25,
    )
    assert TrainerState.from_json(state.to_json()) == state


@pytest.mark.parametrize("text", ["{}", '{"step": "7"}', "[]"])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="unexpected fields"):
        TrainerState.from_json(text)
