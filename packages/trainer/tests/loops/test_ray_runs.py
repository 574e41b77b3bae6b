"""The same runs on Ray actors: equal numbers, roles apart, two ranks, one that dies."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from temper_trainer.loops import RunResult
from temper_trainer.loops.rl_loop import StepLoop
from temper_trainer.loops.rl_step import StepResult
from temper_trainer.runtime.engine_teacher import EngineTeacher
from temper_trainer.runtime.worker_group import WorkerError

run_step = StepLoop.run_step

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
)
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


@pytest.mark.bitwise
def test_ray_and_inline_give_equal_metrics(run: Run, rows: Rows, tmp_path: Path) -> None:
    ppo = (
        "algorithm=ppo",
        "batching.num_mini_batches=2",
        "ref=frozen",
        "algorithm.kl_loss_coef=0.01",
        "run.total_steps=2",
    )
    apart = ("critic.pool=critic", "ref.pool=ref", "rollout.pool=rollout")
    run(tmp_path / "inline", *ppo)
    run(tmp_path / "ray", *ppo, *ON_RAY, *apart)
    for phase in ("warm_start", "rl", "eval"):
        assert rows(tmp_path / "ray", phase=phase) == rows(tmp_path / "inline", phase=phase)


AVERAGED = (
    "warm_start=null",
    "data.eval=null",
    "algorithm=distill",
    "algorithm.group_size=1",
    "actor.engine.optimizer.lr=1e-2",
    "data.train.teacher_prompt_key=solved",
    "distillation.objective=top_k_reverse_kl",
    "distillation.self_teacher={name: ema, decay: 0.5}",
    "run.save_every=1",
    "run.save_model=false",
    "run.total_steps=3",
)
"""A run whose teacher is a moving average of the policy."""


def assert_about_equal(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Compare runs of AVERAGED; two ranks add up the same sums in another order than one."""
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    names = ("distill/divergence", "actor/grad_norm", "distill/top_k_mass")
    for row, want in zip(actual, expected, strict=True):
        assert [row[name] for name in names] == pytest.approx(
            [want[name] for name in names], rel=1e-3
        )


# Nightly: test_rank_killed_in_an_update_is_named_and_the_run_resumes_on_one_rank makes such a run.
@pytest.mark.nightly
@pytest.mark.bitwise
@pytest.mark.parametrize("num_workers", [1, 2])
def test_moving_average_teaches_on_ray_as_in_one_process(
    run: Run, rows: Rows, tmp_path: Path, num_workers: int
) -> None:
    on_ray = (*ON_RAY, f"actor.num_workers={num_workers}")
    run(tmp_path / "inline", *AVERAGED)
    run(tmp_path / "ray", *AVERAGED, *on_ray, "run.total_steps=2")
    run(tmp_path / "ray", *AVERAGED, *on_ray, "run.resume=auto")
    actual, expected = rows(tmp_path / "ray"), rows(tmp_path / "inline")
    if num_workers == 1:
        assert actual == expected
    assert_about_equal(actual, expected)


