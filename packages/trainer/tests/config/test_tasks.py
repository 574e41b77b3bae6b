"""What a task needs and what contradicts it."""

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load

BASE = ("data.train.paths=[train.jsonl]", "actor.engine.model.path=model")
TEACHER = "teachers.t.engine.model.path=teacher"
SCRATCH = "reward.model.engine.model={architecture: {model_type: qwen2}, model_type: reward_model}"
JUDGE = "reward.model.engine.model={path: judge, model_type: reward_model}"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("algorithm=distill",), "task is distill, but there is no teacher"),
        ((TEACHER, "task=sft"), "teachers are set in task sft, which asks none"),
        ((TEACHER, "runtime.kind=ray", "teachers.t.pool=train"), "so there is no colocated mode. Give it a pool of its own"),
        ((TEACHER, "teachers.t.engine.residency.offload_parameters=true"), "a teacher on its own pool never sleeps"),
        ((TEACHER, "teachers.t.num_replicas=2"), "runtime.kind is inline"),
        ((TEACHER, "teachers.u.engine.model.path=teacher", "teachers.u.route=t"), "have one route, 't'"),
        (("distillation.top_k=3",), "has no effect without teachers"),
        ((TEACHER, "distillation.top_k=3"), "has no effect with distillation.objective reverse_kl"),
        ((TEACHER, "distillation={apply_as: reward, objective: forward_kl}"), "which is no reward of the sampled token"),
        (("reward.function=reward_model",), "reward.function names reward_model, but there is none"),
        (("reward.components={reward_model: 1.0}",), "reward.components names reward_model, but there is none"),
        ((JUDGE,), "neither reward.function nor reward.components names reward_model"),
        (("reward.function=reward_model", "reward.model.engine.model.path=judge"), "model_type is language_model: set it to reward_model"),
        (("reward.function=reward_model", SCRATCH), "Train one with task=rm"),
        (("reward.function=reward_model", JUDGE, "reward.model.num_workers=2"), "runtime.kind is inline"),
        (("reward.function=reward_model", JUDGE, "loop=async"), "use runtime.kind=ray, or loop=sync"),
        (("reward.function=reward_model", JUDGE, "reward.timeout_s=3"), "which calls no function"),
        (("environment.max_turns=9", "batching.max_tokens=4096"), "the turns of environment"),
    ],
)
def test_contradictions_are_refused_with_a_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence.replace(".", r"\.")):
        load([*BASE, *overrides])


def test_a_teacher_alone_on_its_pool_is_accepted_and_placed_apart() -> None:
    from temper_trainer.runtime.opening import role_requests

    config = load([*BASE, "algorithm=distill", TEACHER, "teachers.t.num_replicas=2", "runtime.kind=ray"]).config
    pools = {name: request.pool for name, request in role_requests(config).items()}
    assert pools == {"actor": "train", "rollout": "train", "teacher.t.0": "teacher/teacher.t.0", "teacher.t.1": "teacher/teacher.t.1"}
