import pytest

from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.config.removed_keys import REPLACEMENTS, describe_removed_key
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.schema import collect_keys

KEYS = collect_keys(TrainerConfig, engine_class=FSDPConfig)


def test_removed_keys_do_not_exist() -> None:
    assert not REPLACEMENTS.keys() & KEYS.keys()


def test_every_replacement_names_existing_keys() -> None:
    roots = {key.partition(".")[0] for key in KEYS} | {
        "algorithm=NAME",
        "model_engine=fsdp",
        "ref=frozen",
    }
    for replacement in REPLACEMENTS.values():
        words = [word.strip(",.:();") for word in replacement.replace("=", " ").split()]
        dotted = [word for word in words if "." in word and word.partition(".")[0] in roots]
        assert all(word in KEYS for word in dotted), replacement


@pytest.mark.parametrize(
    ("key", "replacement"),
    [
        ("trainer.logger.0", "run.trackers"),
        ("critic.optim.lr", "critic.engine.optimizer.lr"),
        ("critic.optim.betas", "critic.engine.optimizer and critic.engine.schedule"),
        ("trainer.use_legacy_worker_impl", "use_legacy_worker_impl, at the top level"),
    ],
)
def test_key_is_refused_with_its_own_replacement_or_that_of_its_block(
    key: str, replacement: str
) -> None:
    assert str(describe_removed_key(key)).startswith(
        f"{key} is a key of the older generation; use: {replacement}. "
    )


@pytest.mark.parametrize("block", ["", "teacher_model.", "teacher_models.math."])
def test_key_that_gave_a_teacher_its_own_devices_is_refused_with_the_pool(block: str) -> None:
    text = str(describe_removed_key(f"distillation.{block}enable_resource_pool"))
    assert "has its own teachers.NAME.pool" in text


def test_every_key_of_a_removed_block_is_refused() -> None:
    assert "is in the config section reward_model of the older generation" in str(
        describe_removed_key("reward_model.megatron.seed")
    )


def test_key_model_names_the_key_of_a_models_path() -> None:
    text = str(describe_removed_key("model"))
    assert text.startswith("there is no key model: to name a model, set actor.engine.model.path. ")


def test_message_installs_temper_migrate_from_a_clone() -> None:
    text = str(describe_removed_key("trainer.logger"))
    assert "To install it: pip install ./packages/legacy-shim in a clone of Temper" in text


def test_existing_keys_are_not_refused() -> None:
    assert [key for key in KEYS if describe_removed_key(key)] == []
