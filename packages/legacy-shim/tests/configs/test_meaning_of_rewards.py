"""Effective rewards before and after, and the evaluation of finished completions.

See ``test_meaning``.

The rules are from verl's own code at the tags: ``trainer/ppo/reward.py``, ``trainer/main_eval.py``,
``workers/reward_manager``, ``experimental/reward_loop`` and ``recipe/dapo/main_dapo.py``.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip(
    "hydra", reason="needs Hydra, which temper-trainer brings, to compose the old side with"
)


from temper_legacy_shim.configs import translate

from .conftest import BASE, rules_found, translated, values
from .test_meaning import ABSENT, Old, comparable, is_dapo, read_both, release

Row = Mapping[str, object]

MODEL = ("reward_model.enable=True", "reward_model.model.path=/models/rm")
FUNCTION = ("custom_reward_function.path=mine.py",)
OVERLONG = (
    "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.len=512",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
)
BUFFER = "reward.shaping.overlong.buffer_tokens"
PENALTY = "reward.shaping.overlong.penalty"


def first(old: Old, *keys: str) -> object:
    """Return the first value that is set."""
    return next((value for key in keys if (value := old(key)) is not None), None)


def expect_rewards(old: Old, row: Row) -> dict[str, object]:
    """Return what scored a completion, and what was subtracted from the score."""
    # Since v0.7.1 the old keys are empty, and copied over the new ones if they are given.
    has_model = bool(first(old, "reward_model.enable", "reward.reward_model.enable"))
    # Workers of the model scored a batch before any function could; the later loop asks a
    # function first.
    is_loop = release(row) >= (0, 7, 1) or bool(old("reward_model.use_reward_loop"))
    file = first(old, "custom_reward_function.path", "reward.custom_reward_function.path")
    scored_by_model = has_model and not (file and is_loop)
    if scored_by_model:
        path = first(old, "reward_model.model.path", "reward.reward_model.model_path")
        expected = {
            "reward.function": "temper_legacy_shim.old_reward_models:by_model",
            "reward.arguments.path": path,
        }
    elif file:
        name = first(old, "custom_reward_function.name", "reward.custom_reward_function.name")
        expected = {
            "reward.function": "temper_legacy_shim.old_rewards:from_file",
            "reward.arguments.path": file,
            "reward.arguments.name": name or "compute_score",
        }
    else:
        expected = {"reward.function": "temper_legacy_shim.old_rewards:by_data_source"}
    return expected | expect_penalty(old, row, scored_by_model=scored_by_model)


def expect_penalty(old: Old, row: Row, *, scored_by_model: bool) -> dict[str, object]:
    """Return the penalty of long completions: the manager dapo alone subtracted it.

    It did so from the scores of functions. The recipes of DAPO gave it ``overlong_buffer``; the
    reward loop, which scores first where it is on, has a manager that reads ``reward_kwargs``.
    """
    manager = first(
        old, "reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name"
    )
    blocks = ("reward_model.reward_kwargs.overlong_buffer_cfg",)
    if is_dapo(row) and not (release(row) >= (0, 7, 1) or old("reward_model.use_reward_loop")):
        blocks = ("reward_model.overlong_buffer",)
    elif release(row) >= (0, 7, 1):
        blocks = (*blocks, "reward.reward_kwargs.overlong_buffer_cfg")
    block = next((name for name in blocks if old(name) is not None), blocks[0])
    if manager != "dapo" or scored_by_model or not old(f"{block}.enable"):
        return {BUFFER: ABSENT, PENALTY: ABSENT}
    return {BUFFER: old(f"{block}.len"), PENALTY: float(str(old(f"{block}.penalty_factor")))}


def wrong_of(facts: Path, row: Row) -> dict[str, tuple[object, object]] | None:
    """Return keys with the expected and the new value where they differ.

    None where a person has to decide first.
    """
    values_of_row = read_both(facts, row)
    if values_of_row is None:
        return None
    old, new = values_of_row
    return {
        key: (value, new.get(key, ABSENT))
        for key, value in expect_rewards(old, row).items()
        if new.get(key, ABSENT) != value
    }


def launch(tag: str, *overrides: str, entry: str = "verl.trainer.main_ppo") -> Row:
    """Return a row as those of the recorded invocations."""
    return {
        "tag": tag,
        "path": "",
        "entry": entry,
        "config_name": None,
        "overrides": [*BASE, *overrides],
    }


@pytest.mark.parametrize(
    ("tag", "overrides"),
    [
        ("v0.4.1", MODEL),
        ("v0.6.1", (*MODEL, *FUNCTION)),
        ("v0.6.1", (*MODEL, "reward_model.reward_manager=dapo", *OVERLONG)),
        ("v0.6.1", (*FUNCTION, "reward_model.reward_manager=dapo", *OVERLONG)),
        ("v0.7.0", ("reward_model.reward_manager=dapo", *OVERLONG)),
        ("v0.7.0", OVERLONG),
        ("v0.7.0", ("reward_model.reward_manager=prime", *OVERLONG)),
        (
            "v0.6.1",
            (
                "reward_model.reward_manager=dapo",
                "+reward_model.overlong_buffer.enable=True",
                "+reward_model.overlong_buffer.len=512",
                "+reward_model.overlong_buffer.penalty_factor=1.0",
            ),
        ),
    ],
)
def test_combinations_of_model_function_and_penalty_mean_the_same(
    tag: str, overrides: tuple[str, ...], facts: Path
) -> None:
    assert wrong_of(facts, launch(tag, *overrides)) == {}


def test_model_that_a_function_asks_through_the_loop_stays_a_question(facts: Path) -> None:
    for overrides in ((*MODEL, *FUNCTION, "reward_model.use_reward_loop=True"),):
        assert wrong_of(facts, launch("v0.7.0", *overrides)) is None


@pytest.mark.parametrize("version", ["v0.8.0", "v0.9.1"])
def test_program_of_dapo_outside_of_verl_still_has_its_reward_manager(version: str) -> None:
    given = ("enable=True", "len=512", "penalty_factor=1.0")
    on = tuple(f"reward.reward_kwargs.overlong_buffer_cfg.{item}" for item in given)
    result = translated(version, *on, entry="recipe.dapo.main_dapo")
    assert values(result)[BUFFER] == 512


def test_penalty_without_effect_is_reported() -> None:
    given = ("enable=True", "len=512", "penalty_factor=1.0")
    on = tuple(f"reward_model.overlong_buffer.{item}" for item in given)
    result = translated("v0.7.0", *on, entry="recipe.dapo.main_dapo")
    assert "overlong" in rules_found(result, "hazard")
    assert BUFFER not in values(result)
    before = translated("v0.6.1", *on, entry="recipe.dapo.main_dapo")
    assert "overlong" not in rules_found(before, "hazard")
    assert values(before)[BUFFER] == 512


def test_function_that_a_reward_model_preceded_is_named() -> None:
    translation = translated("v0.6.1", *MODEL, *FUNCTION)
    assert values(translation)["reward.function"] == "temper_legacy_shim.old_reward_models:by_model"
    assert "reward-model" in rules_found(translation, "hazard")
    assert any("mine.py" in finding.message for finding in translation.findings)


def results_of(facts: Path, rows: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    """Return the differences of each run that needs no decision."""
    results = {
        f"{row['tag']} {row['path']} {number}": wrong_of(facts, row)
        for number, row in enumerate(rows)
    }
    return {name: dict(result) for name, result in results.items() if result is not None}


def test_rewards_of_a_sample_mean_the_same(
    facts: Path, invocations: list[dict[str, object]]
) -> None:
    rows = [row for row in invocations if comparable(row)]
    # All runs take minutes to compose: a twelfth of those that set a reward, and some others.
    chosen = [row for row in rows if "reward" in str(row["overrides"])][::12] + rows[::80]
    results = results_of(facts, chosen)
    assert {name: result for name, result in results.items() if result} == {}
    assert len(results) >= 30


# Nightly: compares all runs. The test above takes a sample every day.
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_rewards_of_every_run_mean_the_same(
    facts: Path, invocations: list[dict[str, object]]
) -> None:
    results = results_of(facts, [row for row in invocations if comparable(row)])
    assert {name: result for name, result in results.items() if result} == {}
    assert len(results) >= 500


def test_evaluation_of_finished_completions_is_always_a_question(
    invocations: list[dict[str, object]],
) -> None:
    rows = [row for row in invocations if str(row["entry"]).endswith("main_eval")]
    for row in rows:
        translation = translate(
            row["overrides"],
            entry=str(row["entry"]),
            config_name=row["config_name"],
            version=str(row["tag"]),
        )  # type: ignore[arg-type]
        assert "evaluation" in rules_found(translation, "person")
        assert values(translation) == {}
    assert len(rows) == 10
