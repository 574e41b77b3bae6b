import math
from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.figure import Figure

from temper_trainer.metrics.curves import (
    PANELS,
    _arrange_panels,
    _draw_panel,
    _points,
    _running_mean,
    draw_curves,
)
from temper_trainer.metrics.run_files import Row, keep_latest, to_json


def row(step: int, phase: str, **values: float) -> Row:
    return Row(
        step=step,
        phase=phase,
        time_s=0.0,
        values={name.replace("__", "/"): value for name, value in values.items()},
    )


def write(directory: Path, rows: list[Row]) -> None:
    (directory / "metrics.jsonl").write_text("".join(to_json(row) + "\n" for row in rows))


def test_curves_of_a_run_with_warm_start_and_evaluations_are_drawn(tmp_path: Path) -> None:
    rows = [
        row(step, "warm_start", actor__loss=3 / step, actor__grad_norm=50 / step)
        for step in range(1, 60)
    ]
    rows += [row(0, "eval", eval__greedy__reward=0.5), row(40, "eval", eval__greedy__reward=0.9)]
    rows += [
        row(step, "rl", reward__mean=step / 40, actor__loss=0.0, time__step_s=1.0)
        for step in range(1, 41)
    ]
    write(tmp_path, rows)
    assert draw_curves(tmp_path) == tmp_path / "curves.png"
    pixels = image.imread(tmp_path / "curves.png")
    # Rows: reward; the two of the warm start; loss and seconds: 3 of 2.5 inches, 0.5 for the title,
    # 2 panels of 5.6, 130 dots per inch.
    assert pixels.shape[:2] == (int((2.5 * 3 + 0.5) * 130), int(5.6 * 2 * 130))
    assert (
        len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[2])[::7].round(2).tolist()})
        > 50
    )


def test_logarithmic_axis_has_plain_numbers() -> None:
    axes = Figure().add_subplot()
    panel = next(panel for panel in PANELS if panel.is_log)
    values = (0.2, 0.5, 3.0)
    rows = [row(i, panel.phase, actor__grad_norm=value) for i, value in enumerate(values)]
    _draw_panel(axes, panel, rows=rows)
    labels = [tick.get_text() for tick in axes.get_yticklabels(which="both")]
    lowest, highest = axes.get_ylim()
    shown = [float(label) for label in labels if label]
    assert sum(lowest <= number <= highest for number in shown) >= 3


def test_axis_of_ratios_has_their_values_and_no_offset() -> None:
    axes = Figure().add_subplot()
    panel = next(panel for panel in PANELS if "policy/ratio_mean" in panel.metrics)
    rows = [row(i, panel.phase, policy__ratio_mean=1 + i / 10_000) for i in range(5)]
    _draw_panel(axes, panel, rows=rows)
    axes.figure.draw_without_rendering()
    shown = [float(tick.get_text()) for tick in axes.get_yticklabels()]
    assert shown == pytest.approx([1.0] * len(shown), abs=1e-3)


@pytest.mark.parametrize(("phase", "kind"), [("dpo", "reward"), ("rm", "score")])
def test_curves_of_a_run_on_pairs_are_drawn(tmp_path: Path, phase: str, kind: str) -> None:
    pairs = {f"preference__{name}_{kind}": 0.5 for name in ("chosen", "rejected")}
    values = {"actor__loss": 0.7, "actor__grad_norm": 2.0, "preference__accuracy": 0.5, **pairs}
    write(tmp_path, [row(step, phase, **values) for step in range(1, 4)])
    assert draw_curves(tmp_path) == tmp_path / "curves.png"
    height, width = image.imread(tmp_path / "curves.png").shape[:2]
    assert (height, width) == (int((2.5 * 2 + 0.5) * 130), int(5.6 * 2 * 130))


def test_evaluations_of_a_supervised_run_have_a_panel(tmp_path: Path) -> None:
    rows = [row(step, "sft", actor__loss=1.0, actor__grad_norm=1.0) for step in (1, 2)]
    evaluations = [row(step, "eval", eval__greedy__reward=step / 4) for step in (0, 2)]
    for num_evaluations, num_lines in ((1, 1), (2, 2)):
        write(tmp_path, rows + evaluations[:num_evaluations])
        draw_curves(tmp_path)
        height = image.imread(tmp_path / "curves.png").shape[0]
        assert height == int((2.5 * num_lines + 0.5) * 130)


def test_evaluations_on_held_out_pairs_are_points_of_existing_panels(tmp_path: Path) -> None:
    rows = [
        row(step, "dpo", preference__accuracy=0.5, actor__loss=0.7, actor__grad_norm=1.0)
        for step in (1, 2)
    ]
    write(tmp_path, rows)
    draw_curves(tmp_path)
    without = image.imread(tmp_path / "curves.png")
    held_out = {"eval__preference__accuracy": 0.9, "eval__preference__loss": 0.6}
    write(tmp_path, [*rows, row(0, "eval", **held_out), row(2, "eval", **held_out)])
    draw_curves(tmp_path)
    drawn = image.imread(tmp_path / "curves.png")
    assert drawn.shape == without.shape
    assert (drawn != without).any()


def test_panel_of_divergences_is_left_out_if_all_are_zero(tmp_path: Path) -> None:
    for divergence, num_lines in ((0.0, 1), (0.1, 2)):
        rows = [
            row(step, "rl", actor__loss=1.0, time__step_s=1.0, mismatch__kl=divergence)
            for step in (1, 2)
        ]
        write(tmp_path, rows)
        draw_curves(tmp_path)
        height = image.imread(tmp_path / "curves.png").shape[0]
        assert height == int((2.5 * num_lines + 0.5) * 130)


def test_no_image_is_drawn_without_metrics(tmp_path: Path) -> None:
    assert draw_curves(tmp_path) is None
    write(tmp_path, [row(1, "rl", data__epoch=0.0)])
    assert draw_curves(tmp_path) is None
    assert not (tmp_path / "curves.png").exists()


def test_single_step_with_nan_is_drawn(tmp_path: Path) -> None:
    write(tmp_path, [row(1, "sft", actor__loss=2.0, actor__grad_norm=math.nan)])
    assert draw_curves(tmp_path) is not None


def test_points_are_finite_and_sorted_by_step() -> None:
    rows = [
        row(3, "rl", x=3.0),
        row(1, "rl", x=1.0),
        row(2, "rl", x=math.inf),
        row(1, "eval", x=9.0),
        row(4, "rl", y=0.0),
    ]
    assert _points(rows, "rl", "x") == ([1, 3], [1.0, 3.0])


def test_last_row_counts_if_a_step_was_logged_twice() -> None:
    assert keep_latest([row(1, "rl", x=1.0), row(1, "eval", x=2.0), row(1, "rl", x=3.0)]) == [
        row(1, "rl", x=3.0),
        row(1, "eval", x=2.0),
    ]


def test_running_mean_is_centered() -> None:
    # window 3: (0+3)/2, (0+3+6)/3, (3+6+0)/3, (6+0)/2
    assert _running_mean([0.0, 3.0, 6.0, 0.0], window=3) == [1.5, 3.0, 3.0, 3.0]


def test_wide_panel_takes_a_full_row() -> None:
    wide = next(panel for panel in PANELS if panel.is_wide)
    narrow = next(panel for panel in PANELS if not panel.is_wide)
    assert _arrange_panels([narrow, wide, narrow, narrow]) == [(0, 0), (1, 0), (2, 0), (2, 1)]
