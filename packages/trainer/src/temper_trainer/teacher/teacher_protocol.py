"""The teacher interface, which returns log-probs for given token sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from temper_engine_api.errors import TemperError


class TeacherError(TemperError, RuntimeError):
    """A teacher died, timed out, or returned an invalid result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRequest:
    """One token sequence to score.

    Example:
        >>> request = TeacherRequest(
        ...     request_id=0, tokens=(1, 5, 7, 9, 2), first_position=3, temperature=1.0
        ... )
        >>> request.tokens[request.first_position :]  # these are scored
        (9, 2)
    """

    request_id: int
    """Unique within one call."""
    tokens: tuple[int, ...]
    """Prompt and everything after it, in the teacher's token ids."""
    first_position: int
    """Position of the first token to score, at least 1; all tokens after it are scored too."""
    temperature: float
    """Divides the teacher's logits, as it divided the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """The log-probs of one request, for N = len(tokens) - first_position tokens."""

    request_id: int
    logprobs: Tensor
    """[N] float32 log-prob of each given token under the teacher."""
    top_ids: Tensor | None = None
    """[N, K] int64 ids of the most likely tokens, in descending order; None if top_k is 0."""
    top_logprobs: Tensor | None = None
    """[N, K] float32 log-probs of `top_ids`; -inf pads rows with fewer tokens."""


class Teacher(Protocol):
    """One frozen model with all its replicas. It is never offloaded."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas that score in parallel."""
        ...

    def score(
        self, requests: Sequence[TeacherRequest], *, top_k: int, timeout_s: float
    ) -> list[TeacherScores]:
        """Score sequences; return one result for each request, in their order.

        Args:
            requests: Any number.
            top_k: Number of most likely tokens to return at each position; 0 returns none.
            timeout_s: Longest wait for all of them.

        Raises:
            TeacherError: If a replica dies, times out, or returns an invalid result.
        """
        ...

    def close(self) -> None:
        """Free every replica."""
        ...


def check_scores(
    scores: TeacherScores, request: TeacherRequest, *, top_k: int, teacher: str
) -> None:
    """Refuse scores of another length, and NaN.

    Raises:
        TeacherError: Names the teacher and the request.
    """
    expected = len(request.tokens) - request.first_position
    num_scores = len(scores.logprobs)
    if scores.request_id != request.request_id or num_scores != expected:
        raise TeacherError(
            f"teacher {teacher} returned {num_scores} log-probs for request {request.request_id}, "
            f"but {expected} were expected: report this as a bug."
        )
    columns = [each for each in (scores.logprobs, scores.top_logprobs) if each is not None]
    # -inf is allowed: a token with probability 0, or padding after the most likely tokens.
    if any(bool(column.isnan().any()) for column in columns):
        raise TeacherError(
            f"teacher {teacher} returned NaN for request {request.request_id}: check its weights "
            "and its precision."
        )
    if top_k:
        shapes = [
            None if column is None else tuple(column.shape)
            for column in (scores.top_ids, scores.top_logprobs)
        ]
        if shapes != [(expected, top_k)] * 2:
            raise TeacherError(
                f"teacher {teacher} returned most likely tokens of shapes {shapes}, but "
                f"({expected}, {top_k}) was expected: report this as a bug."
            )


def assign_to_replicas(requests: Sequence[TeacherRequest], *, num_replicas: int) -> list[list[int]]:
    """Return the request indices for each replica.

    The longest request goes first, each to the replica with the fewest tokens so far.
    Deterministic, so that a repeated step sends the same requests to the same replica.
    """
    loads = [0] * num_replicas
    assigned: list[list[int]] = [[] for _ in range(num_replicas)]
    for index in sorted(range(len(requests)), key=lambda i: (-len(requests[i].tokens), i)):
        # Longest first, so that the short ones fill the gaps: this bounds the slowest replica.
        replica = loads.index(min(loads))
        assigned[replica].append(index)
        loads[replica] += len(requests[index].tokens)
    return assigned
