"""Learning rates by hand, and what no schedule may do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.schedule import learning_rate
from temper_engine_api.specs import ScheduleSpec

SCHEDULES = st.builds(
    lambda kind, warmup, more, floor: (
        ScheduleSpec(warmup_steps=warmup)
        if kind == "constant"
        else ScheduleSpec(kind=kind, warmup_steps=warmup, total_steps=warmup + more, min_lr_ratio=floor)
    ),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 50),
    st.floats(0, 1),
)


@given(spec=SCHEDULES)
def test_the_first_step_never_has_rate_zero(spec: ScheduleSpec) -> None:
    assert learning_rate(0, peak=1e-3, spec=spec) > 0


@given(spec=SCHEDULES, step=st.integers(0, 200))
def test_the_rate_stays_between_the_floor_and_the_peak(spec: ScheduleSpec, step: int) -> None:
    rate = learning_rate(step, peak=2.0, spec=spec)
    floor = 0.0 if step < spec.warmup_steps else 2.0 * spec.min_lr_ratio
    assert floor - 1e-12 <= rate <= 2.0 + 1e-12


def test_warm_up_is_linear_and_reaches_the_peak() -> None:
    rates = [learning_rate(step, peak=8.0, spec=ScheduleSpec(warmup_steps=4)) for step in range(6)]
    assert rates == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize(
    ("kind", "middle"),
    [("linear", 1.0 * 0.2 + 0.8 * 0.75), ("cosine", 0.2 + 0.8 * 0.5 * (1 + 0.7071067811865476))],  # cos(pi / 4)
)
def test_decay_starts_at_the_peak_and_ends_at_the_floor(kind: str, middle: float) -> None:
    spec = ScheduleSpec(kind=kind, warmup_steps=2, total_steps=10, min_lr_ratio=0.2)  # type: ignore[arg-type]
    assert learning_rate(2, peak=1.0, spec=spec) == 1.0
    assert learning_rate(4, peak=1.0, spec=spec) == pytest.approx(middle)  # a quarter of the way
    assert learning_rate(10, peak=1.0, spec=spec) == pytest.approx(0.2)
    assert learning_rate(1000, peak=1.0, spec=spec) == pytest.approx(0.2)
