"""The result of a run in one sentence."""

from temper_trainer.metrics.headline import describe_result
from temper_trainer.metrics.run_files import Row


def make_row(step: int, phase: str, **values: float) -> Row:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return Row(step=step, phase=phase, time_s=0.0, values=named)


def test_run_without_evaluations_has_the_mean_reward_of_its_first_and_last_steps() -> None:
    rows = [make_row(step, "rl", reward__mean=step / 40) for step in range(1, 41)]
    # Means of steps 1 to 10 and 31 to 40: 5.5 / 40 and 35.5 / 40.
    assert describe_result(rows) == "reward/mean 0.138 -> 0.887 (+0.750)"


def test_supervised_run_has_its_loss_and_a_warm_start_does_not_count() -> None:
    rows = [make_row(1, "warm_start", sft__nll=9.0), make_row(2, "warm_start", sft__nll=8.0)]
    assert describe_result(rows) == ""
    rows += [make_row(1, "sft", sft__nll=3.0), make_row(2, "sft", sft__nll=2.5)]
    assert describe_result(rows) == "sft/nll 3.000 -> 2.500 (-0.500)"


def test_every_evaluation_set_is_named_and_categories_are_left_out() -> None:
    first = make_row(
        0,
        "eval",
        eval__greedy__reward=0.5,
        eval__math__greedy__reward=0.25,
        eval__greedy__easy__reward=1.0,
    )
    last = make_row(9, "eval", eval__greedy__reward=0.75, eval__math__greedy__reward=float("nan"))
    assert describe_result([first, last]) == "greedy 0.500 -> 0.750 (+0.250), math greedy 0.250"


def test_supervised_run_has_its_result_on_held_out_data() -> None:
    rows = [make_row(1, "dpo", preference__accuracy=0.5), make_row(2, "dpo", actor__loss=0.5)]
    for step, accuracy in ((0, 0.5), (2, 0.875)):
        rows.append(make_row(step, "eval", eval__preference__accuracy=accuracy))
    assert describe_result(rows) == "held-out accuracy 0.500 -> 0.875 (+0.375)"


def test_result_of_a_run_without_gradients_says_so() -> None:
    rows = [
        make_row(step, "rl", reward__mean=reward, actor__grad_norm=0.0)
        for step, reward in ((1, 0.25), (2, 0.5))
    ]
    gain = "reward/mean 0.250 -> 0.500 (+0.250)"
    assert describe_result(rows) == f"{gain}, but the gradient was 0 in every step"
    rows.append(make_row(3, "rl", reward__mean=0.5, actor__grad_norm=0.125))
    assert describe_result(rows) == gain