# Nightly: test_ray_sampler.py sends weights through the object store.
@pytest.mark.nightly
@pytest.mark.bitwise
def test_deltas_through_the_object_store_give_the_metrics_of_full_weights(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    small = (
        "actor.engine.precision.compute=bf16",
        "rollout.dtype=bf16",
        "actor.engine.optimizer.lr=1e-5",
        "rollout.canary_tolerance=0.05",
    )
    run(tmp_path / "inline", *small)
    run(tmp_path / "ray", *small, *ON_RAY, "weight_sync.content=delta")
    actual, expected = rows(tmp_path / "ray"), rows(tmp_path / "inline")
    fractions = [row.pop("weight_sync/sent_fraction") for row in actual]
    for row in (*actual, *expected):
        row.pop("weight_sync/bytes")
    assert 0 < min(fractions) <= max(fractions) < 0.5
    assert actual == [
        {name: value for name, value in row.items() if name != "weight_sync/sent_fraction"}
        for row in expected
    ]


# Nightly: trains on four ranks of Megatron and takes minutes. The kit compares updates in pipelines
# and with split matrices every day.
@pytest.mark.nightly
def test_pipeline_and_tensor_parallel_megatron_trains_like_one_fsdp_rank(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    pytest.importorskip("megatron.core", reason="needs temper-engine-megatron with Megatron-Bridge")
    ppo = (
        "algorithm=ppo",
        "ref=frozen",
        "algorithm.kl_loss_coef=0.01",
        "run.total_steps=2",
        "data.eval=null",
        "run.save_every=1",
    )
    run(tmp_path / "one", *ppo)
    layout = (
        "actor.engine.pipeline_parallel=2",
        "actor.num_workers=2",
        "critic.engine.tensor_parallel=2",
        "critic.num_workers=2",
    )
    two = (*ppo, *ON_RAY, "model_engine=megatron", *layout)
    run(tmp_path / "two", *two)
    for phase in ("warm_start", "rl"):
        for row, want in zip(
            rows(tmp_path / "two", phase=phase), rows(tmp_path / "one", phase=phase), strict=True
        ):
            assert row == pytest.approx(want, rel=2e-4, abs=2e-5)
    # The other layout takes over.
    swapped = (
        "actor.engine.tensor_parallel=2",
        "actor.num_workers=2",
        "critic.engine.pipeline_parallel=2",
        "critic.num_workers=2",
    )
    run(
        tmp_path / "two",
        *ppo,
        *ON_RAY,
        "model_engine=megatron",
        *swapped,
        "run.total_steps=3",
        "run.resume=auto",
    )
    assert [row["step"] for row in rows(tmp_path / "two")] == [1, 2, 3]


# Nightly: tests of the worker group kill a rank during a call, and those of faults resume runs.
@pytest.mark.nightly
def test_rank_killed_in_an_update_is_named_and_the_run_resumes_on_one_rank(
    run: Run, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_that_loses_a_rank(loop: StepLoop, *, step: int, **given: object) -> StepResult:
        actor = loop.components.roles["actor"]
        if step == 3:  # the average, which teaches since step 2, is that of both ranks
            victim, update = actor.run(process_id, [(), ()])[1], actor.update

            def update_that_loses_a_rank(*arguments: object, **more: object) -> object:
                # A rank that stands still cannot end its part before the kill, however fast the
                # machine is.
                os.kill(victim, signal.SIGSTOP)
                threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
                return update(*arguments, **more)  # type: ignore[arg-type]

            monkeypatch.setattr(actor, "update", update_that_loses_a_rank)
        return run_step(loop, step=step, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(StepLoop, "run_step", step_that_loses_a_rank)
    with pytest.raises(
        WorkerError,
        match=r"(?s)actor: TrainingWorker\.update: the worker of rank 1 died.*run\.resume=auto",
    ):
        run(tmp_path / "killed", *AVERAGED, *ON_RAY, "actor.num_workers=2")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    # In this process, because each actor needs seconds to import torch.
    run(tmp_path / "killed", *AVERAGED, "run.resume=auto")
    run(tmp_path / "whole", *AVERAGED)
    assert_about_equal(rows(tmp_path / "killed"), rows(tmp_path / "whole"))


MODEL = (
    "{model_type: qwen2, hidden_size: 32, intermediate_size: 64, num_hidden_layers: "
    "1, num_attention_heads: 4, num_key_value_heads: 2, "
    "max_position_embeddings: 256}"
)
TAUGHT = (
    *ON_RAY,
    "algorithm=distill",
    f"teachers.t.engine.model.architecture={MODEL}",
    "teachers.t.engine.precision.compute=fp32",
    "teachers.t.engine.device=cpu",
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.total_steps=3",
)


@pytest.mark.bitwise
# Nightly: tests of the worker group kill a rank during a call.
@pytest.mark.nightly
def test_killed_engine_teacher_is_named_and_the_previous_step_is_saved(
    run: Run, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_that_loses_the_teacher(loop: StepLoop, *, step: int, **given: object) -> StepResult:
        assert loop.components.teachers is not None
        teacher = loop.components.teachers.teachers["t"]
        assert isinstance(teacher, EngineTeacher)
        if step == 3:
            (victim,) = teacher._replicas[0].run(process_id, [()])
            os.kill(victim, signal.SIGKILL)
        return run_step(loop, step=step, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(StepLoop, "run_step", step_that_loses_the_teacher)
    with pytest.raises(WorkerError, match=r"teacher\.t\.0: .*the worker of rank 0 died"):
        run(tmp_path / "killed", *TAUGHT)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    run(tmp_path / "killed", *TAUGHT, "run.resume=auto")
    run(tmp_path / "whole", *TAUGHT)
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole"), (
        "steps 1 and 2 were saved although run.save_every is 0"
    )
