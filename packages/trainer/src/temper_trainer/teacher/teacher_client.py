"""Score the samples of a step with their teachers and return the result as batch columns."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import LOGPROB_AT_IDS
from temper_trainer.config.distillation import DistillationConfig, TeacherConfig
from temper_trainer.teacher.teacher_protocol import (
    Teacher,
    TeacherError,
    TeacherRequest,
    TeacherScores,
    check_scores,
)
from temper_trainer.teacher.token_map import TokenMap
from temper_trainer.types import Prompt

TEACHER_LOGPROBS = "teacher_logprobs"
"""Name of the [T] float32 column with log-probs for the given tokens."""
TEACHER_TOP_LOGPROBS = "teacher_top_logprobs"
"""Name of the [T, K] float32 column with log-probs for the tokens in column `logprob_at_ids`."""
TEACHER_WEIGHTS = "teacher_weights"
"""Name of the [T] float32 column with the teacher's weight, 0 for tokens without teacher."""
SELF_TEACHER = "self"
"""Name of the policy as its own teacher."""
MAX_PICKLED_BYTES = 4096
"""Largest serialized TeacherSpec, which a test checks: it contains no model configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSpec:
    """Routes and weights for all teachers."""

    routes: tuple[tuple[str, str], ...]
    """Pairs of a route, which is a value of the field `route_key` in the data, and the name of its
    teacher."""
    weights: tuple[tuple[str, float], ...]
    """Pairs of a teacher's name and the factor for its loss or reward."""
    top_k: int
    """Number of most likely tokens to request; 0 requests none."""
    timeout_s: float

    def find_teacher(self, route: str) -> str | None:
        """Return a route's teacher. If there is only one teacher, it has every route."""
        return dict(self.routes).get(route, self.routes[0][1] if len(self.routes) == 1 else None)

    def get_weight(self, teacher: str) -> float:
        """Return the factor of a teacher's loss or reward."""
        return dict(self.weights)[teacher]


def build_self_teacher_spec(config: DistillationConfig) -> TeacherSpec:
    """Build the spec with the policy as only teacher, for all routes."""
    return TeacherSpec(
        routes=((SELF_TEACHER, SELF_TEACHER),),
        weights=((SELF_TEACHER, 1.0),),
        top_k=config.loss.num_teacher_tokens,
        timeout_s=config.timeout_s,
    )


