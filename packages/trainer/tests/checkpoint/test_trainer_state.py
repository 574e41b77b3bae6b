import json

import pytest

from temper_engine_api.errors import DamagedCheckpointError
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.types import DataCursor


def test_state_survives_a_round_trip() -> None:
    state = TrainerState(
        phase="rl",
        step=7,
        cursor=DataCursor(epoch=2, index=5),
        weight_version=8,
        config_digest="ab",
        kl_coef=0.25,
        trained_ahead=(1, 4),
    )
    assert TrainerState.from_json(state.to_json()) == state


@pytest.mark.parametrize(
    "text",
    ["{}", '{"step": "7"}', "[]", "no json", b"\xff", pytest.param("[" * 100_000, id="depth")],
)
def test_state_file_with_other_fields_is_refused(text: str | bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="unexpected fields"):
        TrainerState.from_json(text)


def test_state_of_an_older_version_lacks_digest_and_trained_prompts() -> None:
    state = TrainerState(
        phase="rl", step=7, cursor=DataCursor(), weight_version=8, config_digest="ab"
    )
    fields = json.loads(state.to_json())
    del fields["tokenizer_digest"], fields["trained_ahead"]
    assert TrainerState.from_json(json.dumps(fields)) == state
