"""Run roles on several Ray nodes of this host, with equal metrics, and lose a node."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from temper_trainer.loops import RunResult
from temper_trainer.loops.rl_loop import StepLoop
from temper_trainer.loops.rl_step import StepResult
from temper_trainer.runtime.worker_group import WorkerError

run_step = StepLoop.run_step

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
)
cluster_utils = pytest.importorskip("ray.cluster_utils")
# Nightly: starting several Ray nodes and losing one takes minutes. Runs on one node are tested
# every day.
pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1800)]

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
SHORT_RUN = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.total_steps=3",
    "sampling.max_tokens=12",
)
APART = ("runtime.kind=ray", "runtime.cpus_per_worker=1", "rollout.pool=rollout")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes of one core each: two pools cannot share one."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    made = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    made.add_node(num_cpus=1)
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.bitwise
def test_roles_on_different_nodes_give_the_metrics_of_one_process(
    run: Run, rows: Rows, tmp_path: Path, cluster: Any
) -> None:
    run(tmp_path / "inline", *SHORT_RUN)
    run(tmp_path / "apart", *SHORT_RUN, *APART)
    assert rows(tmp_path / "apart") == rows(tmp_path / "inline")


@pytest.mark.bitwise
def test_lost_node_is_named_and_the_run_resumes_from_its_checkpoint(
    run: Run, rows: Rows, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_that_loses_a_node(loop: StepLoop, *, step: int, **given: object) -> StepResult:
        if step == 3:
            (other,) = cluster.worker_nodes
            cluster.remove_node(other, allow_graceful=False)
        return run_step(loop, step=step, **given)  # type: ignore[arg-type]

    # Steps are short, and Ray may notice the loss only after the one in which it happens.
    longer_run = [*SHORT_RUN, "run.total_steps=30"]
    monkeypatch.setattr(StepLoop, "run_step", step_that_loses_a_node)
    with pytest.raises(WorkerError, match=r"(?s)died.*run\.resume=auto"):
        run(
            tmp_path / "lost",
            *longer_run,
            *APART,
            "run.save_every=1",
            "runtime.worker_timeout_s=120",
        )
    monkeypatch.undo()
    cluster.add_node(num_cpus=1)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    run(tmp_path / "lost", *longer_run, *APART, "run.save_every=1", "run.resume=auto")
    run(tmp_path / "whole", *longer_run)
    assert rows(tmp_path / "lost") == rows(tmp_path / "whole")
