"""A teacher on vLLM servers, which load its weights from disk and never sleep."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import cast

import torch

from temper_engine_api.errors import ConfigError
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.sampler import Replica, ReplicaError
from temper_trainer.rollout.vllm.server_methods import PromptLogprobs
from temper_trainer.rollout.vllm.server_spec import build_teacher_server_spec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.teacher.teacher_protocol import (
    TeacherError,
    TeacherRequest,
    TeacherScores,
    assign_to_replicas,
)


class VllmTeacher:
    """A Teacher on vLLM servers."""

    def __init__(self, name: str, *, servers: VllmSampler, vocab_size: int) -> None:
        """Create a teacher.

        Args:
            name: Name for messages.
            servers: Running servers with the same weights.
            vocab_size: Number of tokens. Ids of this size or above are output head padding.
        """
        self._name = name
        self._vocab_size = vocab_size
        self.servers = servers
        """The replicas."""

    @property
    def num_replicas(self) -> int:
        """Number of servers."""
        return len(self.servers.replicas)

    def score(
        self, requests: Sequence[TeacherRequest], *, top_k: int, timeout_s: float
    ) -> list[TeacherScores]:
        """Score sequences; see Teacher.

        Raises:
            ConfigError: If a temperature is not 1: vLLM reports log-probs of prompts only at 1.
        """
        tempered = next((request for request in requests if request.temperature != 1), None)
        if tempered is not None:
            raise ConfigError(
                f"teachers.{self._name}.backend is vllm, which scores only at temperature 1, but "
                f"sampling.temperature is {tempered.temperature}: set it to 1, or set "
                f"teachers.{self._name}.backend=engine."
            )
        assigned = assign_to_replicas(requests, num_replicas=self.num_replicas)
        arguments = [
            ([(requests[i].tokens, requests[i].first_position) for i in indices], top_k)
            if indices
            else None
            for indices in assigned
        ]
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                replica_results = pool.submit(
                    self.servers.call_each, "score_prompts", arguments
                ).result(timeout=timeout_s)
            except FutureTimeoutError as error:
                # Leaving the with block waits for the thread, so close the servers: that makes its
                # call return.
                self.servers.close()
                raise TeacherError(
                    f"teacher {self._name} did not answer within distillation.timeout_s = "
                    f"{timeout_s} s: raise it, or teachers.{self._name}.num_replicas."
                ) from error
            except ReplicaError as error:
                raise TeacherError(f"teacher {self._name}: {error}") from error
        results: dict[int, TeacherScores] = {}
        for indices, result in zip(assigned, replica_results, strict=True):
            logprobs = cast("list[PromptLogprobs]", result or [])
            for index, prompt_logprobs in zip(indices, logprobs, strict=True):
                results[index] = _make_scores(
                    requests[index], prompt_logprobs, top_k=top_k, vocab_size=self._vocab_size
                )
        return [results[index] for index in range(len(requests))]

    def close(self) -> None:
        """End the servers."""
        self.servers.close()


def build_vllm_teacher(
    name: str, config: TrainerConfig, *, replicas: Sequence[Replica], vocab_size: int
) -> VllmTeacher:
    """Start the servers of a teacher, which the runtime has placed."""
    spec = build_teacher_server_spec(name, config.teachers[name], config=config)
    servers = VllmSampler(replicas, spec=spec, max_restarts=config.rollout.vllm.max_restarts)
    return VllmTeacher(name, servers=servers, vocab_size=vocab_size)


def _make_scores(
    request: TeacherRequest, prompt_logprobs: PromptLogprobs, *, top_k: int, vocab_size: int
) -> TeacherScores:
    token_logprobs, top_ids, top_logprobs = prompt_logprobs
    scores = TeacherScores(request_id=request.request_id, logprobs=torch.tensor(token_logprobs))
    if not top_k:
        return scores
    # Rows are shorter than top_k if the vocabulary is.
    ids = torch.tensor(
        [[*row, *[0] * (top_k - len(row))] for row in top_ids], dtype=torch.int64
    ).view(-1, top_k)
    logprobs = torch.tensor(
        [[*row, *[-torch.inf] * (top_k - len(row))] for row in top_logprobs]
    ).view(-1, top_k)
    # The output head may be padded with rows that stand for no token.
    is_token = ids < vocab_size
    return replace(
        scores,
        top_ids=torch.where(is_token, ids, 0),
        top_logprobs=torch.where(is_token, logprobs, -torch.inf),
    )
