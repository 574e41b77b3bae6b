"""Table and plot of evaluations, from the names of logged metrics."""

from temper_trainer.metrics.evaluation_plots import draw_evaluations
from temper_trainer.metrics.evaluation_report import list_evaluations, tabulate_evaluations
from temper_trainer.metrics.run_files import Row

VALUES = {
    "eval/greedy/reward": 0.5,
    "eval/greedy/failed": 2.0,
    "eval/math500/sampled/reward": 0.25,
    "eval/math500/sampled/reward_ci95": 0.125,
    "eval/math500/sampled/pass_at_4": 0.75,
    "eval/math500/sampled/algebra/reward": 1.0,
    "eval/dropped": 3.0,
}


def row(step: int, phase: str = "eval") -> Row:
    return Row(step=step, phase=phase, time_s=0.0, values=VALUES)


def test_table_has_a_line_for_each_step_set_sampling_and_category() -> None:
    heading, lines = tabulate_evaluations(list_evaluations([row(7, "rl"), row(8)]))
    assert heading == (
        "after step",
        "set",
        "kind",
        "category",
        "reward (mean@k)",
        "failed",
        "pass@4",
    )
    assert lines == [
        (8, "data.eval", "greedy", "", "0.500", "2", ""),
        (8, "math500", "sampled", "", "0.250 ± 0.125", "", "0.750"),
        (8, "math500", "sampled", "algebra", "1.000", "", ""),
    ]


def test_plot_names_the_mean_of_several_completions() -> None:
    greedy, sampled, _ = list_evaluations([row(8)])
    assert greedy.format_label("reward") == "greedy reward"
    assert sampled.format_label("reward") == "math500 sampled mean@4"
    assert sampled.format_label("pass_at_4") == "math500 sampled pass@4"


def test_held_out_pairs_and_demonstrations_have_lines_and_a_plot() -> None:
    values = {
        "eval/preference/accuracy": 0.75,
        "eval/preference/accuracy_ci95": 0.25,
        "eval/preference/loss": 0.5,
        "eval/more/sft/nll": 1.5,
    }
    evaluations = list_evaluations([Row(step=2, phase="eval", time_s=0.0, values=values)])
    heading, lines = tabulate_evaluations(evaluations)
    assert heading == ("after step", "set", "kind", "accuracy", "loss", "nll")
    assert lines == [
        (2, "data.eval", "preference", "0.750 ± 0.250", "0.500", ""),
        (2, "more", "sft", "", "", "1.500"),
    ]
    assert draw_evaluations(evaluations) is not None


def test_column_of_categories_is_left_out_without_categories() -> None:
    values = {"eval/greedy/reward": 0.5}
    rows = [Row(step=1, phase="eval", time_s=0.0, values=values)]
    heading, lines = tabulate_evaluations(list_evaluations(rows))
    assert heading == ("after step", "set", "kind", "reward")
    assert lines == [(1, "data.eval", "greedy", "0.500")]


def test_evaluations_of_one_and_of_several_steps_are_drawn() -> None:
    one = draw_evaluations(list_evaluations([row(0)]))
    several = draw_evaluations(list_evaluations([row(0), row(8)]))
    assert one is not None
    assert several is not None
    assert one.startswith(b"\x89PNG")
    assert one != several


def test_nothing_is_drawn_without_evaluations() -> None:
    assert draw_evaluations(list_evaluations([row(1, "rl")])) is None
    nan = Row(step=0, phase="eval", time_s=0.0, values={"eval/greedy/reward": float("nan")})
    assert draw_evaluations(list_evaluations([nan])) is None
