"""Tests of the placement that is printed before a run."""

from temper_trainer.config_loading import load
from temper_trainer.runtime.placement import describe_plan

BASE = ("data.train.paths=[train.jsonl]", "actor.engine.model.path=model")
TEACHERS = (
    "algorithm=distill",
    "teachers.t.engine.model.path=teacher",
    "teachers.t.num_replicas=2",
    "teachers.t.backend=vllm",
)
CHOSEN_LATER = (
    "chosen when actor and servers are running: CUDA IPC on shared GPUs, NCCL to others, "
    "shared memory on the CPUs of one host, otherwise gloo"
)
ON_RAY = ("runtime.kind=ray", "runtime.gpus_per_worker=1")


def lines(*overrides: str) -> list[str]:
    return describe_plan(load([*BASE, *overrides]).config)


def test_plan_on_ray_lists_every_bundle_and_the_needed_resources() -> None:
    servers = (
        "rollout=vllm",
        "rollout.pool=rollout",
        "rollout.num_replicas=2",
        "rollout.vllm.tensor_parallel_size=2",
    )
    assert lines(
        *ON_RAY, *servers, *TEACHERS, "actor.num_workers=2", "teachers.t.num_workers=4"
    ) == [
        "train[0]: actor on 1 CPU, 1 GPU",
        "train[1]: actor on 1 CPU, 1 GPU",
        "rollout[0]: rollout on 2 CPU, 2 GPU",
        "rollout[1]: rollout on 2 CPU, 2 GPU",
        "teacher/teacher.t.0[0]: teacher.t.0 on 4 CPU, 4 GPU",
        "teacher/teacher.t.1[0]: teacher.t.1 on 4 CPU, 4 GPU",
        # 2 of the actor, 2 x 2 of the rollout, 2 x 4 of the teacher.
        "the cluster needs 14 CPU and 14 GPU",
        f"weights to the sampler: {CHOSEN_LATER}",
    ]


def test_plan_of_servers_on_the_gpus_of_several_ranks_says_how_many_each_has() -> None:
    servers = ("rollout=vllm", "rollout.num_replicas=1", "rollout.vllm.tensor_parallel_size=2")
    assert lines(*ON_RAY, *servers, "actor.num_workers=2") == [
        "train[0]: actor, rollout on 1 CPU, 1 GPU",
        "train[1]: actor, rollout on 1 CPU, 1 GPU",
        "rollout: every server on 2 of these, which are on one host",
        "the cluster needs 2 CPU and 2 GPU",
        f"weights to the sampler: {CHOSEN_LATER}",
    ]


def test_plan_inline_lists_the_process_and_its_servers_with_devices() -> None:
    devices = (
        "runtime.rollout_devices=['1']",
        "teachers.t.devices=['2','3']",
        "weight_sync.transport=collective",
    )
    assert lines("rollout=vllm", *TEACHERS, *devices) == [
        "this process: actor",
        "rollout replica 0: a server on this host, on devices 1",
        "teacher t replica 0: a server on this host, on devices 2",
        "teacher t replica 1: a server on this host, on devices 3",
        "weights to the sampler: by collective",
    ]
    assert lines() == ["this process: actor, rollout", "weights to the sampler: in this process"]


def test_plan_of_a_task_without_training_has_no_actor_and_no_weight_sync() -> None:
    assert lines("task=generate", *ON_RAY) == [
        "train[0]: rollout on 1 CPU, 1 GPU",
        "the cluster needs 1 CPU and 1 GPU",
    ]
