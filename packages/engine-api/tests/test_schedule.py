"""Test learning rates against values worked out by hand, and bounds of all schedules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.schedule import compute_learning_rate
from temper_engine_api.specs import ScheduleSpec

SCHEDULES = st.builds(
    lambda kind, warmup, more, floor: (
        ScheduleSpec(warmup_steps=warmup)
        if kind == "constant"
        else ScheduleSpec(
            kind=kind,
            warmup_steps=warmup,
            total_steps=warmup + more,
            decay_steps=(more + 1) // 2 if kind == "wsd" else None,
            min_lr_ratio=floor,
        )
    ),
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(0, 20),
    st.integers(1, 50),
    st.floats(0, 1),
)


@given(spec=SCHEDULES)
def test_the_first_step_never_has_rate_zero(spec: ScheduleSpec) -> None:
    assert compute_learning_rate(0, peak=1e-3, spec=spec) > 0


@given(spec=SCHEDULES, step=st.integers(0, 200))
def test_the_rate_stays_between_the_floor_and_the_peak(spec: ScheduleSpec, step: int) -> None:
    rate = compute_learning_rate(step, peak=2.0, spec=spec)
    floor = 0.0 if step < spec.warmup_steps else 2.0 * spec.min_lr_ratio
    assert floor - 1e-12 <= rate <= 2.0 + 1e-12


def test_warmup_is_linear_and_reaches_the_peak() -> None:
    rates = [
        compute_learning_rate(step, peak=8.0, spec=ScheduleSpec(warmup_steps=4))
        for step in range(6)
    ]
    assert rates == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize(
    ("kind", "middle"),
    [
        ("linear", 1.0 * 0.2 + 0.8 * 0.75),
        ("cosine", 0.2 + 0.8 * 0.5 * (1 + 0.7071067811865476)),
    ],  # cos(pi / 4)
)
def test_decay_starts_at_the_peak_and_ends_at_the_floor(kind: str, middle: float) -> None:
    spec = ScheduleSpec(kind=kind, warmup_steps=2, total_steps=10, min_lr_ratio=0.2)  # type: ignore[arg-type]
    assert compute_learning_rate(2, peak=1.0, spec=spec) == 1.0
    assert compute_learning_rate(4, peak=1.0, spec=spec) == pytest.approx(
        middle
    )  # a quarter of the way
    assert compute_learning_rate(10, peak=1.0, spec=spec) == pytest.approx(0.2)
    assert compute_learning_rate(1000, peak=1.0, spec=spec) == pytest.approx(0.2)


def test_wsd_stays_at_the_peak_until_its_decay() -> None:
    spec = ScheduleSpec(kind="wsd", warmup_steps=2, total_steps=10, decay_steps=4, min_lr_ratio=0.2)
    # Two steps of warmup, the peak until step 6, then from 1 to 0.2 in four steps of 0.2.
    rates = [compute_learning_rate(step, peak=1.0, spec=spec) for step in range(12)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


@pytest.mark.parametrize(
    ("ratio", "steps"), [(0.1, 3), (0.05, 2), (0.0, 0)]
)  # of 30: 3, 1.5 rounded up, none
def test_warmup_ratio_is_a_fraction_of_all_steps(ratio: float, steps: int) -> None:
    by_ratio = ScheduleSpec(kind="cosine", warmup_ratio=ratio, total_steps=30)
    by_steps = ScheduleSpec(kind="cosine", warmup_steps=steps, total_steps=30)
    assert [compute_learning_rate(n, peak=1.0, spec=by_ratio) for n in range(31)] == [
        compute_learning_rate(n, peak=1.0, spec=by_steps) for n in range(31)
    ]


def test_constant_rate_may_have_a_warmup_ratio() -> None:
    spec = ScheduleSpec(warmup_ratio=0.5, total_steps=4)
    assert [compute_learning_rate(step, peak=2.0, spec=spec) for step in range(4)] == [
        1.0,
        2.0,
        2.0,
        2.0,
    ]
