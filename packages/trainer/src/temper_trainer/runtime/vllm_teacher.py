"""A teacher on vLLM servers, which read its weights from disk and never sleep."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import cast

import torch

from temper_engine_api.errors import ConfigError
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.run import TrainerConfig
from temper_trainer.rollout.replica import ReplicaError
from temper_trainer.rollout.vllm.client import ServerProcess
from temper_trainer.rollout.vllm.sampler import VllmSampler
from temper_trainer.rollout.vllm.spec import teacher_server_spec
from temper_trainer.teacher.answers import Question, TeacherAnswer, TeacherError
from temper_trainer.teacher.balance import share_out


class VllmTeacher:
    """See Teacher."""

    def __init__(self, name: str, *, servers: VllmSampler) -> None:
        self._name = name
        self._servers = servers

    @property
    def num_replicas(self) -> int:
        """Servers."""
        return len(self._servers.replicas)

    def answer(self, questions: Sequence[Question], *, top_k: int, timeout_s: float) -> list[TeacherAnswer]:
        """One answer for each question; see Teacher.

        Raises:
            ConfigError: a temperature other than 1, at which vLLM gives no log-probs of prompts.
        """
        hot = next((question for question in questions if question.temperature != 1), None)
        if hot is not None:
            raise ConfigError(
                f"teachers.{self._name}.backend is vllm, which answers at temperature 1 only, but sampling.temperature is "
                f"{hot.temperature}: set it to 1, or use backend=engine."
            )
        shares = share_out(questions, num_replicas=self.num_replicas)
        arguments = [([(questions[i].tokens, questions[i].first) for i in share], top_k) if share else None for share in shares]
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                rows = pool.submit(self._servers.call_each, "judge", arguments).result(timeout=timeout_s)
            except FutureTimeoutError as error:
                self._servers.close()
                raise TeacherError(
                    f"teacher {self._name} did not answer within distillation.timeout_s = {timeout_s} s: raise it, or "
                    f"teachers.{self._name}.num_replicas."
                ) from error
            except ReplicaError as error:
                raise TeacherError(f"teacher {self._name}: {error}") from error
        answers: dict[int, TeacherAnswer] = {}
        for share, row in zip(shares, rows, strict=True):
            for place, judged in zip(share, cast("list[tuple[list[float], list[list[int]], list[list[float]]]]", row or []), strict=True):
                answers[place] = _answer(questions[place], judged, top_k=top_k)
        return [answers[place] for place in range(len(questions))]

    def close(self) -> None:
        """End the servers."""
        self._servers.close()


def open_vllm_teacher(name: str, teacher: TeacherConfig, *, config: TrainerConfig) -> VllmTeacher:
    """Servers beside the driver, with the rollout's interpreter and its vLLM settings.

    Raises:
        ConfigError: under Ray, or without a model directory.
    """
    if config.runtime.kind == "ray":
        raise ConfigError(f"teachers.{name}.backend is vllm, which runtime.kind ray does not place yet: use backend=engine, or inline.")
    spec = teacher_server_spec(name, teacher, config=config)
    vllm = config.rollout.vllm
    replicas = [
        ServerProcess(
            spec,
            name=f"teacher {name} replica {number}",
            python=config.runtime.rollout_python or sys.executable,
            log_file=Path(config.run.dir).resolve() / "teachers" / f"{name}-{number}.log",
            start_timeout_s=vllm.start_timeout_s,
            stall_timeout_s=vllm.stall_timeout_s,
        )
        for number in range(teacher.num_replicas)
    ]
    return VllmTeacher(name, servers=VllmSampler(replicas, spec=spec, max_restarts=vllm.max_restarts))


def _answer(question: Question, judged: tuple[list[float], list[list[int]], list[list[float]]], *, top_k: int) -> TeacherAnswer:
    given, ids, logs = judged
    return TeacherAnswer(
        question_id=question.question_id,
        logprobs=torch.tensor(given),
        top_ids=torch.tensor([[*row, *[0] * (top_k - len(row))] for row in ids]).view(-1, top_k) if top_k else None,
        top_logprobs=torch.tensor([[*row, *[-torch.inf] * (top_k - len(row))] for row in logs]).view(-1, top_k) if top_k else None,
    )
