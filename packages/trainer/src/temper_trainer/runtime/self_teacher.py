"""The policy as its own teacher: its current weights, or their moving average."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from temper_engine_api.weights import NamedWeight
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.runtime.engine_teacher import EngineTeacher
from temper_trainer.runtime.placement import AVERAGED_ROLE
from temper_trainer.runtime.worker_group import TrainingWorker, WorkerGroup
from temper_trainer.teacher.teacher_client import (
    SELF_TEACHER,
    TeacherClient,
    build_self_teacher_spec,
)


def build_self_teacher(
    config: TrainerConfig,
    *,
    roles: Mapping[str, WorkerGroup],
    tokenizer: PreTrainedTokenizerBase,
) -> TeacherClient:
    """Return a client whose only teacher is the policy, or its moving average."""
    teacher = EngineTeacher(
        SELF_TEACHER,
        replicas=[roles.get(AVERAGED_ROLE, roles["actor"])],
        max_tokens=config.batching.max_tokens,
        vocab_size=len(tokenizer),
        owns_replicas=False,
    )
    return TeacherClient(
        spec=build_self_teacher_spec(config.distillation), teachers={SELF_TEACHER: teacher}
    )


def update_average(average: WorkerGroup, *, actor: WorkerGroup, decay: float) -> None:
    """Move the average toward the actor: average = decay * average + (1 - decay) * actor.

    With decay 0 it becomes a copy of the actor's weights.
    """
    weights = next(each for each in actor.run_on_all(collect_weights) if each is not None)
    average.run_on_all(average_weights, weights, decay)


def collect_weights(worker: TrainingWorker) -> list[NamedWeight] | None:
    """Return all full weights on the CPU; None on ranks other than the first. Collective."""
    weights: list[NamedWeight] = []
    with worker.export_weights() as stream:
        for each in stream:
            if worker.is_first:
                # Copied, because an exported tensor may share a parameter's memory.
                tensor = each.tensor.detach().to("cpu", copy=True)
                weights.append(NamedWeight(name=each.name, tensor=tensor))
    return weights if worker.is_first else None


def average_weights(worker: TrainingWorker, weights: Sequence[NamedWeight], decay: float) -> None:
    """Load decay * own + (1 - decay) * given weights. Collective."""
    given = {each.name: each.tensor for each in weights}
    with worker.export_weights() as stream:
        averaged = [
            NamedWeight(name=each.name, tensor=_average(each.tensor, given[each.name], decay))
            for each in stream
        ]
    # After the stream has ended, so that no weight is replaced while it is exported.
    worker.load_weights(averaged)


def _average(own: Tensor, given: Tensor, decay: float) -> Tensor:
    given = given.to(own.device, torch.float32 if own.is_floating_point() else own.dtype)
    # Buffers of integers, such as counters, have no average.
    if decay == 0 or not own.is_floating_point():
        return given
    return own.float().mul(decay).add(given, alpha=1 - decay)
