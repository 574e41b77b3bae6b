import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper_trainer.metrics.run_files import (
    Row,
    from_json,
    read_rows,
    read_settings,
    read_starts,
    supersede_rows,
    to_json,
)


def write(path: Path, rows: list[tuple[int, str]]) -> None:
    path.write_text(
        "".join(
            to_json(Row(step=step, phase=phase, time_s=0.0, values={"x": step})) + "\n"
            for step, phase in rows
        )
    )


def read_steps(path: Path) -> list[tuple[int, str]]:
    return [(row.step, row.phase) for row in read_rows(path)]


@given(
    st.dictionaries(
        st.text(min_size=1).filter(
            lambda name: name not in ("step", "phase", "time_s", "not_finite")
        ),
        st.floats(),
    )
)
def test_any_values_survive_a_round_trip(values: dict[str, float]) -> None:
    line = to_json(Row(step=3, phase="rl", time_s=1.5, values=values))
    assert "\n" not in line
    assert repr(from_json(line)) == repr(
        Row(step=3, phase="rl", time_s=1.5, values=values)
    )  # repr: NaN is not equal to itself


def test_non_finite_values_are_null_and_listed() -> None:
    line = to_json(
        Row(step=1, phase="rl", time_s=0.0, values={"a": math.nan, "b": -math.inf, "c": 1.0})
    )
    assert (
        line == '{"step": 1, "phase": "rl", "time_s": 0.0, "a": null, "b": null, "c": 1.0, '
        '"not_finite": {"a": "nan", "b": "-inf"}}'
    )


def test_rows_of_later_steps_are_moved_except_those_of_the_warm_start(tmp_path: Path) -> None:
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
    assert supersede_rows(path, after_step=1) == 3
    assert read_steps(path) == [(1, "warm_start"), (9, "warm_start"), (0, "eval"), (1, "rl")]
    assert read_steps(tmp_path / "metrics.superseded-1.jsonl") == [
        (2, "rl"),
        (2, "eval"),
        (3, "rl"),
    ]


def test_rows_of_a_single_phase_can_be_moved(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [(1, "warm_start"), (2, "warm_start"), (5, "rl")])
    assert supersede_rows(path, after_step=1, phase="warm_start") == 1
    assert read_steps(path) == [(1, "warm_start"), (5, "rl")]


def test_superseded_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        write(path, [(1, "rl"), (2, "rl")])
        supersede_rows(path, after_step=1)
    assert (
        read_steps(tmp_path / "metrics.superseded-1.jsonl")
        == read_steps(tmp_path / "metrics.superseded-2.jsonl")
        == [(2, "rl")]
    )


def test_no_file_is_created_if_no_row_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert supersede_rows(path, after_step=0) == 0
    write(path, [(1, "rl")])
    assert supersede_rows(path, after_step=1) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [(1, "rl")])
    path.write_text(path.read_text() + '{"step": 2, "pha')
    assert read_steps(path) == [(1, "rl")]
    supersede_rows(path, after_step=5)
    assert path.read_text().count("\n") == 1
    assert path.read_text().endswith("\n")


@pytest.mark.parametrize("text", ["[" * 5000, "a: [", "a: 2026-13-45", "\0", "[1]", ""])
def test_damaged_settings_are_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    (tmp_path / "config.yaml").write_text(text)
    assert read_settings(tmp_path) == {}
    assert f"{tmp_path / 'config.yaml'} cannot be read as settings: it is ignored" in caplog.text


def test_damaged_start_is_left_out(tmp_path: Path) -> None:
    start = {"command": "temper-train", "time_s": 1.0}
    damaged = ["[" * 100_000, "1", '{"command": "a", "time_r": 1.0}', '{"command": 1, "time_s": 1}']
    lines = [*damaged, json.dumps(start)]
    (tmp_path / "starts.jsonl").write_text("\n".join(lines) + "\n")
    assert read_starts(tmp_path) == [start]


def test_row_with_any_flipped_bit_is_read_or_left_out(tmp_path: Path) -> None:
    row = Row(step=3, phase="rl", time_s=1.5, values={"loss": 0.25, "kl": math.nan})
    line = to_json(row).encode()
    path = tmp_path / "metrics.jsonl"
    for bit in range(8 * len(line)):
        damaged = bytearray(line)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged + b"\n" + line + b"\n")
        *others, last = read_rows(path)
        assert to_json(last) == to_json(row)
        for other in others:
            to_json(other)  # all its values are numbers
