"""Teachers on engines: each replica a worker group of its own, asked at once; and how a run opens them."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from temper_engine_api.batch import PackedBatch, from_sequences
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import LOGPROB_AT_IDS, HeadOutput
from temper_engine_api.outputs import ForwardOutputs
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.rollout.replica import Replica
from temper_trainer.runtime.placement import format_teacher_role
from temper_trainer.runtime.training_worker import TrainingWorker
from temper_trainer.runtime.vllm_teacher import build_vllm_teacher
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.teacher.balance import assign_to_replicas
from temper_trainer.teacher.teacher_client import TeacherClient
from temper_trainer.teacher.teacher_protocol import (
    Teacher,
    TeacherError,
    TeacherRequest,
    TeacherScores,
)
from temper_trainer.teacher.teacher_spec import build_teacher_spec
from temper_trainer.teacher.token_map import TokenMap, build_token_map


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScores:
    """What one rank of a teacher says of its share, in the share's layout without dummies."""

    sample_ids: Tensor
    """[B] int64."""
    lengths: Tensor
    """[B] int64 tokens of each."""
    logprobs: Tensor
    """[T] float32."""
    top_ids: Tensor
    """[T, K] int64."""
    top_logprobs: Tensor
    """[T, K] float32."""


class EngineTeacher:
    """A frozen model on any engine; see Teacher."""

    def __init__(
        self, name: str, *, replicas: Sequence[WorkerGroup], max_tokens: int, vocab_size: int
    ) -> None:
        """A teacher whose groups are initialised.

        Args:
            name: for messages.
            replicas: worker groups that hold the same weights.
            max_tokens: cap of a micro-batch.
            vocab_size: ids below this are candidates for the likeliest tokens.
        """
        self._name = name
        self._replicas = list(replicas)
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size

    @property
    def num_replicas(self) -> int:
        """Worker groups."""
        return len(self._replicas)

    def answer(
        self, questions: Sequence[TeacherRequest], *, top_k: int, timeout_s: float
    ) -> list[TeacherScores]:
        """One answer for each question; see Teacher."""
        answers: dict[int, TeacherScores] = {}
        shares = assign_to_replicas(questions, num_replicas=self.num_replicas)
        deadline = time.monotonic() + timeout_s
        pool = ThreadPoolExecutor(max_workers=self.num_replicas)
        try:
            running = [
                pool.submit(self._ask, group, [questions[i] for i in share], top_k=top_k)
                for group, share in zip(self._replicas, shares, strict=True)
                if share
            ]
            for future in running:
                answers |= {
                    answer.request_id: answer
                    for answer in future.result(timeout=max(0.0, deadline - time.monotonic()))
                }
        except FutureTimeoutError as error:
            raise TeacherError(
                f"teacher {self._name} did not answer within distillation.timeout_s = {timeout_s} s: raise it, or "
                f"teachers.{self._name}.num_replicas."
            ) from error
        finally:
            # Not waited for: a replica that hangs would keep its own time-out from being told.
            pool.shutdown(wait=False, cancel_futures=True)
        return [answers[question.request_id] for question in questions]

    def close(self) -> None:
        """Free every replica."""
        for group in self._replicas:
            group.close()

    def _ask(
        self, group: WorkerGroup, questions: Sequence[TeacherRequest], *, top_k: int
    ) -> list[TeacherScores]:
        batch = from_sequences(
            [torch.tensor(question.tokens) for question in questions],
            loss_masks=[
                torch.arange(len(question.tokens)) >= question.first for question in questions
            ],
            temperature=[question.temperature for question in questions],
        )
        longest = max(len(question.tokens) for question in questions)
        topology = group.topology
        plan = plan_mini_batch(
            batch.lengths.tolist(),
            dp_size=topology.dp.size,
            max_tokens=max(self._max_tokens, longest),
            constraints=topology.plan_constraints,
        )
        denominators = count_denominators(batch)
        parts = [
            build_packed_batch(batch, plan=plan, rank=rank, denominators=denominators)
            for rank in range(topology.dp.size)
        ]
        by_rank = [(parts[place.dp.rank], top_k, self._vocab_size) for place in group.topologies]
        judged = [part for part in group.run(score_tokens, by_rank) if part is not None]
        return _collect_scores(judged, questions, top_k=top_k)


def score_tokens(
    worker: TrainingWorker, part: PackedBatch, top_k: int, vocab_size: int
) -> RankScores | None:
    """This rank's log-probs of a share, and its likeliest tokens where ``top_k`` is above 0; None where it returns no outputs.

    Engines answer log-probs of given ids, so the likeliest are found by asking for all of them, one micro-batch after the other:
    [tokens of a micro-batch, vocab_size] float32 are held at once.
    """
    found: list[tuple[ForwardOutputs, Tensor, Tensor]] = []
    for i, micro in enumerate(part.micro_batches()):
        columns, requested_outputs = {}, [HeadOutput.LOGPROB]
        if top_k:
            columns[LOGPROB_AT_IDS] = torch.arange(vocab_size).expand(micro.num_tokens, vocab_size)
            requested_outputs.append(HeadOutput.LOGPROB_AT)
        single = PackedBatch(
            tokens=micro.tokens,
            sequence_starts=micro.sequence_starts,
            loss_mask=micro.loss_mask,
            sample_ids=micro.sample_ids,
            group_ids=micro.group_ids,
            pack_group_ids=micro.pack_group_ids,
            temperature=micro.temperature,
            columns=columns,
            micro_batch_starts=torch.tensor([0, micro.num_sequences], dtype=torch.int32),
            denominators=part.denominators,
        )
        outputs = worker.forward(single, requested_outputs).outputs
        if outputs is None:
            continue
        assert i == len(found)
        ids, logs = torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, 0)
        if top_k:
            logs, ids = outputs.columns[HeadOutput.LOGPROB_AT].topk(min(top_k, vocab_size), dim=-1)
        found.append(
            (
                replace(outputs, columns={HeadOutput.LOGPROB: outputs.columns[HeadOutput.LOGPROB]}),
                ids,
                logs,
            )
        )
    if not found:
        return None
    return RankScores(
        sample_ids=torch.cat([outputs.sample_ids for outputs, _, _ in found]),
        lengths=torch.cat([outputs.sequence_starts.diff() for outputs, _, _ in found]),
        logprobs=torch.cat([outputs.columns[HeadOutput.LOGPROB] for outputs, _, _ in found]),
        top_ids=torch.cat([ids for _, ids, _ in found]),
        top_logprobs=torch.cat([logs for _, _, logs in found]),
    )


