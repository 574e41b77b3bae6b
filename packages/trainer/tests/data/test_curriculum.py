"""Epochs from easy to hard rows."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper_trainer.config.data import ArithmeticSource, JsonlSource
from temper_trainer.data.rows import DataError
from temper_trainer.data.sources import load_rows
from temper_trainer.data.streams import (
    Curriculum,
    InMemoryStream,
    MixedStream,
    measure_difficulty,
    sort_by_difficulty,
)
from temper_trainer.types import Prompt

WORDS = ("ccc", "a", "bb", "d", "ee", "f")
"""Their difficulty is their length."""


def open_stream(
    *, shuffle: bool = True, shuffled_fraction: float = 0.0, seed: int = 0
) -> InMemoryStream[str]:
    return InMemoryStream(
        WORDS,
        seed=seed,
        shuffle=shuffle,
        curriculum=Curriculum(
            get_difficulty=lambda word: float(len(word)), shuffled_fraction=shuffled_fraction
        ),
    )


def test_each_epoch_goes_from_easy_to_hard_and_the_seed_orders_equal_rows() -> None:
    stream = open_stream()
    epochs = [stream.take(6) for _ in range(20)]
    for epoch in epochs:
        assert [len(word) for word in epoch] == [1, 1, 1, 2, 2, 3]
    assert len({tuple(epoch) for epoch in epochs}) > 3, "of 3! * 2! orders of equal rows"
    assert open_stream().take(120) == [word for epoch in epochs for word in epoch]
    assert open_stream(seed=1).take(120) != [word for epoch in epochs for word in epoch]


def test_without_shuffle_equal_rows_keep_the_order_of_the_source() -> None:
    assert open_stream(shuffle=False).take(12) == ["a", "d", "f", "bb", "ee", "ccc"] * 2


@given(
    num_items=st.integers(1, 40),
    shuffled_fraction=st.floats(0, 1),
    seed=st.integers(),
    epoch=st.integers(0, 3),
)
def test_only_the_given_fraction_of_the_rows_leaves_its_position(
    num_items: int, shuffled_fraction: float, seed: int, epoch: int
) -> None:
    difficulties = [float(-i) for i in range(num_items)]
    order = sort_by_difficulty(
        range(num_items),
        difficulties,
        seed=seed,
        epoch=epoch,
        shuffled_fraction=shuffled_fraction,
    )
    assert sorted(order) == list(range(num_items))
    num_moved = sum(a != b for a, b in zip(order, reversed(range(num_items)), strict=True))
    assert num_moved <= round(shuffled_fraction * num_items)


def test_fraction_of_one_is_a_random_order() -> None:
    # The mean position of the easiest of 6 rows is (0 + ... + 5) / 6 = 2.5; over 4000 epochs its
    # standard error is sqrt(35 / 12 / 4000) = 0.027.
    positions = [
        sort_by_difficulty(
            range(6), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], seed=3, epoch=epoch, shuffled_fraction=1.0
        ).index(0)
        for epoch in range(4000)
    ]
    assert sum(positions) / len(positions) == pytest.approx(2.5, abs=0.1)


@given(before=st.integers(0, 20), after=st.integers(0, 20))
def test_resuming_at_any_cursor_continues_exactly(before: int, after: int) -> None:
    uninterrupted = open_stream(shuffled_fraction=0.5)
    uninterrupted.take(before)
    resumed = InMemoryStream(
        WORDS,
        seed=0,
        shuffle=True,
        curriculum=Curriculum(get_difficulty=lambda word: float(len(word)), shuffled_fraction=0.5),
        cursor=uninterrupted.cursor,
    )
    assert resumed.take(after) == uninterrupted.take(after)


def test_each_weighted_source_has_an_order_of_its_own() -> None:
    stream = MixedStream(
        {"sorted": WORDS, "plain": ("x", "yyyy")},
        weights={"sorted": 3.0, "plain": 1.0},
        seed=0,
        shuffle=False,
        curricula={"sorted": Curriculum(get_difficulty=lambda word: float(len(word)))},
    )
    taken = stream.take(8)
    assert [word for word in taken if word in WORDS] == ["a", "d", "f", "bb", "ee", "ccc"]
    assert [word for word in taken if word not in WORDS] == ["x", "yyyy"]


def test_difficulty_is_read_from_the_named_field(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"question": "a", "answer": "b", "stats": {"level": 2}}\n'
        '{"question": "c", "answer": "d", "stats": {"level": -0.5}}\n'
    )
    source = JsonlSource(paths=(str(path),), difficulty_key="stats.level")
    assert [row.difficulty for row in load_rows(source)] == [2.0, -0.5]
    assert [row.difficulty for row in load_rows(replace(source, difficulty_key=None))] == [None] * 2


@pytest.mark.parametrize("level", ['"hard"', "true", "null", "NaN", "[1]"])
def test_difficulty_that_is_no_number_is_refused_with_its_row(tmp_path: Path, level: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"question": "a", "answer": "b", "level": 1}\n'
        f'{{"question": "a", "answer": "b", "level": {level}}}\n'
    )
    source = JsonlSource(paths=(str(path),), difficulty_key="level")
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl:2: field 'level', which difficulty_key names, must be a finite",
    ):
        load_rows(source)


def test_generated_problems_are_as_difficult_as_they_have_operations() -> None:
    source = ArithmeticSource(max_rows=30, difficulty_key="operations")
    assert {row.difficulty for row in load_rows(source)} == {1.0, 2.0}


def test_mean_difficulty_leaves_out_prompts_without_one() -> None:
    prompts = [
        Prompt(prompt_id=i, text="", tokens=(1,), answer="", difficulty=difficulty)
        for i, difficulty in enumerate((1.0, None, 4.0))
    ]
    assert measure_difficulty(prompts) == {"data/difficulty": 2.5}
    assert measure_difficulty(prompts[1:2]) == {}
