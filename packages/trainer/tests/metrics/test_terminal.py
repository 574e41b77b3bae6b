import io
import math

from rich.console import Console

from temper_trainer.metrics.terminal import Dashboard, format_step_line
from temper_trainer.progress import advance_progress, track_progress


def render_lines(dashboard: Dashboard) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as shown:
        console.print(dashboard.render())
    return [line.split() for line in shown.get().splitlines()]


def make_dashboard(*, start: int = 0) -> Dashboard:
    return Dashboard(
        Console(file=io.StringIO(), force_terminal=True), phase="rl", total=9, start=start
    )


def test_each_active_operation_of_a_step_has_a_bar() -> None:
    dashboard = make_dashboard(start=2)
    with track_progress("rollout"), track_progress("completions", total=1024):
        advance_progress("completions", 1000)
        steps, rollout, completions = render_lines(dashboard)
    assert (steps[0], "2/9" in steps) == ("rl", True)
    assert "rollout" in rollout
    assert "completions" in completions
    assert "1,000/1,024" in completions
    dashboard.advance(1)
    (steps,) = [line for line in render_lines(dashboard) if line]
    assert "3/9" in steps


def test_table_shows_last_value_running_mean_and_first_value() -> None:
    dashboard = make_dashboard()
    for reward in (0.25, 0.5, 0.75):
        dashboard.update({"reward/mean": reward, "batch/tokens": 9.0})
    heading, reward, *_ = render_lines(dashboard)
    assert heading == ["now", "mean", "of", "20", "first"]
    assert reward == ["reward", "0.750", "0.500", "0.250"]


def test_line_of_an_rl_step_shows_the_main_metrics_in_order() -> None:
    metrics = {
        "time/step_s": 1.204,
        "reward/mean": 0.4531,
        "actor/loss": -0.01234,
        "actor/grad_norm": 1.2345,
        "policy/ratio_mean": 1.0,
        "rollout/tokens_per_s": 5123.4,
        "rollout/truncated_fraction": 0.5,
    }
    line = format_step_line(12, metrics, phase="rl", total=220)
    assert (
        line
        == "rl  12/220  reward 0.453  loss -0.0123  grad 1.234  ratio 1.0000  tokens/s 5.1k  s 1.20"
    )


def test_line_shows_non_finite_values() -> None:
    assert (
        format_step_line(
            1, {"actor/loss": math.nan, "actor/grad_norm": math.inf}, phase="sft", total=None
        )
        == "sft 1  loss nan  grad inf"
    )


def test_line_of_an_evaluation_shows_its_rewards() -> None:
    line = format_step_line(
        0, {"eval/greedy/reward": 0.512, "eval/sampled/reward": 0.4}, phase="eval", total=None
    )
    assert line == "eval 0  greedy 0.512  sampled 0.400"