def _collect_scores(
    judged: Sequence[RankScores], questions: Sequence[TeacherRequest], *, top_k: int
) -> list[TeacherScores]:
    rows: dict[int, TeacherScores] = {}
    for part in judged:
        start = 0
        for place, length in zip(part.sample_ids.tolist(), part.lengths.tolist(), strict=True):
            question = questions[place]
            own = slice(start + question.first, start + length)
            rows[place] = TeacherScores(
                request_id=question.request_id,
                logprobs=part.logprobs[own],
                top_ids=_pad_columns(part.top_ids[own], width=top_k, filler=0) if top_k else None,
                top_logprobs=_pad_columns(part.top_logprobs[own], width=top_k, filler=-torch.inf)
                if top_k
                else None,
            )
            start += length
    return [rows[i] for i in range(len(questions))]


def _pad_columns(rows: Tensor, *, width: int, filler: float) -> Tensor:
    """[N, width]: a vocabulary smaller than top_k leaves the rest to the filler."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=filler)


class GroupFactory(Protocol):
    """A runtime, as far as models on engines are concerned."""

    def open_group(
        self, role: str, *, engine: EngineConfig, num_workers: int, is_deprecated: bool = False
    ) -> WorkerGroup:
        """The ranks of one role, not yet initialised."""
        ...


class TeacherRuntime(GroupFactory, Protocol):
    """A runtime, as far as teachers are concerned."""

    def make_teacher_servers(self, name: str, config: TrainerConfig) -> Sequence[Replica]:
        """The servers of a teacher of backend vllm, not yet started."""
        ...


def build_teachers(
    config: TrainerConfig, *, runtime: TeacherRuntime, tokenizer: PreTrainedTokenizerBase
) -> TeacherClient | None:
    """Every teacher of a run with its token map; None where there is none. What was opened is closed again when one fails.

    Raises:
        ConfigError: a tokenizer differs and is not to be mapped, or a backend is not there.
    """
    if not config.teachers:
        return None
    maps: dict[str, TokenMap] = {}
    teachers: dict[str, Teacher] = {}
    with ExitStack() as stack:
        for name, teacher in config.teachers.items():
            found = _load_token_map(name, teacher, config=config, tokenizer=tokenizer)
            if found is not None:
                maps[name] = found
        for name, teacher in config.teachers.items():
            vocab_size = len(maps[name].backward) if name in maps else len(tokenizer)
            if teacher.backend == "vllm":
                teachers[name] = build_vllm_teacher(
                    name,
                    config,
                    replicas=runtime.make_teacher_servers(name, config),
                    vocab_size=vocab_size,
                )
            else:
                teachers[name] = _build_engine_teacher(
                    name, teacher, config=config, runtime=runtime, vocab_size=vocab_size
                )
            stack.callback(teachers[name].close)
        stack.pop_all()
    return TeacherClient(
        spec=build_teacher_spec(config.teachers, config.distillation),
        teachers=teachers,
        token_maps=maps,
    )


def _build_engine_teacher(
    name: str,
    teacher: TeacherConfig,
    *,
    config: TrainerConfig,
    runtime: GroupFactory,
    vocab_size: int,
) -> EngineTeacher:
    replicas: list[WorkerGroup] = []
    with ExitStack() as stack:
        for replica in range(teacher.num_replicas):
            group = runtime.open_group(
                format_teacher_role(name, replica),
                engine=replace(teacher.engine, optimizer=None),
                num_workers=teacher.num_workers,
            )
            stack.callback(group.close)
            group.init()
            replicas.append(group)
        stack.pop_all()
    return EngineTeacher(
        name, replicas=replicas, max_tokens=config.batching.max_tokens, vocab_size=vocab_size
    )


def _load_token_map(
    name: str, teacher: TeacherConfig, *, config: TrainerConfig, tokenizer: PreTrainedTokenizerBase
) -> TokenMap | None:
    """None for a teacher from scratch, which takes the policy's tokenizer."""
    path = teacher.engine.model.path
    if path is None:
        return None
    if not any(
        (Path(path) / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise ConfigError(
            f"teachers.{name}.engine.model.path {path} holds no tokenizer, so nothing says whether its tokens are the policy's: copy the "
            "tokenizer's files there."
        )
    theirs = AutoTokenizer.from_pretrained(path)
    return build_token_map(
        tokenizer, theirs, name=name, may_map=config.distillation.tokenizer_mismatch == "map"
    )
