"""Scoring a batch: failures are counted, in threads and in worker processes alike."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from packages.trainer.tests.process_groups_for_tests import check_group_ids, needs_waitid
from packages.trainer.tests.reward.functions_for_tests import follow_text
from temper_engine_api.errors import ConfigError
from temper_trainer import redaction
from temper_trainer.config.reward import RewardConfig, RewardFunctionConfig
from temper_trainer.reward import reward_processes
from temper_trainer.reward.builtin_rewards import gsm8k_strict
from temper_trainer.reward.registry import register_reward
from temper_trainer.reward.reward_calls import Item, RewardCall
from temper_trainer.reward.scoring import Scorer
from temper_trainer.reward.scoring_round import RewardFailureError
from temper_trainer.types import Prompt

PATIENT = RewardConfig(
    function="functions_for_tests:follow_text", timeout_s=1.0, max_failure_fraction=1.0
)
UNHURRIED = replace(PATIENT, timeout_s=60.0)
"""Settings of calls that do not hang: a machine that stalls for a second changes no result."""

OTHER = RewardFunctionConfig(function="gsm8k_strict")


def items(*texts: str) -> list[Item]:
    return [
        (Prompt(prompt_id=i, text="?", tokens=(1,), answer="#### 2", location=f"file:{i}"), text)
        for i, text in enumerate(texts)
    ]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned processes take sys.path from this one."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


@pytest.fixture(params=[0, 2], ids=["threads", "processes"], scope="module")
def scorer(request: pytest.FixtureRequest) -> Iterator[Scorer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
        with Scorer(
            replace(PATIENT, num_workers=request.param, arguments={"bonus": 0.5})
        ) as opened:
            yield opened


@pytest.mark.parametrize("value", [1e308, -1e39, 10**400], ids=["float", "negative", "int"])
def test_reward_that_float32_cannot_hold_is_a_failure(value: float) -> None:
    (item,) = items("text")
    outcome = RewardCall(function=lambda *_: value, arguments={})(item)
    assert outcome.reward is None
    assert "but a reward is a finite number of at most 3.4e38 (prompt 0, file:0)" in outcome.message


def test_rewards_come_in_the_order_of_the_items(scorer: Scorer) -> None:
    scores = scorer.score(items(*(str(i) for i in range(100))))
    assert [score.reward for score in scores] == [i + 0.5 for i in range(100)]
    assert not any(scorer.metrics().values())


def test_failures_are_counted_by_kind_and_other_rewards_are_kept(
    scorer: Scorer,
) -> None:
    scores = scorer.score(items("1", "raise", "2", "nan", "infinity", "word", "hang", "3"))
    assert [score.reward for score in scores] == [1.5, None, 2.5, None, None, None, None, 3.5]
    failures = [score.failure or "" for score in scores]
    assert failures[1] == "exception: RuntimeError: no reward for #### 2 (prompt 1, file:1)"
    assert failures[3].startswith("not_finite: returned nan (float)")
    assert failures[5].startswith("not_finite: returned 'one' (str)")
    assert failures[6] == "timeout: took longer than reward.timeout_s = 1.0 (prompt 6, file:6)"
    assert scorer.metrics() == {
        "reward/exception": 1.0,
        "reward/timeout": 1.0,
        "reward/not_finite": 3.0,
    }


def test_hanging_call_delays_only_itself(scorer: Scorer) -> None:
    begin = time.monotonic()
    scores = scorer.score(items("hang", *["1"] * 50))
    assert [score.reward for score in scores] == [None, *[1.5] * 50]
    assert (
        time.monotonic() - begin < 30
    )  # one second, and the start of a new process on a busy machine


def test_late_result_of_an_uninterruptible_call_is_a_timeout(
    scorer: Scorer,
) -> None:
    scores = scorer.score(items("seize", "1", "seize"))  # 1.5 seconds each, and 1.0 is the limit
    assert [score.reward for score in scores] == [None, 1.5, None]
    assert (
        scores[0].failure == "timeout: took longer than reward.timeout_s = 1.0 (prompt 0, file:0)"
    )
    assert scorer.metrics()["reward/timeout"] == 2.0


def test_function_that_kills_its_process_is_counted() -> None:
    with Scorer(replace(PATIENT, num_workers=1)) as scorer:
        scores = scorer.score(items("1", "die", "2"))
        assert [score.reward for score in scores] == [1.0, None, 2.0]
        assert (
            scores[1].failure
            == "exception: the worker process died with exit code 7 (prompt 1, file:1)"
        )


def test_worker_killed_between_batches_is_replaced() -> None:
    with Scorer(
        replace(PATIENT, num_workers=1, function="functions_for_tests:process_id")
    ) as scorer:
        (first,) = scorer.score(items("1"))
        assert first.reward is not None
        assert first.reward != os.getpid()
        os.kill(int(first.reward), signal.SIGKILL)
        again, other = scorer.score(items("1", "2"))
        assert again.reward == other.reward
        assert again.reward not in (None, first.reward)
        assert not any(scorer.metrics().values())


def test_call_whose_process_is_killed_twice_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    with Scorer(replace(PATIENT, num_workers=1)) as scorer:
        scores = scorer.score(items("1", "kill", "2"))
    assert [score.reward for score in scores] == [1.0, None, 2.0]
    expected = "exception: the worker process died with exit code -9 (prompt 1, file:1)"
    assert scores[1].failure == expected
    first, second = caplog.messages
    assert first.startswith("replaced reward process ")
    assert first.endswith(": prompt 1 (file:1) died with exit code -9 and is retried")
    assert second.endswith(": prompt 1 (file:1) died with exit code -9, which counts as failed")


DRIVER = """
import pathlib, sys
sys.path[:0] = sys.argv[1:]
from temper_trainer.config.reward import RewardConfig
from temper_trainer.reward.scoring import Scorer
from temper_trainer.types import Prompt
prompt = Prompt(prompt_id=0, text="?", tokens=(1,), answer="", location="")
if __name__ == "__main__":
    with Scorer(RewardConfig(function="functions_for_tests:run_program", num_workers=1)) as scorer:
        scorer.score([(prompt, "program")])
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc (Linux)")
@pytest.mark.parametrize("is_stopped", [False, True], ids=["hangs", "stopped"])
def test_busy_worker_and_its_program_do_not_outlive_a_killed_driver(
    tmp_path: Path, is_stopped: bool
) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, str(tmp_path / "driver.py"), str(Path(__file__).parent)]
    with subprocess.Popen(command, cwd=tmp_path) as driver:
        while not (tmp_path / "program").exists():
            assert driver.poll() is None
            time.sleep(0.05)
        workers = [
            pid
            for pid in children(driver.pid)
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(workers) == 1
        if is_stopped:
            os.kill(workers[0], signal.SIGSTOP)
        driver.kill()
    assert find_left([*workers, int((tmp_path / "program").read_text())]) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc (Linux)")
def test_program_that_a_call_has_started_ends_with_its_time_limit(tmp_path: Path) -> None:
    config = replace(
        PATIENT, num_workers=1, timeout_s=15.0, function="functions_for_tests:run_program"
    )
    with Scorer(config) as scorer:
        (score,) = scorer.score(items(str(tmp_path / "program")))
        assert score.failure is not None
        assert score.failure.startswith("timeout")
        assert find_left([int((tmp_path / "program").read_text())]) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc (Linux)")
def test_program_that_a_hanging_call_has_started_ends_when_its_thread_is_given_up(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            with Scorer(replace(PATIENT, function="functions_for_tests:run_program")) as scorer:
                (score,) = scorer.score(items(str(tmp_path / "program")))
            assert score.failure is not None
            assert score.failure.startswith("timeout")
            assert find_left([int((tmp_path / "program").read_text())]) == []
            assert other.poll() is None
        finally:
            other.kill()


@needs_waitid
@pytest.mark.parametrize("text", ["die", "hang"])
def test_group_of_a_worker_is_killed_once_and_before_its_id_is_free(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    killed = check_group_ids(monkeypatch, reward_processes)
    with Scorer(replace(PATIENT, num_workers=1)) as scorer:
        scores = scorer.score(items(text, "2"))
    assert [score.reward for score in scores] == [None, 2.0]
    assert len(killed) == len(set(killed)) == 2


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc (Linux)")
def test_worker_whose_watcher_does_not_start_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    before = set(children(os.getpid()))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with (
        pytest.raises(OSError, match="no more processes"),
        Scorer(replace(PATIENT, num_workers=1)),
    ):
        pass
    left = [
        pid
        for pid in set(children(os.getpid())) - before
        if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert left == []


def find_left(processes: list[int]) -> list[int]:
    """Return which processes have not ended after 10 s, and end them."""
    deadline = time.monotonic() + 10
    while (
        left := [each for each in processes if Path(f"/proc/{each}/exe").exists()]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    for each in left:
        os.kill(each, signal.SIGKILL)
    return left


def children(process: int) -> list[int]:
    return [
        int(pid)
        for path in Path(f"/proc/{process}/task").glob("*/children")
        for pid in path.read_text().split()
    ]


def test_more_failures_than_accepted_stop_the_run_with_the_first_traceback() -> None:
    with Scorer(replace(UNHURRIED, max_failure_fraction=0.25)) as scorer:
        assert [score.reward for score in scorer.score(items("1", "raise", "1", "1"))] == [
            1.0,
            None,
            1.0,
            1.0,
        ]
        with pytest.raises(
            RewardFailureError, match=r"2 of 4 calls .* failed \(1 exception, 1 not_finite\)"
        ) as caught:
            scorer.score(items("raise", "1", "nan", "1"))
        assert 'raise RuntimeError(f"no reward for {prompt.answer}")' in str(caught.value)
        assert scorer.metrics() == {
            "reward/exception": 1.0,
            "reward/timeout": 0.0,
            "reward/not_finite": 1.0,
        }


def test_traceback_of_a_failure_begins_in_the_function() -> None:
    (item,) = items("raise")
    trace = RewardCall(function=follow_text, arguments={})(item).trace
    assert trace.count('File "') == 1
    assert trace.endswith("RuntimeError: no reward for #### 2\n")


def test_bad_row_of_a_built_in_reward_has_a_message_without_traceback() -> None:
    prompt = Prompt(prompt_id=0, text="?", tokens=(1,), answer="two", location="file:0")
    outcome = RewardCall(function=gsm8k_strict, arguments={})((prompt, "two"))
    assert "'two', but must be a number" in outcome.message
    assert outcome.trace == ""


def test_log_messages_in_a_worker_process_hide_secrets(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "value-of-a-variable")
    monkeypatch.setattr(redaction, "_registered", {"value-of-a-setting"})
    config = replace(PATIENT, num_workers=1, function="functions_for_tests:log_text")
    with Scorer(config) as scorer:
        scorer.score(items("value-of-a-variable and value-of-a-setting"))
    printed = capfd.readouterr()
    assert "WARNING: called with <hidden> and <hidden>\n" in printed.err
    assert "called with <hidden> and <hidden>\n" in printed.out


@pytest.mark.parametrize(
    ("num_workers", "timeout_s"),
    [
        (0, 1.0),
        # Nightly: the same scheduler, but a worker process needs seconds to start on a busy host.
        pytest.param(1, 5.0, marks=pytest.mark.nightly),
    ],
)
def test_function_that_always_hangs_costs_less_than_three_timeouts(
    num_workers: int, timeout_s: float
) -> None:
    config = replace(
        PATIENT,
        function="functions_for_tests:hang",
        num_workers=num_workers,
        timeout_s=timeout_s,
        max_failure_fraction=0.05,
    )
    with Scorer(config) as scorer:
        begin = time.monotonic()
        # One call, and then as many at once as must fail to stop the run.
        message = r"4 of 64 calls of .*:hang failed \(4 timeout\); the last 60 were not made: more"
        with pytest.raises(RewardFailureError, match=message):
            scorer.score(items(*["1"] * 64))
        assert 2 * timeout_s <= time.monotonic() - begin < 3 * timeout_s


def test_function_that_hangs_after_a_slow_call_costs_three_timeouts() -> None:
    config = replace(
        PATIENT,
        function="functions_for_tests:hang_later",
        timeout_s=0.5,
        max_failure_fraction=0.1,
    )
    with Scorer(config) as scorer:
        begin = time.monotonic()
        # One call, then two at once, and then as many as must fail to stop the run.
        with pytest.raises(RewardFailureError, match=r"13 of 120 calls .* \(13 timeout\)"):
            scorer.score(items(*["1"] * 120))
        assert time.monotonic() - begin < 0.15 + 4 * config.timeout_s


def test_function_that_hangs_after_fast_calls_costs_three_timeouts() -> None:
    config = replace(PATIENT, timeout_s=0.5, max_failure_fraction=0.1)
    with Scorer(config) as scorer:
        begin = time.monotonic()
        # Two calls one by one, although more failures are accepted, and then 11 at once.
        with pytest.raises(RewardFailureError, match=r"13 of 120 calls .* \(13 timeout\)"):
            scorer.score(items(*["1"] * 60, *["hang"] * 60))
        assert time.monotonic() - begin < 4 * config.timeout_s


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batch_after_an_early_stop_gets_its_own_rewards(num_workers: int) -> None:
    with Scorer(replace(PATIENT, num_workers=num_workers, max_failure_fraction=0.5)) as scorer:
        with pytest.raises(RewardFailureError, match="5 of 8 calls"):
            scorer.score(items(*["hang"] * 5, "1", "2", "3"))
        assert [score.reward for score in scorer.score(items("4", "5"))] == [4.0, 5.0]


def test_slow_calls_after_hanging_ones_are_not_made_at_once() -> None:
    """Seven calls of 0.2 s at once would take 1.4 s, if each waited for the others."""
    config = replace(
        PATIENT, function="functions_for_tests:take_turns", max_failure_fraction=0.5, timeout_s=1.0
    )
    with Scorer(config) as scorer:
        scores = scorer.score(items("1", "hang", "hang", *["1"] * 13))
    assert [score.reward for score in scores] == [1.0, None, None, *[1.0] * 13]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_function_that_exits_is_an_exception_and_no_timeout(num_workers: int) -> None:
    config = replace(PATIENT, function="functions_for_tests:leave", num_workers=num_workers)
    with Scorer(config) as scorer:
        exited, interrupted = scorer.score(items("exit", "interrupt"))
    assert exited.failure == "exception: SystemExit: 3 (prompt 0, file:0)"
    assert interrupted.failure == "exception: KeyboardInterrupt (prompt 1, file:1)"


def test_first_timeout_of_a_batch_is_reported_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with Scorer(PATIENT) as scorer:
        scorer.score(items("1", "hang", "2", "hang"))
    (message,) = caplog.messages
    assert message == (
        "the reward of prompt 1 (file:1) took longer than reward.timeout_s = 1 s, which counts as "
        "failed; 1 of 4 calls are done"
    )


def test_no_items_give_no_scores(scorer: Scorer) -> None:
    assert scorer.score([]) == []


def test_batch_is_scored_by_one_thread() -> None:
    with Scorer(replace(PATIENT, function="functions_for_tests:thread_id")) as scorer:
        assert len({score.reward for score in scorer.score(items(*["1"] * 500))}) == 1


@pytest.mark.parametrize(
    ("is_waiting", "num_threads", "most"),
    [(True, None, 8), (True, 3, 3), (True, 1, 1), (False, None, 1)],
)
def test_calls_run_at_once_if_they_wait(
    is_waiting: bool, num_threads: int | None, most: int
) -> None:
    config = replace(
        UNHURRIED,
        function="functions_for_tests:count_running",
        arguments={"is_waiting": is_waiting},
        num_threads=num_threads,
    )
    with Scorer(config) as scorer:
        scores = scorer.score(items(*["1"] * (20 if most == 1 else 80)))
    assert max(score.reward or 0.0 for score in scores) == most


def test_calls_that_return_late_run_one_at_a_time() -> None:
    """A call of half the timeout may exceed it if what it waits for serves one at a time."""
    config = replace(PATIENT, function="functions_for_tests:take_turns", timeout_s=0.5)
    with Scorer(config) as scorer:
        assert [score.reward for score in scorer.score(items(*["1"] * 6))] == [1.0] * 6


def test_worker_processes_start_without_torch() -> None:
    with Scorer(
        replace(PATIENT, num_workers=1, function="functions_for_tests:has_torch")
    ) as scorer:
        assert scorer.score(items("1"))[0].reward == 0.0


def test_unpicklable_function_is_refused_with_workers() -> None:
    @register_reward("local_function")
    def local_function(prompt: Prompt, completion_text: str) -> float:
        return 0.0

    with (
        pytest.raises(ConfigError, match="cannot be sent to worker processes"),
        Scorer(RewardConfig(function="local_function", num_workers=1)),
    ):
        pass


@pytest.mark.parametrize("num_workers", [0, 1])
def test_math_verify_scores_a_right_answer_in_a_thread_and_in_a_process(num_workers: int) -> None:
    """Check that the library's own timeouts are off, which score 0 in a worker."""
    pytest.importorskip("math_verify", reason="needs the extra temper-trainer[math]")
    with Scorer(
        RewardConfig(function="math_verify", num_workers=num_workers, timeout_s=60.0)
    ) as scorer:
        assert [score.reward for score in scorer.score(items(r"\boxed{\frac{4}{2}}", "3"))] == [
            1.0,
            0.0,
        ]


def test_each_component_has_its_arguments_and_its_metrics() -> None:
    config = replace(
        UNHURRIED,
        functions={
            "low": RewardFunctionConfig(
                function="functions_for_tests:follow_text", arguments={"bonus": 0.5}
            )
        },
        components={"low": 2.0, "functions_for_tests:follow_text": 0.1},
    )
    with Scorer(config) as scorer:
        scores = scorer.score(items("1", "2", "raise"))
        metrics = scorer.metrics()
    assert [score.components for score in scores] == [(1.5, 1.0), (2.5, 2.0), ()]
    # 2 * 1.5 + 0.1 * 1 and 2 * 2.5 + 0.1 * 2
    assert [score.reward for score in scores] == [pytest.approx(3.1), pytest.approx(5.2), None]
    assert metrics == {
        "reward/exception": 1.0,
        "reward/timeout": 0.0,
        "reward/not_finite": 0.0,
        "reward/low/mean": 2.0,
        "reward/low/failed": 1.0,
        "reward/functions_for_tests_follow_text/mean": 1.5,
        "reward/functions_for_tests_follow_text/failed": 1.0,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"functions": {"exact_match": OTHER}}, "exact_match, which is a registered reward"),
        ({"functions": {"a": OTHER}, "sums": {"a": {"b": 1.0}}}, "'a' is in two of"),
        ({"functions": {"a b": OTHER}}, "has the name 'a b'"),
        ({"sums": {"a": {"b": 1.0}}, "components": {"a": 1.0}}, "a, which is a sum itself"),
        ({"sums": {"a": {}}}, "reward.sums.a is empty"),
        ({"components": {"a": 1.0}}, "reward.function is 'a', which is not a registered reward"),
    ],
)
def test_wrong_names_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scorer(replace(PATIENT, **changes))  # type: ignore[arg-type]


def test_each_prompt_is_scored_by_the_reward_that_it_selects() -> None:
    follow = "functions_for_tests:follow_text"
    bonus = RewardFunctionConfig(function=follow, arguments={"bonus": 0.5})
    config = replace(PATIENT, functions={"plus": bonus}, sums={"both": {follow: 1.0, "plus": 10.0}})
    names = ["", "plus", "both", "both"]
    selecting = [
        (replace(prompt, reward=name), text)
        for (prompt, text), name in zip(items("1", "1", "2", "raise"), names, strict=True)
    ]
    with Scorer(config, selected=names) as scorer:
        scores = scorer.score(selecting)
        metrics = scorer.metrics()
    assert [score.reward for score in scores] == [1.0, 1.5, 2 + 10 * 2.5, None]
    assert [score.components for score in scores] == [(), (), (2.0, 2.5), ()]
    assert metrics["reward/plus/mean"] == 2.0  # 1.5 and 2.5
    assert metrics["reward/plus/failed"] == 1.0
    assert metrics["reward/both/mean"] == 27.0
