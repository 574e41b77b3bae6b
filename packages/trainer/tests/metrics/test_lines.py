import math

from temper_trainer.metrics.lines import step_line


def test_line_of_an_rl_step_holds_the_telling_numbers_in_order() -> None:
    metrics = {
        "time/step_s": 1.204,
        "reward/mean": 0.4531,
        "actor/loss": -0.01234,
        "actor/grad_norm": 1.2345,
        "policy/ratio_mean": 1.0,
        "rollout/tokens_per_s": 5123.4,
        "rollout/cut_share": 0.5,
    }
    line = step_line(12, metrics, phase="rl", total=220)
    assert (
        line
        == "rl  12/220  reward 0.453  loss -0.0123  grad 1.234  ratio 1.0000  tokens/s 5.1k  s 1.20"
    )


def test_line_shows_what_is_not_finite() -> None:
    assert (
        step_line(1, {"actor/loss": math.nan, "actor/grad_norm": math.inf}, phase="sft", total=None)
        == "sft 1  loss nan  grad inf"
    )


def test_line_of_an_evaluation_holds_accuracies() -> None:
    line = step_line(
        0, {"eval/greedy/reward": 0.512, "eval/sampled/reward": 0.4}, phase="eval", total=None
    )
    assert line == "eval 0  greedy 0.512  sampled 0.400"