def build_teacher_spec(
    teachers: Mapping[str, TeacherConfig], config: DistillationConfig
) -> TeacherSpec:
    """Build the spec for a configuration.

    Raises:
        ConfigError: If two teachers have the same route.
    """
    routes = tuple(
        (teacher.route if teacher.route is not None else name, name)
        for name, teacher in teachers.items()
    )
    if len(dict(routes)) < len(routes):
        listed = ", ".join(f"{name}: {route}" for route, name in routes)
        raise ConfigError(f"two teachers have the same route ({listed}): set teachers.NAME.route.")
    return TeacherSpec(
        routes=routes,
        weights=tuple((name, teacher.weight) for name, teacher in teachers.items()),
        top_k=config.loss.num_teacher_tokens,
        timeout_s=config.timeout_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherClient:
    """Sends each sample to the teacher of its route and collects the results."""

    spec: TeacherSpec
    teachers: Mapping[str, Teacher]
    """Teachers by name."""
    token_maps: Mapping[str, TokenMap] = field(default_factory=dict)
    """Token maps of the teachers that have another tokenizer, by name."""

    def fetch_columns(
        self, samples: SequenceBatch, *, prompts: Sequence[Prompt]
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Score all trained tokens in a step; return columns and metrics.

        Args:
            samples: B samples.
            prompts: Prompt of each sample. Its route selects the teacher, and its teacher_tokens,
                if any, take the place of its tokens.

        Raises:
            ConfigError: If a route has no teacher.
            TeacherError: See `Teacher.score`. Also if no sample could be translated into a
                teacher's tokens.
        """
        requests: dict[str, list[TeacherRequest]] = {name: [] for name in self.teachers}
        num_unmapped = 0
        starts, first_positions = samples.sequence_starts.tolist(), _find_first_trained(samples)
        for i, (prompt, first_position) in enumerate(zip(prompts, first_positions, strict=True)):
            # Nothing of it is trained, so a teacher would only cost time.
            if first_position is None:
                continue
            name = self._find_teacher(prompt.route)
            given = samples.tokens[starts[i] : starts[i + 1]].tolist()
            if prompt.teacher_tokens:
                given = [*prompt.teacher_tokens, *given[len(prompt.tokens) :]]
                first_position += len(prompt.teacher_tokens) - len(prompt.tokens)
            tokens = self._translate(name, given)
            if tokens is None:
                num_unmapped += 1
                continue
            requests[name].append(
                TeacherRequest(
                    request_id=i,
                    tokens=tokens,
                    # Position 0 has no log-prob: no token comes before it.
                    first_position=first_position or 1,
                    temperature=float(samples.temperature[i]),
                )
            )
        self._check_any_mapped(
            num_requests=sum(map(len, requests.values())), num_unmapped=num_unmapped
        )
        columns = self._make_columns(samples)
        # All teachers at once, because each has its own devices.
        pool = ThreadPoolExecutor(max_workers=max(1, len(requests)))
        try:
            running = {
                name: pool.submit(self._score, name, teacher_requests)
                for name, teacher_requests in requests.items()
                if teacher_requests
            }
            for name, future in running.items():
                for request, scores in zip(requests[name], future.result(), strict=True):
                    # From the end, because the teacher's prompt may have another length.
                    start = starts[request.request_id + 1] - len(scores.logprobs)
                    self._fill_columns(columns, scores, start=start, name=name)
        finally:
            # Do not wait: if one teacher fails, another may hang.
            pool.shutdown(wait=False, cancel_futures=True)
        metrics = {f"teacher/{name}/samples": float(len(each)) for name, each in requests.items()}
        return columns, {**metrics, "teacher/unmapped_samples": float(num_unmapped)}

    def close(self) -> None:
        """Free every teacher."""
        for teacher in self.teachers.values():
            teacher.close()

    def _check_any_mapped(self, *, num_requests: int, num_unmapped: int) -> None:
        if num_unmapped and not num_requests:
            raise TeacherError(
                f"none of {num_unmapped} completions could be translated into a teacher's tokens, "
                "so nothing would be learned: use a teacher with the policy's tokenizer."
            )

    def _find_teacher(self, route: str) -> str:
        name = self.spec.find_teacher(route)
        if name is None:
            listed = ", ".join(known for known, _ in self.spec.routes)
            raise ConfigError(
                f"a prompt has the route {route!r}, but the teachers' routes are {listed}: set "
                "data.train.route_key to the field with the route, or teachers.NAME.route."
            )
        return name

    def _translate(self, name: str, tokens: list[int]) -> tuple[int, ...] | None:
        """Return the teacher's token ids; None if a token has none."""
        if name not in self.token_maps:
            return tuple(tokens)
        return self.token_maps[name].to_teacher(tokens)

    def _score(self, name: str, requests: Sequence[TeacherRequest]) -> list[TeacherScores]:
        results = self.teachers[name].score(
            requests, top_k=self.spec.top_k, timeout_s=self.spec.timeout_s
        )
        for request, scores in zip(requests, results, strict=True):
            check_scores(scores, request, top_k=self.spec.top_k, teacher=name)
        return results

    def _make_columns(self, samples: SequenceBatch) -> dict[str, Tensor]:
        """Return columns for samples without a teacher: weight 0."""
        size = samples.num_tokens
        columns = {TEACHER_LOGPROBS: torch.zeros(size), TEACHER_WEIGHTS: torch.zeros(size)}
        if self.spec.top_k:
            columns |= {
                LOGPROB_AT_IDS: torch.zeros(size, self.spec.top_k, dtype=torch.int64),
                # A log-prob of -inf excludes a token from the loss.
                TEACHER_TOP_LOGPROBS: torch.full((size, self.spec.top_k), -torch.inf),
            }
        return columns

    def _fill_columns(
        self, columns: dict[str, Tensor], scores: TeacherScores, *, start: int, name: str
    ) -> None:
        span = slice(start, start + len(scores.logprobs))
        columns[TEACHER_LOGPROBS][span] = scores.logprobs
        columns[TEACHER_WEIGHTS][span] = self.spec.get_weight(name)
        if scores.top_ids is not None and scores.top_logprobs is not None:
            ids, logprobs = scores.top_ids, scores.top_logprobs
            if name in self.token_maps:
                ids, logprobs = self.token_maps[name].to_policy(ids, logprobs)
            columns[LOGPROB_AT_IDS][span], columns[TEACHER_TOP_LOGPROBS][span] = ids, logprobs


def _find_first_trained(samples: SequenceBatch) -> list[int | None]:
    """Return the position of each sample's first trained token; None if there is none."""
    positions: list[int | None] = []
    for start, end in zip(
        samples.sequence_starts[:-1].tolist(), samples.sequence_starts[1:].tolist(), strict=True
    ):
        trained = torch.nonzero(samples.loss_mask[start:end])[:, 0]
        positions.append(int(trained[0]) if len(trained) else None)
    return positions
