"""A teacher on vLLM servers, which read its weights from disk and never sleep."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import cast

import torch

from temper_engine_api.errors import ConfigError
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.replica import Replica, ReplicaError
from temper_trainer.rollout.vllm.server_spec import build_teacher_server_spec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.teacher.balance import assign_to_replicas
from temper_trainer.teacher.teacher_protocol import TeacherError, TeacherRequest, TeacherScores


class VllmTeacher:
    """See Teacher."""

    def __init__(self, name: str, *, servers: VllmSampler, vocab_size: int) -> None:
        """A teacher whose servers run.

        Args:
            name: for messages.
            servers: that hold the same weights.
            vocab_size: ids below this are tokens; a model's head may have rows beyond, for which neither map nor policy has a place.
        """
        self._name = name
        self._vocab_size = vocab_size
        self.servers = servers
        """Its replicas."""

    @property
    def num_replicas(self) -> int:
        """Servers."""
        return len(self.servers.replicas)

    def answer(
        self, questions: Sequence[TeacherRequest], *, top_k: int, timeout_s: float
    ) -> list[TeacherScores]:
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
        shares = assign_to_replicas(questions, num_replicas=self.num_replicas)
        arguments = [
            ([(questions[i].tokens, questions[i].first) for i in share], top_k) if share else None
            for share in shares
        ]
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                rows = pool.submit(self.servers.call_each, "judge", arguments).result(
                    timeout=timeout_s
                )
            except FutureTimeoutError as error:
                self.servers.close()
                raise TeacherError(
                    f"teacher {self._name} did not answer within distillation.timeout_s = {timeout_s} s: raise it, or "
                    f"teachers.{self._name}.num_replicas."
                ) from error
            except ReplicaError as error:
                raise TeacherError(f"teacher {self._name}: {error}") from error
        answers: dict[int, TeacherScores] = {}
        for share, row in zip(shares, rows, strict=True):
            for place, judged in zip(
                share,
                cast("list[tuple[list[float], list[list[int]], list[list[float]]]]", row or []),
                strict=True,
            ):
                answers[place] = _make_scores(
                    questions[place], judged, top_k=top_k, vocab_size=self._vocab_size
                )
        return [answers[place] for place in range(len(questions))]

    def close(self) -> None:
        """End the servers."""
        self.servers.close()


def build_vllm_teacher(
    name: str, config: TrainerConfig, *, replicas: Sequence[Replica], vocab_size: int
) -> VllmTeacher:
    """A teacher on servers that the runtime has placed; they start here."""
    spec = build_teacher_server_spec(name, config.teachers[name], config=config)
    servers = VllmSampler(replicas, spec=spec, max_restarts=config.rollout.vllm.max_restarts)
    return VllmTeacher(name, servers=servers, vocab_size=vocab_size)


def _make_scores(
    question: TeacherRequest,
    judged: tuple[list[float], list[list[int]], list[list[float]]],
    *,
    top_k: int,
    vocab_size: int,
) -> TeacherScores:
    given, ids, logs = judged
    answer = TeacherScores(request_id=question.request_id, logprobs=torch.tensor(given))
    if not top_k:
        return answer
    named = torch.tensor(
        [[*row, *[0] * (top_k - len(row))] for row in ids], dtype=torch.int64
    ).view(-1, top_k)
    logprobs = torch.tensor([[*row, *[-torch.inf] * (top_k - len(row))] for row in logs]).view(
        -1, top_k
    )
    is_token = named < vocab_size
    return replace(
        answer,
        top_ids=torch.where(is_token, named, 0),
        top_logprobs=torch.where(is_token, logprobs, -torch.inf),
    )
