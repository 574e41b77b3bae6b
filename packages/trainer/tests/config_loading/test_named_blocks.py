"""Blocks under names of the user's own: teachers by name."""

import pytest

from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.schema import collect_defaults, collect_keys
from temper_trainer.config_loading.structuring import structure
from temper_trainer.config_loading.unknown_keys import is_known_key

GIVEN = {
    "data": {"train": {"paths": ["train.jsonl"]}},
    "actor": {"engine": {"model": {"path": "model"}}},
    "teachers": {"math": {"engine": {"model": {"path": "teacher"}}, "num_replicas": 2}},
}


def test_each_named_block_gets_its_defaults() -> None:
    defaults = collect_defaults(TrainerConfig, engine_class=FSDPConfig, given=GIVEN)
    teachers = defaults["teachers"]
    assert isinstance(teachers, dict)
    assert teachers["math"]["pool"] == "teacher"  # type: ignore[index, call-overload]
    assert teachers["math"]["engine"]["device"] == "auto"  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    ("key", "is_known"),
    [
        ("teachers", True),
        ("teachers.math", True),
        ("teachers.math.pool", True),
        ("teachers.math.engine.model.path", True),
        ("teachers.math.engine.model.architecture.hidden_size", True),
        ("teachers.math.pol", False),
        ("teachers.math.engine.model.pth", False),
    ],
)
def test_keys_below_a_name_are_checked_like_any_other(key: str, is_known: bool) -> None:
    assert is_known_key(key, known=collect_keys(TrainerConfig, engine_class=FSDPConfig)) is is_known


def test_wrong_value_in_a_named_block_is_reported_with_its_full_key() -> None:
    teachers: dict[str, object] = {
        "math": {"engine": {"model": {"path": "teacher"}}, "num_replicas": "two"}
    }
    with pytest.raises(
        ConfigError, match=r"^teachers\.math\.num_replicas is 'two', but must be a whole number"
    ):
        structure({**GIVEN, "teachers": teachers}, TrainerConfig, engine_class=FSDPConfig)  # type: ignore[dict-item]
