"""Reward functions of the old signature under the new one."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("temper_trainer", reason="needs temper-trainer")

from temper_legacy_shim.errors import MissingExtraError, UsageError
from temper_legacy_shim.old_rewards import by_data_source, from_file
from temper_trainer.config.reward import RewardConfig
from temper_trainer.reward.registry import resolve_reward
from temper_trainer.types import Prompt

FILE = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return {"score": scale * (solution_str == ground_truth) + extra_info["bonus"], "acc": 1}

def plain(data_source, solution_str, ground_truth, extra_info=None):
    return data_source == "sums"

def text(data_source, solution_str, ground_truth, extra_info=None):
    return "good"

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "reward.py"
    path.write_text(FILE)
    return str(path)


def prompt(answer: str = "#### 4", **extra: object) -> Prompt:
    return Prompt(prompt_id=0, text="2 + 2?", tokens=(1,), answer=answer, extra=extra)


def test_the_entry_score_counts_and_arguments_are_handed_on(file: str) -> None:
    row = prompt("yes", data_source="sums", extra_info={"bonus": 0.25})
    assert from_file(row, "yes", path=file, scale=2.0) == 2.25
    assert from_file(row, "no", path=file) == 0.25


@pytest.mark.parametrize(
    ("name", "message"), [("text", "returned 'good'"), ("later", "is asynchronous")]
)
@pytest.mark.filterwarnings("ignore:coroutine 'later' was never awaited:RuntimeWarning")
def test_what_is_no_number_is_an_error(file: str, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_file(prompt(data_source="sums", extra_info={}), "yes", path=file, name=name)


def test_a_missing_file_or_function_is_named(file: str) -> None:
    with pytest.raises(UsageError, match="no file here"):
        from_file(prompt(), "yes", path="nowhere.py")
    with pytest.raises(UsageError, match="has no function score"):
        from_file(prompt(), "yes", path=file, name="score")


def test_a_truth_value_is_a_number(file: str) -> None:
    assert from_file(prompt(data_source="sums"), "yes", path=file, name="plain") == 1.0


def test_gsm8k_is_scored_by_the_number_after_the_mark() -> None:
    row = prompt(data_source="openai/gsm8k")
    assert by_data_source(row, "so it is\n#### 4") == 1.0
    assert by_data_source(row, "#### 5 no, #### 4 it is") == 1.0
    assert (
        by_data_source(prompt("1,234".replace(",", ""), data_source="openai/gsm8k"), "#### 1,234")
        == 1.0
    )
    assert by_data_source(row, "so it is 4") == 0.0
    assert by_data_source(row, "#### 4" + "." * 300) == 0.0


def test_a_source_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="'my_own'"):
        by_data_source(prompt(data_source="my_own"), "4")


def test_the_trainer_resolves_them_by_the_names_that_translations_write(file: str) -> None:
    function = resolve_reward(
        RewardConfig(function="temper_legacy_shim.old_rewards:from_file", arguments={"path": file})
    )
    assert function(prompt("yes", extra_info={"bonus": 0.0}), "yes", path=file) == 1.0
    resolve_reward(RewardConfig(function="temper_legacy_shim.old_rewards:by_data_source"))


@pytest.mark.parametrize("source", ["lighteval/MATH", "numina_olympiads", "math_dapo"])
def test_mathematics_without_math_verify_names_the_extra(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        MissingExtraError,
        match=rf"'{source}' is scored by math-verify.*pip install './packages/trainer\[math\]'",
    ):
        by_data_source(prompt("4", data_source=source), "4")
