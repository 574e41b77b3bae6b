import pytest

from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.config.removed_keys import (
    REMOVED_KEYS,
    RENAMED_ENGINE_KEYS,
    RENAMED_KEYS,
    describe_removed_key,
    describe_renamed_key,
    find_new_key,
    rename_settings,
)
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.schema import collect_keys

KEYS = collect_keys(TrainerConfig, engine_class=FSDPConfig)


def test_removed_keys_do_not_exist() -> None:
    assert [key for keys in REMOVED_KEYS.values() for key in keys if key in KEYS] == []


def test_every_replacement_names_existing_keys() -> None:
    roots = {key.partition(".")[0] for key in KEYS} | {
        "algorithm=NAME",
        "model_engine=fsdp",
        "ref=frozen",
    }
    for replacement in (text for keys in REMOVED_KEYS.values() for text in keys.values()):
        words = [word.strip(",.:();") for word in replacement.replace("=", " ").split()]
        dotted = [word for word in words if "." in word and word.partition(".")[0] in roots]
        assert all(word in KEYS for word in dotted), replacement


def test_key_below_a_removed_one_is_refused_with_it() -> None:
    assert str(describe_removed_key("trainer.logger.0")).startswith(
        "trainer.logger.0 was removed in 0.1; use: run.trackers."
    )


@pytest.mark.parametrize("block", ["", "teacher_model.", "teacher_models.math."])
def test_key_that_gave_a_teacher_its_own_devices_is_refused_with_the_pool(block: str) -> None:
    text = str(describe_removed_key(f"distillation.{block}enable_resource_pool"))
    assert "every teacher has its own resource pool, teachers.NAME.pool" in text


def test_every_key_of_a_removed_block_is_refused() -> None:
    assert "is in the config section reward_model of the older generation" in str(
        describe_removed_key("reward_model.megatron.seed")
    )


def test_old_key_of_the_worker_switch_names_the_new_one() -> None:
    text = str(describe_removed_key("trainer.use_legacy_worker_impl"))
    assert "use: use_legacy_worker_impl, at the top level." in text


@pytest.mark.parametrize("role", ["actor", "critic", "ref", "reward.model", "teachers.NAME"])
@pytest.mark.parametrize("old", RENAMED_ENGINE_KEYS)
def test_renamed_key_of_an_engine_has_its_new_name_in_every_role(role: str, old: str) -> None:
    assert f"{role}.engine.{old}" not in KEYS
    assert find_new_key(f"{role}.engine.{old}") in KEYS


def test_renamed_keys_do_not_exist_and_their_new_names_do() -> None:
    assert not RENAMED_KEYS.keys() & KEYS.keys()
    assert set(RENAMED_KEYS.values()) <= KEYS.keys()


def test_message_of_a_renamed_key_has_its_renamed_value() -> None:
    text = str(describe_renamed_key("preference.loss"))
    assert "to preference.name; sigmoid is now dpo, and its other values mean the same." in text


def test_message_of_a_controllers_key_says_what_replaces_null() -> None:
    text = str(describe_renamed_key("algorithm.kl_target"))
    assert "to algorithm.kl_controller.target; its values mean the same." in text
    assert "Instead of null, leave out algorithm.kl_controller." in text


@pytest.mark.parametrize(
    ("settings", "renamed"),
    [
        (
            {"algorithm.kl_target": None, "algorithm.kl_horizon": 10_000},
            {"algorithm.kl_controller": None},
        ),
        (
            {"algorithm.entropy_target": 0.5, "algorithm.entropy_coef_step": 0.01},
            {
                "algorithm.entropy_controller.target": 0.5,
                "algorithm.entropy_controller.coef_step": 0.01,
            },
        ),
        ({"algorithm.kl_controller": None}, {"algorithm.kl_controller": None}),
    ],
)
def test_controller_without_a_target_is_no_controller(
    settings: dict[str, object], renamed: dict[str, object]
) -> None:
    assert rename_settings(settings) == renamed


@pytest.mark.parametrize(
    ("settings", "renamed"),
    [
        ({"level": "sequence", "proximal": "old", "truncate_at": 3.0}, ("sequence", 3.0)),
        ({"level": "none", "proximal": "old", "truncate_at": 2.0}, ("mask", None)),
        ({"level": "none", "proximal": "rollout"}, ("rollout_ratio", None)),
    ],
)
def test_level_and_denominator_of_0_1_are_the_name_of_a_correction(
    settings: dict[str, object], renamed: tuple[str, float | None]
) -> None:
    block = "algorithm.rollout_correction"
    result = rename_settings({f"{block}.{key}": value for key, value in settings.items()})
    name, truncate_at = renamed
    bound = {} if truncate_at is None else {f"{block}.truncate_at": truncate_at}
    assert result == {f"{block}.name": name} | bound
    assert rename_settings({block: None}) == {block: None}


def test_source_of_0_1_keeps_the_settings_that_its_kind_has() -> None:
    settings = {"data.train.kind": "arithmetic", "data.train.max_rows": 8, "data.train.paths": []}
    files = {"data.eval_sets.a.kind": "datasets", "data.eval_sets.a.paths": ["name"]}
    assert rename_settings({**settings, **files}) == {
        "data.train.name": "arithmetic",
        "data.train.max_rows": 8,
        "data.eval_sets.a.name": "datasets",
        "data.eval_sets.a.path": "name",
    }


def test_settings_of_a_reward_model_of_0_1_are_those_of_its_own_block() -> None:
    settings = {"task": "rm", "preference.loss": "sigmoid", "preference.label_smoothing": 0.1}
    assert rename_settings(settings | {"preference.center_coef": 0.01}) == {
        "task": "rm",
        "preference.name": "dpo",
        "rm.label_smoothing": 0.1,
        "rm.center_coef": 0.01,
    }


def test_existing_keys_are_not_refused() -> None:
    assert [key for key in KEYS if describe_removed_key(key) or describe_renamed_key(key)] == []
