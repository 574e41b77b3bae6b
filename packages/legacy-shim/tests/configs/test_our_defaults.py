"""The translator's list of defaults equals the trainer's."""

import pytest

from temper_legacy_shim.configs.mapping.builder import is_our_default, trainer_defaults

pytest.importorskip("temper_trainer", reason="needs temper-trainer and its engines")

from temper_engine_api.registry import load_engine_config_class
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.schema import collect_defaults, flatten

GIVEN = {
    "critic": {"engine": {"model": {}}},
    "ref": {"engine": {"model": {}}},
    "data": {"eval": {"paths": ["x"]}, "train": {"paths": ["x"]}},
}
SET_BY_GROUPS = (
    "critic.engine.optimizer.lr",
    "critic.engine.precision.compute",
    "model.path",
    "model.seed",
    "trust_remote_code",
)


def test_defaults_are_the_trainers() -> None:
    result: dict[str, object] = {}
    for engine in ("fsdp", "megatron"):
        tree = collect_defaults(
            TrainerConfig, engine_class=load_engine_config_class(engine), given=GIVEN
        )  # type: ignore[arg-type]
        result |= flatten(tree)
    differing = {
        key: (value, result[key])
        for key, value in trainer_defaults().items()
        if key in result
        and not key.endswith(SET_BY_GROUPS)
        and result[key] != value
        and not (key.endswith("sequence_parallel"))
    }
    assert differing == {}


def test_true_is_not_one() -> None:
    assert not is_our_default("actor.engine.sequence_parallel", True)
    assert is_our_default("actor.engine.sequence_parallel", 1)
