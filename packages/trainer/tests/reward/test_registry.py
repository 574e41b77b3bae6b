"""Reward functions by name and by import path."""

import sys
from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config.reward import RewardConfig
from temper_trainer.reward.builtin_rewards import gsm8k_strict
from temper_trainer.reward.registry import register_reward, resolve_reward
from temper_trainer.types import Prompt


def test_registered_name_and_import_path_give_the_same_function() -> None:
    assert resolve_reward(RewardConfig(function="gsm8k_strict")) is gsm8k_strict
    assert (
        resolve_reward(RewardConfig(function="temper_trainer.reward.builtin_rewards:gsm8k_strict"))
        is gsm8k_strict
    )


def test_function_can_be_registered_once_under_a_name() -> None:
    @register_reward("length")
    def length(prompt: Prompt, completion_text: str, *, scale: float = 1.0) -> float:
        return scale * len(completion_text)

    reward = resolve_reward(RewardConfig(function="length", arguments={"scale": 2.0}))
    assert reward(Prompt(prompt_id=0, text="", tokens=(1,), answer=""), "abc", scale=2.0) == 6.0
    with pytest.raises(ConfigError, match="is already a reward named 'length'"):
        register_reward("length")(gsm8k_strict)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("gsm8k_stric", "did you mean 'gsm8k_strict'"),
        ("my_rewards.score", "an import path has a colon, my_rewards:score. Use one of"),
        ("quality", "use one of .*exact_match, gsm8k_flexible"),
        (
            "no_such_module:f",
            (
                "names module 'no_such_module', which cannot be imported .*: add the folder that "
                "contains it to PYTHONPATH"
            ),
        ),
        ("temper_trainer.reward.builtin_rewards:gsm8k_stict", "Did you mean 'gsm8k_strict'"),
        ("temper_trainer.reward.builtin_rewards:MARK", "has no function or class of that name"),
    ],
)
def test_unknown_reward_is_refused_with_the_nearest_name(function: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve_reward(RewardConfig(function=function))


def test_module_that_raises_while_it_is_imported_is_refused_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward_that_raises.py").write_text("SCALE = 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=(
            r"module 'reward_that_raises', .* \(ZeroDivisionError: division by zero\): fix "
            r"the module"
        ),
    ):
        resolve_reward(RewardConfig(function="reward_that_raises:f"))


@pytest.mark.parametrize(
    ("name", "source", "error"),
    [
        ("reward_that_exits", "raise SystemExit(0)\n", "SystemExit: 0"),
        (
            "reward_that_parses_arguments",
            "import argparse\nargparse.ArgumentParser().parse_args(['seed=1'])\n",
            "SystemExit: 2",
        ),
    ],
)
def test_module_that_exits_while_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str, error: str
) -> None:
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"module '{name}', .* \({error}\): fix the module"):
        resolve_reward(RewardConfig(function=f"{name}:f"))


def test_arguments_that_the_function_does_not_take_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="unexpected keyword argument 'tolerance'"):
        resolve_reward(RewardConfig(arguments={"tolerance": 0.1}))


def test_async_function_is_refused_before_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_that_wait.py").write_text("async def f(prompt, text): return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"rewards_that_wait:f is an async function.* write def"):
        resolve_reward(RewardConfig(function="rewards_that_wait:f"))


def test_missing_math_verify_library_is_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"needs the math-verify library: run pip install '\./packages/trainer\[math\]'",
    ):
        resolve_reward(RewardConfig(function="math_verify"))


def test_missing_migration_module_names_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "temper_legacy_shim", None)
    monkeypatch.delitem(sys.modules, "temper_legacy_shim.old_rewards", raising=False)
    with pytest.raises(
        ConfigError, match=r"cannot be imported .*: run pip install \./packages/legacy-shim in a"
    ):
        resolve_reward(RewardConfig(function="temper_legacy_shim.old_rewards:default"))
