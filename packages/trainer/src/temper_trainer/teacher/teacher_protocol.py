"""What a teacher is asked about a completion, and what it answers: log-probs of the given tokens, and its own likeliest ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from temper_engine_api.errors import TemperError


class TeacherError(TemperError, RuntimeError):
    """A teacher died, did not answer in time, or answered something else than it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRequest:
    """One token sequence to be judged."""

    request_id: int
    """Unique within one call."""
    tokens: tuple[int, ...]
    """Prompt and everything after it, in the teacher's own ids."""
    first: int
    """Position of the first token to answer for, at least 1; the answer reaches to the last token."""
    temperature: float
    """Divides the teacher's logits, as it did the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """A ragged row: N = len(tokens) - first positions."""

    request_id: int
    """Of its question."""
    logprobs: Tensor
    """[N] float32 log-prob of each given token under the teacher."""
    top_ids: Tensor | None = None
    """[N, K] int64 the teacher's likeliest tokens, likeliest first; None where top_k is 0."""
    top_logprobs: Tensor | None = None
    """[N, K] float32 of them; -inf fills rows of fewer tokens."""


class Teacher(Protocol):
    """One frozen model with all its replicas; it is never offloaded and never sleeps."""

    @property
    def num_replicas(self) -> int:
        """Copies that answer at once."""
        ...

    def answer(
        self, questions: Sequence[TeacherRequest], *, top_k: int, timeout_s: float
    ) -> list[TeacherScores]:
        """One answer for each question, in their order.

        Args:
            questions: in any number.
            top_k: how many likeliest tokens to name at each position; 0 names none.
            timeout_s: longest wait for all of them.

        Raises:
            TeacherError: a replica died, was late, or answered fewer positions than it was asked for.
        """
        ...

    def close(self) -> None:
        """Free every replica."""
        ...


def check_scores(
    answer: TeacherScores, question: TeacherRequest, *, top_k: int, teacher: str
) -> None:
    """Refuse an answer of another length or with a number that is none.

    Raises:
        TeacherError: naming the teacher and the question.
    """
    expected = len(question.tokens) - question.first
    found = len(answer.logprobs)
    if answer.request_id != question.request_id or found != expected:
        raise TeacherError(
            f"teacher {teacher} answered {found} of {expected} positions of question {question.request_id}: ask it again."
        )
    numbers = [column for column in (answer.logprobs, answer.top_logprobs) if column is not None]
    if any(bool(column.isnan().any()) for column in numbers):
        raise TeacherError(
            f"teacher {teacher} answered NaN to question {question.request_id}: look at its weights and precision."
        )
    if top_k:
        shapes = [
            None if column is None else tuple(column.shape)
            for column in (answer.top_ids, answer.top_logprobs)
        ]
        if shapes != [(expected, top_k)] * 2:
            raise TeacherError(
                f"teacher {teacher} named tokens of shapes {shapes}, but ({expected}, {top_k}) was asked for."
            )
