"""Whole runs on real vLLM servers, beside the same runs on the transformers sampler."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult
from temper_trainer.loops import step as step_page
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.step import StepResult, rl_step
from temper_trainer.rollout.vllm.client import ServerProcess
from temper_trainer.rollout.vllm.sampler import VllmSampler
from temper_trainer.runtime.ray_replica import RayReplica

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
LEAN = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.total_steps=3",
    "sampling.max_tokens=12",
    "algorithm=reinforce_plus_plus",
    "actor.engine.optimizer.lr=1e-2",
    "actor.engine.model.architecture.hidden_size=128",  # heads of 32: vLLM's attention on CPUs has no smaller ones
)
"""Rewards that need no second completion of a prompt to differ: greedy ones are all equal."""
GREEDY = ("sampling.top_k=1",)
"""Log-probs are of the whole distribution, tokens are the likeliest."""
NUMBERS = ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/tokens", "rollout/length_max")


@pytest.fixture(scope="session")
def on_vllm() -> tuple[str, ...]:
    """Overrides that put the rollout on a vLLM server."""
    named = os.environ.get("TEMPER_ROLLOUT_PYTHON")
    if named is None and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is neither installed here nor named by TEMPER_ROLLOUT_PYTHON: nox -s vllm makes an environment and runs this")
    return (
        "rollout=vllm",
        f"runtime.rollout_python={named or sys.executable}",
        "rollout.vllm.kv_cache_bytes=67108864",
        "rollout.vllm.enforce_eager=true",
        "rollout.max_concurrent=16",
        "rollout.canary_tolerance=1e-4",
    )


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) > 0
    for name in NUMBERS:
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-4, abs=1e-6), name


def killing_in_step_two(restarts: list[int], kill: Callable[[VllmSampler], None]) -> Callable[..., StepResult]:
    """A step that loses its first server in step 2, before it samples."""

    def step_that_loses_a_server(rooms: Rooms, *, step: int, **given: object) -> StepResult:
        assert isinstance(rooms.sampler, VllmSampler)
        if step == 2:
            kill(rooms.sampler)
        result = rl_step(rooms, step=step, **given)  # type: ignore[arg-type]
        restarts.append(rooms.sampler.num_restarts)
        return result

    return step_that_loses_a_server


def test_greedy_rollouts_give_the_losses_of_the_transformers_sampler(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    run(tmp_path / "hf", *LEAN, *GREEDY)
    run(tmp_path / "vllm", *LEAN, *GREEDY, *on_vllm, "weight_sync.bucket_bytes=20000")
    assert_close(rows(tmp_path / "vllm"), rows(tmp_path / "hf"))
    assert not list(Path("/dev/shm").glob(f"temper-{os.getuid()}-*")), "a run leaves nothing in shared memory"


def test_weights_by_broadcast_give_the_same_losses(run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]) -> None:
    run(tmp_path / "hf", *LEAN, *GREEDY)
    run(tmp_path / "vllm", *LEAN, *GREEDY, *on_vllm, "weight_sync.transport=collective", "weight_sync.bucket_bytes=20000")
    assert_close(rows(tmp_path / "vllm"), rows(tmp_path / "hf"))


def test_a_server_that_is_killed_in_the_middle_of_a_step_loses_nothing(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts: list[int] = []

    def kill(sampler: VllmSampler) -> None:
        (replica,) = sampler.replicas
        assert isinstance(replica, ServerProcess)
        assert replica.process_id is not None
        os.killpg(replica.process_id, signal.SIGKILL)

    run(tmp_path / "whole", *LEAN, *on_vllm)
    monkeypatch.setattr(step_page, "rl_step", killing_in_step_two(restarts, kill))
    run(tmp_path / "killed", *LEAN, *on_vllm)
    assert restarts == [0, 1, 1]
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")


def test_one_step_off_gives_the_losses_of_the_transformers_sampler(run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]) -> None:
    ahead = ("loop=one_step_off", "run.total_steps=4")
    run(tmp_path / "hf", *LEAN, *GREEDY, *ahead)
    run(tmp_path / "vllm", *LEAN, *GREEDY, *on_vllm, *ahead)
    assert_close(rows(tmp_path / "vllm"), rows(tmp_path / "hf"))
    assert [row["staleness/max"] for row in rows(tmp_path / "vllm")] == [0, 1, 1, 1]


def test_loop_async_stays_within_its_staleness_on_servers(run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]) -> None:
    correction = "algorithm.rollout_correction={level: token}"
    run(tmp_path / "run", *LEAN, *on_vllm, "loop=async", "asynchrony.max_staleness=2", correction, "run.total_steps=6")
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert all(row["staleness/max"] <= 2 for row in found)
    # The first batch has the trainer's own weights; later ones are one or two updates older, and the correction sees how far that is.
    assert found[0]["mismatch/abs_max"] < 1e-4
    assert all(1e-9 < row["mismatch/kl"] < 5.0 for row in found[2:])


def test_an_adapter_alone_is_sent_and_gives_the_losses_of_the_merged_one(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    lora = ("actor.engine.lora.rank=4", "actor.engine.lora.alpha=8", "warm_start.total_steps=2")
    lean = tuple(setting for setting in LEAN if setting != "warm_start=null")  # servers read the base from the warm start's directory
    run(tmp_path / "hf", *lean, *lora, *GREEDY)
    run(tmp_path / "vllm", *lean, *lora, *GREEDY, *on_vllm, "weight_sync.content=adapter")
    assert_close(rows(tmp_path / "vllm"), rows(tmp_path / "hf"))


@pytest.mark.ray
def test_two_replicas_on_ray_give_what_one_server_gives_though_one_dies(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'temper-trainer[ray]'")
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    restarts: list[int] = []

    def kill(sampler: VllmSampler) -> None:
        replica = sampler.replicas[0]
        assert isinstance(replica, RayReplica)
        assert replica.process_id is not None
        os.killpg(replica.process_id, signal.SIGKILL)

    run(tmp_path / "one", *LEAN, *on_vllm)
    monkeypatch.setattr(step_page, "rl_step", killing_in_step_two(restarts, kill))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        run(tmp_path / "two", *LEAN, *on_vllm, "runtime.kind=ray", "runtime.cpus_per_worker=0.5", "rollout.num_replicas=2")
    finally:
        ray.shutdown()
    assert restarts == [0, 1, 1]
    for name in NUMBERS:
        expected = [row[name] for row in rows(tmp_path / "one")]
        assert [row[name] for row in rows(tmp_path / "two")] == pytest.approx(expected, rel=1e-3, abs=1e-5), name
