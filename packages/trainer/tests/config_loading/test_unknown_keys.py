from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load

from .conftest import RL


def refusal(*overrides: str, config_dir: Path | None = None, config_name: str = "temper") -> str:
    with pytest.raises(ConfigError) as caught:
        load(
            [*RL, *overrides],
            config_dir=None if config_dir is None else str(config_dir),
            config_name=config_name,
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("batching.max_token", "batching.max_tokens"),
        ("run.total_step", "run.total_steps"),
        ("algorithm.kl_loss_coeff", "algorithm.kl_loss_coef"),
        ("actor.engine.optim.lr", "actor.engine.optimizer.lr"),
        ("sampling.temprature", "sampling.temperature"),
        ("runn.seed", "run.seed"),
        ("critic.engine.optim.lr", "critic.engine.optimizer.lr or "),
        ("lr", "actor.engine.optimizer.lr or "),
        # Each of these names is right in another block.
        ("actor.engine.model.paths", "actor.engine.model.path?"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    text = refusal("critic=value_model", f"{key}=1")
    assert text.startswith(f"there is no key {key}: did you mean {nearest}")
    assert text.endswith("(set by: command line)")


def test_right_name_in_the_wrong_block_names_the_right_blocks() -> None:
    assert "did you mean sampling.temperature or run.eval_sampling.temperature" in refusal(
        "algorithm.temperature=1"
    )


def test_key_of_another_engine_names_that_engine(install: Callable[[str, str], None]) -> None:
    install(
        "[temper.engines]\nthird = third_party_engine:Engine\n"
        "[temper.engine_configs]\nthird = third_party_engine:Config\n",
        "from dataclasses import dataclass\n"
        "from temper_engine_api.specs import EngineConfig\n"
        "@dataclass(frozen=True, slots=True, kw_only=True)\n"
        "class Config(EngineConfig):\n"
        "    num_lanes: int = 1\n",
    )
    assert refusal("critic=value_model", "critic.engine.num_lanes=2") == (
        "critic.engine.num_lanes is a setting of the engine third, but model_engine is fsdp: "
        "remove it, or set model_engine=third. (set by: command line)"
    )
    assert refusal("critic=value_model", "critic.engine.num_lane=2").startswith("there is no key")


def test_key_that_resembles_nothing_points_to_the_help() -> None:
    assert (
        refusal("foo.bar=1")
        == "there is no key foo.bar: `temper-train --help` lists them all. (set by: command line)"
    )


def test_every_unknown_key_has_its_line() -> None:
    assert len(refusal("foo=1", "run.sed=1", "trainer.x=1").splitlines()) == 3


def test_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [temper, _self_]\nrun:\n  sed: 3\n")
    text = refusal(config_dir=tmp_path, config_name="mine")
    assert text == (
        f"there is no key run.sed: did you mean run.seed? (set by: file {tmp_path / 'mine.yaml'})"
    )


def test_unknown_keys_of_an_old_configuration_are_not_all_listed(tmp_path: Path) -> None:
    keys = "".join(f"  key_{i}: 1\n" for i in range(30))
    (tmp_path / "old.yaml").write_text(f"defaults: [temper, _self_]\ntrainer:\n{keys}")
    lines = refusal(config_dir=tmp_path, config_name="old").splitlines()
    assert (len(lines), lines[-1]) == (26, "and 5 more.")  # 25 shown, 30 - 25 = 5


def test_file_that_another_version_wrote_is_refused_with_a_sentence(tmp_path: Path) -> None:
    text = "# digest 1\ndefaults: [temper, _self_]\nalgorithm:\n  gamma: 0.9\n"
    (tmp_path / "config.yaml").write_text(text)
    first, last = refusal(config_dir=tmp_path, config_name="config").splitlines()
    assert first.startswith("there is no key algorithm.gamma: did you mean ")
    assert last == (
        "Another version of Temper wrote this config.yaml, with keys that are gone: start from "
        "your own overrides or file."
    )


def test_removed_key_names_its_replacement() -> None:
    text = refusal("actor_rollout_ref.rollout.n=5")
    assert text.startswith(
        "actor_rollout_ref.rollout.n is a key of the older generation; use: algorithm.group_size. "
    )
    assert "`temper-migrate explain actor_rollout_ref.rollout.n`" in text


def test_keys_of_a_mapping_are_free() -> None:
    model = load(
        ["experiment=quickstart", "actor.engine.model.architecture.rope_theta=5000.0"]
    ).config.actor.engine.model
    assert model.architecture["rope_theta"] == 5000.0


def test_critic_settings_without_a_critic_name_the_group() -> None:
    text = refusal("critic.num_workers=2")
    assert text == (
        "critic.num_workers has no effect without a critic: add critic=value_model (or "
        "algorithm=ppo), or remove it."
    )


def test_reference_settings_without_a_reference_name_the_group() -> None:
    assert "ref.engine.device has no effect without a ref: add ref=frozen" in refusal(
        "ref.engine.device=cpu"
    )


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("teachers.math.colocated", "shares devices"),
        ("teachers.math.colocate", "shares devices"),
        ("teachers.math.sleep", "sleeps"),
        ("teachers.math.sleep_level", "sleeps"),
        ("teachers.math.enable_sleep_mode", "sleeps"),
        ("teachers.math.vllm.enable_sleep_mode", "sleeps"),
        ("teachers.math.free_cache_engine", "sleeps"),
    ],
)
def test_colocated_or_sleeping_teacher_is_refused_with_the_reason(key: str, kind: str) -> None:
    text = refusal(f"{key}=true")
    assert text.startswith(
        f"{key} is for a teacher that {kind}, which is not supported: teachers are queried in "
        "every step"
    )
    assert "they have their own resource pool (teachers.NAME.pool) and never sleep" in text
    assert text.endswith("(set by: command line)")


def test_misspelled_key_of_a_teacher_names_the_nearest() -> None:
    assert "did you mean teachers.NAME.num_replicas" in refusal("teachers.math.num_replica=2")
