"""Test which settings a task needs, and which contradict it."""

import re
from typing import get_args, get_type_hints

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config.run import INFERENCE_TASKS, PREFERENCE_TASKS, RL_TASKS, ROLES, RoleConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading import load
from temper_trainer.runtime.placement import collect_role_requests

BASE = ("data.train.paths=[train.jsonl]", "actor.engine.model.path=model")
TEACHER = "teachers.t.engine.model.path=teacher"
SERVED = (TEACHER, "teachers.t.backend=vllm")
ON_RAY = ("runtime.kind=ray",)
SCRATCH = "reward.model.engine.model={architecture: {model_type: qwen2}, model_type: reward_model}"
JUDGE = "reward.model.engine.model={path: judge, model_type: reward_model}"


@pytest.mark.parametrize("task", ["rl", "sft", "eval", "generate"])
def test_task_without_its_data_is_refused_with_the_key(task: str) -> None:
    key = "data.eval is not set" if task in INFERENCE_TASKS else "data.train.paths is not set"
    with pytest.raises(ConfigError, match=key):
        load([BASE[1], f"task={task}"])


def test_evaluation_needs_no_training_data() -> None:
    config = load([BASE[1], "task=eval", "data.eval.paths=[test.jsonl]"]).config
    assert list(config.data.sources) == ["data.eval"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("algorithm=distill",), "task is distill, but there is no teacher"),
        ((TEACHER, "task=sft"), "teachers are set in task sft, which does not use them"),
        (
            (TEACHER, "runtime.kind=ray", "teachers.t.pool=train"),
            "so it cannot be colocated. Give it its own pool",
        ),
        (
            (TEACHER, "teachers.t.engine.offload.parameters=true"),
            "a teacher has its own devices",
        ),
        ((TEACHER, "teachers.t.num_replicas=2"), "runtime.kind is inline"),
        (
            (*SERVED, "teachers.t.num_replicas=2", "teachers.t.devices=['0']"),
            "names 1 sets of devices, but teachers.t.num_replicas is 2",
        ),
        (
            (*SERVED, "rollout.vllm.sleep_level=1"),
            "servers of teachers never sleep, and read only gpu_memory_utilization",
        ),
        (
            (*SERVED, "rollout.vllm.tensor_parallel_size=2"),
            "rollout.vllm.tensor_parallel_size (command line) has no effect",
        ),
        (
            (*SERVED, "teachers.t.engine.precision.reduce=bf16"),
            "has no effect with teachers.t.backend vllm",
        ),
        (
            (*SERVED, "sampling.temperature=0.5"),
            "only at temperature 1, but sampling.temperature is 0.5",
        ),
        ((TEACHER, "teachers.t.devices=['0']"), "it is for backend vllm and runtime.kind inline"),
        (
            (*ON_RAY, TEACHER, "teachers.t.engine.sequence_parallel=2"),
            "one copy of the model over 2 ranks",
        ),
        (
            (*ON_RAY, TEACHER, "reward.function=reward_model", JUDGE, "reward.model.pool=teacher"),
            "and so is reward.model.pool",
        ),
        (
            (
                TEACHER,
                "teachers.u.engine.model.path=teacher",
                "teachers.u.route=t",
                "data.train.route_key=subject",
            ),
            "have the same route 't'",
        ),
        (
            (TEACHER, "teachers.u.engine.model.path=teacher"),
            "there are 2 teachers, but data.train.route_key is not set",
        ),
        (
            (TEACHER, "teachers.t.pool=train"),
            "teachers.t.pool (command line) has no effect with runtime.kind inline",
        ),
        (("distillation.clamp=3.0",), "has no effect without teachers"),
        (
            (TEACHER, "distillation.objective.top_k=3"),
            "distillation.objective.top_k",
        ),
        (
            (TEACHER, "distillation.objective={name: reverse_kl, kl_estimator: k1}"),
            "distillation.objective.kl_estimator",
        ),
        (
            (
                TEACHER,
                "task=distill",
                "algorithm.rollout_correction=rollout_ratio",
            ),
            "(distillation.objective reverse_kl) has no ratio: use another correction",
        ),
        (
            (TEACHER, "task=distill", "distillation.off_policy_fraction=0.5"),
            "but data.train.completion_key is not set: set it to the field",
        ),
        (
            (TEACHER, "algorithm=distill", "distillation.off_policy_fraction=0.5"),
            "distillation.objective is reverse_kl, whose estimate is wrong for tokens",
        ),
        (
            (TEACHER, "distillation.off_policy_fraction=0.5"),
            "distillation.off_policy_fraction is 0.5 in task rl, but only task distill",
        ),
        (
            (TEACHER, "distillation.off_policy_fraction=0.001"),
            "batching.prompts_per_step 64, which rounds to 0 prompts",
        ),
        (
            ("data.train.completion_key=solution",),
            "data.train.completion_key (command line) has no effect without",
        ),
        (
            ("task=distill", "distillation.self_teacher=current"),
            "data.train.teacher_prompt_key is not set: with the same prompt",
        ),
        (
            (TEACHER, "distillation.self_teacher=ema"),
            "distillation.self_teacher is ema and teachers.t is set",
        ),
        (
            ("data.train.teacher_prompt_key=solved",),
            "data.train.teacher_prompt_key (command line) has no effect without",
        ),
        (
            ("task=distill", "distillation.self_teacher={name: current, decay: 0.9}"),
            "distillation.self_teacher.decay",
        ),
        (
            ("reward.function=reward_model",),
            "reward.function names reward_model, but reward.model is not set",
        ),
        (
            ("reward.components={reward_model: 1.0}",),
            "reward.components names reward_model, but reward.model is not set",
        ),
        ((JUDGE,), "neither reward.function nor reward.components names reward_model"),
        (
            ("reward.function=reward_model", "reward.model.engine.model.path=judge"),
            "model_type is language_model, but must be reward_model",
        ),
        (("reward.function=reward_model", SCRATCH), "train one with task=rm"),
        (
            ("reward.function=reward_model", JUDGE, "reward.model.num_workers=2"),
            "runtime.kind is inline",
        ),
        (
            ("reward.function=reward_model", JUDGE, "loop=async"),
            "set runtime.kind=ray or loop=sync",
        ),
        (("reward.function=reward_model", JUDGE, "reward.timeout_s=3"), "which calls no function"),
        (("environment.max_turns=9", "batching.max_tokens=4096"), "the turns of environment"),
    ],
)
def test_contradictions_of_tasks_are_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load([*BASE, *overrides])


