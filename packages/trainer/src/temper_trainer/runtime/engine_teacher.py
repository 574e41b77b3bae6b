"""A teacher on a training engine: each replica is a worker group."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch, from_sequences
from temper_engine_api.objective import LOGPROB_AT_IDS, HeadOutput
from temper_engine_api.outputs import ForwardOutputs
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators
from temper_trainer.runtime.worker_group import TrainingWorker, WorkerGroup
from temper_trainer.teacher.teacher_protocol import (
    TeacherError,
    TeacherRequest,
    TeacherScores,
    assign_to_replicas,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScores:
    """Scores from one teacher rank, in sample order, without dummy samples."""

    sample_ids: Tensor
    """[B] int64 request indices."""
    lengths: Tensor
    """[B] int64 number of tokens per sample."""
    logprobs: Tensor
    """[T] float32 of the given tokens."""
    top_ids: Tensor
    """[T, K] int64, most likely token first."""
    top_logprobs: Tensor
    """[T, K] float32 log-probs of ``top_ids``."""


class EngineTeacher:
    """A Teacher on any engine."""

    def __init__(
        self,
        name: str,
        *,
        replicas: Sequence[WorkerGroup],
        max_tokens: int,
        vocab_size: int,
        owns_replicas: bool = True,
    ) -> None:
        """Create a teacher.

        Args:
            name: Name for messages.
            replicas: Initialized worker groups with the same weights.
            max_tokens: Maximum number of tokens per micro-batch.
            vocab_size: Size of the policy's vocabulary. The teacher's most likely tokens are chosen
                among the ids below it, because the policy has no others.
            owns_replicas: True to free the replicas in `close`.
        """
        self._owns_replicas = owns_replicas
        self._name = name
        self._replicas = list(replicas)
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size

    @property
    def num_replicas(self) -> int:
        """Number of worker groups."""
        return len(self._replicas)

    def score(
        self, requests: Sequence[TeacherRequest], *, top_k: int, timeout_s: float
    ) -> list[TeacherScores]:
        """Score sequences; see Teacher."""
        results: dict[int, TeacherScores] = {}
        assigned = assign_to_replicas(requests, num_replicas=self.num_replicas)
        # One deadline for all replicas: they work in parallel.
        deadline = time.monotonic() + timeout_s
        pool = ThreadPoolExecutor(max_workers=self.num_replicas)
        try:
            running = [
                pool.submit(self._score, group, [requests[i] for i in indices], top_k=top_k)
                for group, indices in zip(self._replicas, assigned, strict=True)
                if indices
            ]
            for future in running:
                results |= {
                    scores.request_id: scores
                    for scores in future.result(timeout=max(0.0, deadline - time.monotonic()))
                }
        except FutureTimeoutError as error:
            raise TeacherError(
                f"teacher {self._name} did not answer within distillation.timeout_s = {timeout_s} "
                f"s: raise it, or teachers.{self._name}.num_replicas."
            ) from error
        finally:
            # Do not wait: a replica that hangs would also block its timeout report.
            pool.shutdown(wait=False, cancel_futures=True)
        return [results[request.request_id] for request in requests]

    def close(self) -> None:
        """Free every replica, unless they are roles in the run."""
        for group in self._replicas if self._owns_replicas else ():
            group.close()

    def _score(
        self, group: WorkerGroup, requests: Sequence[TeacherRequest], *, top_k: int
    ) -> list[TeacherScores]:
        batch = from_sequences(
            [torch.tensor(request.tokens) for request in requests],
            loss_masks=[
                torch.arange(len(request.tokens)) >= request.first_position for request in requests
            ],
            temperature=[request.temperature for request in requests],
        )
        longest = max(len(request.tokens) for request in requests)
        topology = group.topology
        plan = plan_mini_batch(
            batch.lengths.tolist(),
            dp_size=topology.dp.size,
            # A sequence cannot be split, and a teacher without gradients has memory for a longer
            # one.
            max_tokens=max(self._max_tokens, longest),
            constraints=topology.plan_constraints,
        )
        denominators = count_denominators(batch)
        parts = [
            build_packed_batch(batch, plan=plan, rank=rank, denominators=denominators)
            for rank in range(topology.dp.size)
        ]
        arguments = [
            (parts[topology.dp.rank], top_k, self._vocab_size) for topology in group.topologies
        ]
        scores = [each for each in group.run(score_tokens, arguments) if each is not None]
        return _collect_scores(scores, requests, top_k=top_k)


def score_tokens(
    worker: TrainingWorker, part: PackedBatch, top_k: int, vocab_size: int
) -> RankScores | None:
    """Return the log-probs of this rank's samples, and the `top_k` most likely tokens.

    Engines return log-probs of given ids, so the most likely tokens are found by requesting all
    ids, one micro-batch after the other. This needs memory for [tokens of a micro-batch,
    vocab_size] float32.

    Returns:
        None on ranks that return no outputs, such as earlier pipeline stages.
    """
    micro_scores: list[tuple[ForwardOutputs, Tensor, Tensor]] = []
    for i, micro in enumerate(part.iterate_micro_batches()):
        requested_outputs = [HeadOutput.LOGPROB]
        if top_k:
            all_ids = torch.arange(vocab_size).expand(micro.num_tokens, vocab_size)
            micro = micro.with_columns({LOGPROB_AT_IDS: all_ids})
            requested_outputs.append(HeadOutput.LOGPROB_AT)
        # One micro-batch per call: a batch's log-probs for the full vocabulary would not fit.
        single = PackedBatch(
            **{column.name: getattr(micro, column.name) for column in fields(SequenceBatch)},
            micro_batch_starts=torch.tensor([0, micro.num_sequences], dtype=torch.int32),
            denominators=part.denominators,
        )
        outputs = worker.forward(single, requested_outputs).outputs
        if outputs is None:
            continue
        assert i == len(micro_scores)
        ids, logs = torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0)
        if top_k:
            logs, ids = outputs.columns[HeadOutput.LOGPROB_AT].topk(min(top_k, vocab_size), dim=-1)
        micro_scores.append(
            (
                replace(outputs, columns={HeadOutput.LOGPROB: outputs.columns[HeadOutput.LOGPROB]}),
                ids,
                logs,
            )
        )
    if not micro_scores:
        return None
    return RankScores(
        sample_ids=torch.cat([outputs.sample_ids for outputs, _, _ in micro_scores]),
        lengths=torch.cat([outputs.sequence_starts.diff() for outputs, _, _ in micro_scores]),
        logprobs=torch.cat([outputs.columns[HeadOutput.LOGPROB] for outputs, _, _ in micro_scores]),
        top_ids=torch.cat([ids for _, ids, _ in micro_scores]),
        top_logprobs=torch.cat([logs for _, _, logs in micro_scores]),
    )


def _collect_scores(
    rank_scores: Sequence[RankScores], requests: Sequence[TeacherRequest], *, top_k: int
) -> list[TeacherScores]:
    rows: dict[int, TeacherScores] = {}
    for part in rank_scores:
        start = 0
        for index, length in zip(part.sample_ids.tolist(), part.lengths.tolist(), strict=True):
            request = requests[index]
            scored = slice(start + request.first_position, start + length)
            rows[index] = TeacherScores(
                request_id=request.request_id,
                logprobs=part.logprobs[scored],
                top_ids=_pad_columns(part.top_ids[scored], width=top_k, filler=0)
                if top_k
                else None,
                top_logprobs=_pad_columns(part.top_logprobs[scored], width=top_k, filler=-torch.inf)
                if top_k
                else None,
            )
            start += length
    # Ranks have scored the requests in the order from balancing.
    return [rows[i] for i in range(len(requests))]


def _pad_columns(rows: Tensor, *, width: int, filler: float) -> Tensor:
    """Pad [N, K] to [N, width]; K is smaller if the vocabulary has fewer than top_k tokens."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=filler)
