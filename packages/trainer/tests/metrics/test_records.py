import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from temper_trainer.metrics.records import Row, from_json, read_rows, set_aside, to_json


def write(path: Path, rows: list[tuple[int, str]]) -> None:
    path.write_text(
        "".join(
            to_json(Row(step=step, phase=phase, time_s=0.0, values={"x": step})) + "\n"
            for step, phase in rows
        )
    )


def steps(path: Path) -> list[tuple[int, str]]:
    return [(row.step, row.phase) for row in read_rows(path)]


@given(
    st.dictionaries(
        st.text(min_size=1).filter(
            lambda name: name not in ("step", "phase", "time_s", "not_finite")
        ),
        st.floats(),
    )
)
def test_any_values_survive_a_line(values: dict[str, float]) -> None:
    line = to_json(Row(step=3, phase="rl", time_s=1.5, values=values))
    assert "\n" not in line
    assert repr(from_json(line)) == repr(
        Row(step=3, phase="rl", time_s=1.5, values=values)
    )  # repr: NaN is not equal to itself


def test_what_is_not_finite_is_null_and_named() -> None:
    line = to_json(
        Row(step=1, phase="rl", time_s=0.0, values={"a": math.nan, "b": -math.inf, "c": 1.0})
    )
    assert (
        line
        == '{"step": 1, "phase": "rl", "time_s": 0.0, "a": null, "b": null, "c": 1.0, "not_finite": {"a": "nan", "b": "-inf"}}'
    )


def test_later_steps_are_moved_and_the_warm_start_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        [
            (1, "warm_start"),
            (9, "warm_start"),
            (0, "eval"),
            (1, "rl"),
            (2, "rl"),
            (2, "eval"),
            (3, "rl"),
        ],
    )
    assert set_aside(path, after_step=1) == 3
    assert steps(path) == [(1, "warm_start"), (9, "warm_start"), (0, "eval"), (1, "rl")]
    assert steps(tmp_path / "metrics.superseded-1.jsonl") == [(2, "rl"), (2, "eval"), (3, "rl")]


def test_rows_of_one_phase_can_be_moved_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [(1, "warm_start"), (2, "warm_start"), (5, "rl")])
    assert set_aside(path, after_step=1, phase="warm_start") == 1
    assert steps(path) == [(1, "warm_start"), (5, "rl")]


def test_an_earlier_set_aside_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        write(path, [(1, "rl"), (2, "rl")])
        set_aside(path, after_step=1)
    assert (
        steps(tmp_path / "metrics.superseded-1.jsonl")
        == steps(tmp_path / "metrics.superseded-2.jsonl")
        == [(2, "rl")]
    )


def test_nothing_to_move_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert set_aside(path, after_step=0) == 0
    write(path, [(1, "rl")])
    assert set_aside(path, after_step=1) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_that_a_crash_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [(1, "rl")])
    path.write_text(path.read_text() + '{"step": 2, "pha')
    assert steps(path) == [(1, "rl")]
    set_aside(path, after_step=5)
    assert path.read_text().count("\n") == 1
    assert path.read_text().endswith("\n")
