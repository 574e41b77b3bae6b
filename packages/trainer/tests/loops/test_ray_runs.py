"""The same runs on Ray actors: equal numbers, two ranks, a worker that dies."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult
from temper_trainer.loops import step as step_page
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.step import StepResult, rl_step
from temper_trainer.runtime.group import WorkerError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'temper-trainer[ray]'")
pytestmark = pytest.mark.ray

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
ON_RAY = ("runtime.kind=ray", "runtime.cpus_per_worker=0.5")


def process_id(worker: object) -> int:
    return os.getpid()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all tests here; a run that finds one leaves it running."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_ray_and_inline_give_equal_metrics(run: Run, rows: Rows, tmp_path: Path) -> None:
    ppo = ("algorithm=ppo", "batching.num_mini_batches=2", "ref=frozen", "algorithm.kl_loss_coef=0.01", "run.total_steps=2")
    run(tmp_path / "inline", *ppo)
    run(tmp_path / "ray", *ppo, *ON_RAY)
    for phase in ("warm_start", "rl", "eval"):
        assert rows(tmp_path / "ray", phase=phase) == rows(tmp_path / "inline", phase=phase)


def test_two_ranks_train_like_one_and_resume(run: Run, rows: Rows, tmp_path: Path) -> None:
    two = (*ON_RAY, "actor.num_workers=2", "run.total_steps=2", "data.eval=null")
    run(tmp_path / "one", "run.total_steps=2", "data.eval=null")
    run(tmp_path / "two", *two)
    one, two_rows = rows(tmp_path / "one"), rows(tmp_path / "two")
    for name in ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/tokens"):
        assert [row[name] for row in two_rows] == pytest.approx([row[name] for row in one], rel=1e-4, abs=1e-6)
    run(tmp_path / "two", *ON_RAY, "actor.num_workers=1", "run.total_steps=3", "run.resume=auto", "data.eval=null")
    assert [row["step"] for row in rows(tmp_path / "two")] == [1, 2, 3]


@pytest.mark.nightly
def test_stages_and_split_matrices_of_the_megatron_engine_train_like_one_fsdp_rank(run: Run, rows: Rows, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs temper-engine-megatron with Megatron-Bridge")
    ppo = ("algorithm=ppo", "ref=frozen", "algorithm.kl_loss_coef=0.01", "run.total_steps=2", "data.eval=null", "run.save_every=1")
    run(tmp_path / "one", *ppo)
    layout = ("actor.engine.pipeline_parallel=2", "actor.num_workers=2", "critic.engine.tensor_parallel=2", "critic.num_workers=2")
    two = (*ppo, *ON_RAY, "model_engine=megatron", *layout)
    run(tmp_path / "two", *two)
    for phase in ("warm_start", "rl"):
        for row, want in zip(rows(tmp_path / "two", phase=phase), rows(tmp_path / "one", phase=phase), strict=True):
            assert row == pytest.approx(want, rel=2e-4, abs=2e-5)
    # The other layout takes over.
    swapped = ("actor.engine.tensor_parallel=2", "actor.num_workers=2", "critic.engine.pipeline_parallel=2", "critic.num_workers=2")
    run(tmp_path / "two", *ppo, *ON_RAY, "model_engine=megatron", *swapped, "run.total_steps=3", "run.resume=auto")
    assert [row["step"] for row in rows(tmp_path / "two")] == [1, 2, 3]


def test_a_worker_killed_in_the_middle_of_a_step_is_named_and_the_run_goes_on_from_its_checkpoint(
    run: Run, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_that_loses_a_worker(rooms: Rooms, *, step: int, **given: object) -> StepResult:
        if step == 3:
            actor = rooms.roles["actor"]
            os.kill(actor.run(process_id, [()])[0], signal.SIGKILL)
        return rl_step(rooms, step=step, **given)  # type: ignore[arg-type]

    kept = (*ON_RAY, "run.save_every=1", "data.eval=null", "run.save_model=false")
    monkeypatch.setattr(step_page, "rl_step", step_that_loses_a_worker)
    with pytest.raises(WorkerError, match=r"actor: .* the worker of rank 0 died.*run\.resume=auto"):
        run(tmp_path / "killed", *kept)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    run(tmp_path / "killed", *kept, "run.resume=auto")
    run(tmp_path / "whole", "data.eval=null", "run.save_model=false")
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
