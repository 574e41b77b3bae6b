from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from temper_engine_api.specs import EngineConfig, OptimizerSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.schema import collect_defaults, collect_keys, flatten, to_plain
from temper_trainer.config_loading.structuring import describe_expected, describe_type
from temper_trainer.settings.ranges import FiniteFloat, NonNegativeFloat, PositiveInt, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    engine: EngineConfig
    optimizer: OptimizerSpec | None = None
    names: tuple[str, ...] = ("a",)


def test_keys_are_found_in_optional_blocks_and_in_the_engines_class() -> None:
    keys = collect_keys(TrainerConfig, engine_class=FSDPConfig)
    assert {"critic.engine.fsdp_size", "data.eval.paths", "warm_start.optimizer.lr", "run"} <= set(
        keys
    )
    assert "critic.engine.fsdp_size" not in collect_keys(TrainerConfig, engine_class=EngineConfig)


def test_defaults_omit_required_keys_and_disabled_blocks() -> None:
    defaults = collect_defaults(Outer, engine_class=EngineConfig, given={})
    assert defaults["optimizer"] is None
    assert defaults["names"] == ["a"]
    assert isinstance(defaults["engine"], dict)
    assert defaults["engine"]["optimizer"] == to_plain(OptimizerSpec())


def test_optional_block_gets_its_defaults_once_something_in_it_is_set() -> None:
    defaults = collect_defaults(Outer, engine_class=EngineConfig, given={"optimizer": {"lr": 0.5}})
    assert defaults["optimizer"] == to_plain(OptimizerSpec())


def test_disabled_block_stays_disabled() -> None:
    defaults = collect_defaults(
        Outer, engine_class=EngineConfig, given={"engine": {"optimizer": None}}
    )
    assert isinstance(defaults["engine"], dict)
    assert defaults["engine"]["optimizer"] is None


def test_leaves_are_values_lists_and_empty_mappings() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, 2], "e": None}) == {
        "a.b": 1,
        "a.c": {},
        "d": [1, 2],
        "e": None,
    }


def test_types_are_described_in_plain_words() -> None:
    assert describe_type(float | None) == "number | null"
    assert describe_type(bool) == "true | false"
    assert describe_type(PositiveInt) == "whole number of at least 1"
    assert describe_type(str | tuple[str, ...]) == "text | list of values, each text"


@pytest.mark.parametrize(
    ("annotation", "phrase"),
    [
        (bool, "true or false"),
        (bool | int, "true, false or a whole number"),
        (FiniteFloat, "a number"),
        (NonNegativeFloat, "a number of at least 0"),
        (PositiveInt | None, "a whole number of at least 1, or null"),
        (Annotated[float, Range(above=0, below=1)], "a number above 0 and below 1"),
        (Annotated[int, Range(at_least=1048576)], "a whole number of at least 1048576"),
        (Literal["low", "high"] | None, "low, high or null"),
        (tuple[Literal["low", "high"], ...] | None, "a list of values, each low or high, or null"),
        (tuple[float, float], "a list of 2 values, each a number"),
        (Mapping[str, float], "a mapping from names to values"),
    ],
)
def test_expected_values_end_a_sentence(annotation: object, phrase: str) -> None:
    assert describe_expected(annotation) == phrase
