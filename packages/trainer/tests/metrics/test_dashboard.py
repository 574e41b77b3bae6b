"""What a terminal shows while a phase runs."""

import io

from rich.console import Console

from temper_trainer.metrics.dashboard import Dashboard
from temper_trainer.progress import advance_progress, track_progress


def lines_of(dashboard: Dashboard) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as shown:
        console.print(dashboard.render())
    return [line.split() for line in shown.get().splitlines()]


def make(*, start: int = 0) -> Dashboard:
    return Dashboard(
        Console(file=io.StringIO(), force_terminal=True), phase="rl", total=9, start=start
    )


def test_each_part_of_a_step_that_is_under_way_has_a_bar_and_none_when_it_is_over() -> None:
    dashboard = make(start=2)
    with track_progress("rollout"), track_progress("completions", total=1024):
        advance_progress("completions", 1000)
        steps, rollout, completions = lines_of(dashboard)
    assert (steps[0], "2/9" in steps) == ("rl", True)
    assert "rollout" in rollout
    assert "completions" in completions
    assert "1,000/1,024" in completions
    dashboard.advance(1)
    (steps,) = [line for line in lines_of(dashboard) if line]
    assert "3/9" in steps


def test_the_table_shows_a_metric_now_its_running_mean_and_where_it_began() -> None:
    dashboard = make()
    for reward in (0.25, 0.5, 0.75):
        dashboard.update({"reward/mean": reward, "batch/tokens": 9.0})
    heading, reward, *_ = lines_of(dashboard)
    assert heading == ["now", "mean", "of", "20", "first"]
    assert reward == ["reward", "0.750", "0.500", "0.250"]