def test_teacher_with_its_own_pool_is_accepted_and_placed_separately() -> None:
    config = load(
        [*BASE, "algorithm=distill", TEACHER, "teachers.t.num_replicas=2", "runtime.kind=ray"]
    ).config
    pools = {name: request.pool for name, request in collect_role_requests(config).items()}
    assert pools == {
        "actor": "train",
        "rollout": "train",
        "teacher.t.0": "teacher/teacher.t.0",
        "teacher.t.1": "teacher/teacher.t.1",
    }


def test_teacher_may_have_several_servers_on_different_devices() -> None:
    config = load(
        [
            *BASE,
            "algorithm=distill",
            *SERVED,
            "teachers.t.num_replicas=2",
            "teachers.t.num_workers=2",
            *ON_RAY,
        ]
    ).config
    requests = collect_role_requests(config)
    assert [
        (requests[f"teacher.t.{i}"].num_workers, requests[f"teacher.t.{i}"].devices_per_worker)
        for i in range(2)
    ] == [(1, 2), (1, 2)]
    read = (
        "rollout.vllm.kv_cache_bytes=67108864",
        "rollout.vllm.enforce_eager=true",
        "teachers.t.engine.precision.compute=fp32",
    )
    load(
        [
            *BASE,
            "algorithm=distill",
            *SERVED,
            *read,
            "teachers.t.num_replicas=2",
            "teachers.t.devices=['1','2,3']",
        ]
    )


def test_every_task_is_in_one_group() -> None:
    tasks = get_args(get_type_hints(TrainerConfig)["task"])
    assert sorted(tasks) == sorted(("sft", *RL_TASKS, *PREFERENCE_TASKS, *INFERENCE_TASKS))


def test_roles_are_the_models_of_the_configuration() -> None:
    hints = get_type_hints(TrainerConfig)
    is_role = {name: hint in (RoleConfig, RoleConfig | None) for name, hint in hints.items()}
    assert tuple(name for name in hints if is_role[name]) == ROLES
