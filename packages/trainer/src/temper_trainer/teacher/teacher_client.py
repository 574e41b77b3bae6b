"""From a step's samples to columns of teacher log-probs: each sample to the teacher of its route, through its token map."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import LOGPROB_AT_IDS
from temper_trainer.teacher.teacher_protocol import (
    Teacher,
    TeacherError,
    TeacherRequest,
    TeacherScores,
    check_scores,
)
from temper_trainer.teacher.teacher_spec import TeacherSpec
from temper_trainer.teacher.token_map import TokenMap

TEACHER_LOGPROBS = "teacher_logprobs"
"""Name of the [T] float32 column of log-probs of the given tokens."""
TEACHER_TOP_LOGPROBS = "teacher_top_logprobs"
"""Name of the [T, K] float32 column of log-probs of the tokens in the column ``logprob_at_ids``."""
TEACHER_WEIGHTS = "teacher_weights"
"""Name of the [T] float32 column of the teacher's factor, 0 where no teacher answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherClient:
    """Asks the teachers; holds no configuration but the spec."""

    spec: TeacherSpec
    """Routes and weights."""
    teachers: Mapping[str, Teacher]
    """By name."""
    token_maps: Mapping[str, TokenMap] = field(default_factory=dict)
    """Of the teachers whose tokenizer differs."""

    def columns(
        self, samples: SequenceBatch, *, routes: Sequence[str]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """The teachers' columns of a step, and numbers for the log.

        Args:
            samples: B; asked is about every trained token.
            routes: of each sample's prompt.

        Raises:
            ConfigError: a route has no teacher.
            TeacherError: see Teacher.answer; or not one sample could be translated into a teacher's tokens.
        """
        asked: dict[str, list[TeacherRequest]] = {name: [] for name in self.teachers}
        num_unmapped = 0
        starts, firsts = samples.sequence_starts.tolist(), _first_trained(samples)
        for i, route in enumerate(routes):
            if firsts[i] is None:
                continue
            name = self._teacher_of(route)
            tokens = self._translated(name, samples.tokens[starts[i] : starts[i + 1]].tolist())
            if tokens is None:
                num_unmapped += 1
                continue
            asked[name].append(
                TeacherRequest(
                    request_id=i,
                    tokens=tokens,
                    first=firsts[i] or 1,
                    temperature=float(samples.temperature[i]),
                )
            )
        self._check_taught(num_asked=sum(map(len, asked.values())), num_unmapped=num_unmapped)
        columns = self._empty(samples)
        pool = ThreadPoolExecutor(max_workers=max(1, len(asked)))
        try:
            found = {
                name: pool.submit(self._ask, name, questions)
                for name, questions in asked.items()
                if questions
            }
            for name, answers in found.items():
                for question, answer in zip(asked[name], answers.result(), strict=True):
                    self._fill(
                        columns, answer, at=starts[question.request_id] + question.first, name=name
                    )
        finally:
            # Not waited for: where one teacher fails, another may hang.
            pool.shutdown(wait=False, cancel_futures=True)
        metrics = {
            f"teacher/{name}/samples": float(len(questions)) for name, questions in asked.items()
        }
        return columns, {**metrics, "teacher/unmapped_samples": float(num_unmapped)}

    def close(self) -> None:
        """Free every teacher."""
        for teacher in self.teachers.values():
            teacher.close()

    def _check_taught(self, *, num_asked: int, num_unmapped: int) -> None:
        if num_unmapped and not num_asked:
            raise TeacherError(
                f"not one of {num_unmapped} completions could be translated into a teacher's tokens, so that nothing would be learned: "
                "the tokenizers share too little. Take a teacher with the policy's tokenizer."
            )

    def _teacher_of(self, route: str) -> str:
        name = self.spec.find_teacher(route)
        if name is None:
            raise ConfigError(
                f"a prompt has the route {route!r}, but the teachers' routes are {', '.join(route for route, _ in self.spec.routes)}: "
                "set data.train.route_key to the field that names them, or teachers.NAME.route."
            )
        return name

    def _translated(self, name: str, tokens: list[int]) -> tuple[int, ...] | None:
        return (
            self.token_maps[name].to_teacher(tokens) if name in self.token_maps else tuple(tokens)
        )

    def _ask(self, name: str, questions: Sequence[TeacherRequest]) -> list[TeacherScores]:
        answers = self.teachers[name].answer(
            questions, top_k=self.spec.top_k, timeout_s=self.spec.timeout_s
        )
        for question, answer in zip(questions, answers, strict=True):
            check_scores(answer, question, top_k=self.spec.top_k, teacher=name)
        return answers

    def _empty(self, samples: SequenceBatch) -> dict[str, Tensor]:
        size = samples.num_tokens
        columns = {TEACHER_LOGPROBS: torch.zeros(size), TEACHER_WEIGHTS: torch.zeros(size)}
        if self.spec.top_k:
            columns |= {
                LOGPROB_AT_IDS: torch.zeros(size, self.spec.top_k, dtype=torch.int64),
                TEACHER_TOP_LOGPROBS: torch.full((size, self.spec.top_k), -torch.inf),
            }
        return columns

    def _fill(
        self, columns: dict[str, Tensor], answer: TeacherScores, *, at: int, name: str
    ) -> None:
        place = slice(at, at + len(answer.logprobs))
        columns[TEACHER_LOGPROBS][place] = answer.logprobs
        columns[TEACHER_WEIGHTS][place] = self.spec.get_weight(name)
        if answer.top_ids is not None and answer.top_logprobs is not None:
            ids, logprobs = answer.top_ids, answer.top_logprobs
            if name in self.token_maps:
                ids, logprobs = self.token_maps[name].to_policy(ids, logprobs)
            columns[LOGPROB_AT_IDS][place], columns[TEACHER_TOP_LOGPROBS][place] = ids, logprobs


def _first_trained(samples: SequenceBatch) -> list[int | None]:
    """Position of each sample's first trained token within it; None where nothing is trained."""
    found: list[int | None] = []
    for first, last in zip(
        samples.sequence_starts[:-1].tolist(), samples.sequence_starts[1:].tolist(), strict=True
    ):
        trained = torch.nonzero(samples.loss_mask[first:last])[:, 0]
        found.append(int(trained[0]) if len(trained) else None)
    return found
