"""Routes, token maps and the client of the teachers; the spec is small."""

import pickle
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import LOGPROB_AT_IDS
from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.config.distillation import DistillationConfig, TeacherConfig
from temper_trainer.teacher.teacher_client import (
    MAX_PICKLED_BYTES,
    TEACHER_LOGPROBS,
    TEACHER_TOP_LOGPROBS,
    TEACHER_WEIGHTS,
    TeacherClient,
    TeacherSpec,
    build_teacher_spec,
)
from temper_trainer.teacher.teacher_protocol import (
    TeacherError,
    TeacherRequest,
    TeacherScores,
    assign_to_replicas,
)
from temper_trainer.teacher.token_map import TokenMap, build_token_map
from temper_trainer.types import Prompt


class CountingTeacher:
    """A teacher with log-prob -t / 10 for token t and top-k t + 1, t + 2, ...; see ``forgets``."""

    def __init__(self, *, forgets: int = 0) -> None:
        self._forgets = forgets
        self.seen: list[TeacherRequest] = []

    @property
    def num_replicas(self) -> int:
        return 1

    def score(
        self, requests: Sequence[TeacherRequest], *, top_k: int, timeout_s: float
    ) -> list[TeacherScores]:
        del timeout_s
        self.seen += requests
        return [self._score_one(request, top_k=top_k) for request in requests]

    def _score_one(self, question: TeacherRequest, *, top_k: int) -> TeacherScores:
        tokens = torch.tensor(question.tokens[question.first_position + self._forgets :])
        named = (tokens[:, None] + torch.arange(1, top_k + 1)) if top_k else None
        logs = None if named is None else torch.full(named.shape, -1.0)
        return TeacherScores(
            request_id=question.request_id,
            logprobs=-tokens / 10.0,
            top_ids=named,
            top_logprobs=logs,
        )

    def close(self) -> None: ...


SPEC = TeacherSpec(
    routes=(("m", "math"), ("c", "code")),
    weights=(("math", 1.0), ("code", 0.5)),
    top_k=2,
    timeout_s=9.0,
)


def route_to(*routes: str) -> list[Prompt]:
    return [
        Prompt(prompt_id=i, text="", tokens=(0,), answer="", route=route)
        for i, route in enumerate(routes)
    ]


def two_samples() -> SequenceBatch:
    return from_sequences(
        [torch.tensor([1, 2, 3]), torch.tensor([4, 5])],
        loss_masks=[torch.tensor([False, True, True]), torch.tensor([False, True])],
        temperature=0.7,
    )


def test_each_sample_is_scored_by_the_teacher_of_its_route() -> None:
    teachers = {"math": CountingTeacher(), "code": CountingTeacher()}
    columns, metrics = TeacherClient(spec=SPEC, teachers=teachers).fetch_columns(
        two_samples(), prompts=route_to("c", "m")
    )
    assert columns[TEACHER_LOGPROBS].tolist() == pytest.approx([0.0, -0.2, -0.3, 0.0, -0.5])
    assert columns[TEACHER_WEIGHTS].tolist() == [0.0, 0.5, 0.5, 0.0, 1.0]
    assert columns[LOGPROB_AT_IDS].tolist() == [[0, 0], [3, 4], [4, 5], [0, 0], [6, 7]]
    assert metrics["teacher/math/samples"] == metrics["teacher/code/samples"] == 1.0
    assert teachers["code"].seen[0].first_position == 1
    assert teachers["code"].seen[0].temperature == pytest.approx(0.7)


def test_route_without_a_teacher_is_named() -> None:
    client = TeacherClient(
        spec=SPEC, teachers={"math": CountingTeacher(), "code": CountingTeacher()}
    )
    with pytest.raises(ConfigError, match=r"route 'poetry', but the teachers' routes are m, c"):
        client.fetch_columns(two_samples(), prompts=route_to("m", "poetry"))


def test_single_teacher_scores_every_route() -> None:
    spec = TeacherSpec(routes=(("t", "t"),), weights=(("t", 1.0),), top_k=0, timeout_s=9.0)
    columns, _ = TeacherClient(spec=spec, teachers={"t": CountingTeacher()}).fetch_columns(
        two_samples(), prompts=route_to("", "x")
    )
    assert columns[TEACHER_WEIGHTS].tolist() == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert TEACHER_TOP_LOGPROBS not in columns


def test_teacher_with_too_few_logprobs_is_an_error() -> None:
    client = TeacherClient(
        spec=SPEC, teachers={"math": CountingTeacher(forgets=1), "code": CountingTeacher()}
    )
    with pytest.raises(
        TeacherError, match="teacher math returned 1 log-probs for request 0, but 2 were expected"
    ):
        client.fetch_columns(two_samples(), prompts=route_to("m", "c"))


@pytest.mark.parametrize("spoiled", ["logprobs", "top_logprobs"])
def test_teacher_with_nan_logprobs_is_an_error(spoiled: str) -> None:
    class Spoiled(CountingTeacher):
        def _score_one(self, question: TeacherRequest, *, top_k: int) -> TeacherScores:
            answer = super()._score_one(question, top_k=top_k)
            column = {"logprobs": answer.logprobs, "top_logprobs": answer.top_logprobs}[spoiled]
            assert column is not None
            column[-1] = torch.nan
            return answer

    client = TeacherClient(spec=SPEC, teachers={"math": CountingTeacher(), "code": Spoiled()})
    with pytest.raises(
        TeacherError,
        match="teacher code returned NaN for request 1: check its weights and its precision",
    ):
        client.fetch_columns(two_samples(), prompts=route_to("m", "c"))


def test_spec_of_the_client_does_not_grow_with_the_configuration() -> None:
    paths = {f"teacher_{i}": f"/models/{i}/" + "x" * 500 for i in range(32)}
    teachers = {
        name: TeacherConfig(engine=FSDPConfig(model=ModelSpec(path=path)))
        for name, path in paths.items()
    }
    assert (
        len(pickle.dumps(build_teacher_spec(teachers, DistillationConfig())))
        < MAX_PICKLED_BYTES
        < len(pickle.dumps(teachers))
    )


def test_requests_go_longest_first_to_the_replica_with_the_fewest_tokens() -> None:
    requests = [
        TeacherRequest(request_id=i, tokens=(0,) * n, first_position=1, temperature=1.0)
        for i, n in enumerate((3, 9, 4, 2))
    ]
    assert assign_to_replicas(requests, num_replicas=2) == [[1], [2, 0, 3]]


def tokenizer_of(*words: str, end: str | None = None) -> PreTrainedTokenizerFast:
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token=end)


def test_different_tokenizer_is_refused_unless_mapping_is_enabled() -> None:
    policy_tokenizer, teacher_tokenizer = tokenizer_of("a", "b", "c"), tokenizer_of("c", "a", "d")
    assert (
        build_token_map(policy_tokenizer, tokenizer_of("a", "b", "c"), name="t", may_map=False)
        is None
    )
    with pytest.raises(
        ConfigError,
        match=r"teachers\.t has another tokenizer .* 3 and 3 tokens, 2 of them in both; 'a' is 0",
    ):
        build_token_map(policy_tokenizer, teacher_tokenizer, name="t", may_map=False)
    token_map = build_token_map(policy_tokenizer, teacher_tokenizer, name="t", may_map=True)
    assert token_map is not None
    assert token_map.to_teacher([0, 2]) == (1, 0)
    assert token_map.to_teacher([0, 1]) is None
    ids, logs = token_map.to_policy(torch.tensor([[0, 2]]), torch.tensor([[-0.1, -0.2]]))
    assert ids.tolist() == [[2, 0]]
    assert logs.tolist() == [[pytest.approx(-0.1), -torch.inf]]


def test_end_tokens_with_different_texts_are_mapped() -> None:
    policy_tokenizer, teacher_tokenizer = (
        tokenizer_of("a", "b", "<end>", end="<end>"),
        tokenizer_of("</s>", "b", "a", end="</s>"),
    )
    token_map = build_token_map(policy_tokenizer, teacher_tokenizer, name="t", may_map=True)
    assert token_map is not None
    assert token_map.to_teacher([0, 1, 2]) == (2, 1, 0)
    assert token_map.teacher_to_policy.tolist() == [2, 1, 0]


def test_end_token_that_the_teacher_also_has_is_mapped_by_text() -> None:
    policy_tokenizer, teacher_tokenizer = (
        tokenizer_of("a", "<turn>", "</s>", end="<turn>"),
        tokenizer_of("</s>", "<turn>", "a", end="</s>"),
    )
    token_map = build_token_map(policy_tokenizer, teacher_tokenizer, name="t", may_map=True)
    assert token_map is not None
    assert token_map.to_teacher([0, 1, 2]) == (2, 1, 0)
    assert token_map.teacher_to_policy.tolist() == [2, 1, 0]


def test_step_without_any_mapped_sample_is_an_error() -> None:
    nothing = TokenMap(policy_to_teacher={}, teacher_to_policy=torch.tensor([-1]))
    client = TeacherClient(
        spec=SPEC,
        teachers={"math": CountingTeacher(), "code": CountingTeacher()},
        token_maps={"math": nothing},
    )
    with pytest.raises(TeacherError, match="none of 2 completions could be translated"):
        client.fetch_columns(two_samples(), prompts=route_to("m", "m"))
    _, metrics = client.fetch_columns(two_samples(), prompts=route_to("m", "c"))
    assert (metrics["teacher/unmapped_samples"], metrics["teacher/code/samples"]) == (1.0, 1.0)


def test_failing_teacher_is_reported_while_another_one_hangs() -> None:
    awaited = threading.Event()

    class Hanging(CountingTeacher):
        def score(
            self, requests: Sequence[TeacherRequest], *, top_k: int, timeout_s: float
        ) -> list[TeacherScores]:
            awaited.wait(60)
            return super().score(requests, top_k=top_k, timeout_s=timeout_s)

    client = TeacherClient(
        spec=SPEC, teachers={"math": CountingTeacher(forgets=1), "code": Hanging()}
    )
    begin = time.monotonic()
    with pytest.raises(TeacherError, match="teacher math returned 1 log-probs"):
        client.fetch_columns(two_samples(), prompts=route_to("m", "c"))
    assert time.monotonic() - begin < 30
    awaited.set()


def test_teacher_reads_its_own_prompt_in_place_of_the_policys() -> None:
    teacher = CountingTeacher()
    spec = TeacherSpec(routes=(("t", "t"),), weights=(("t", 1.0),), top_k=2, timeout_s=9.0)
    prompts = [
        Prompt(prompt_id=0, text="", tokens=(1,), teacher_tokens=(7, 8, 9), answer=""),
        Prompt(prompt_id=1, text="", tokens=(4,), answer=""),
    ]
    columns, _ = TeacherClient(spec=spec, teachers={"t": teacher}).fetch_columns(
        two_samples(), prompts=prompts
    )
    assert [request.tokens for request in teacher.seen] == [(7, 8, 9, 2, 3), (4, 5)]
    assert [request.first_position for request in teacher.seen] == [3, 1]
    # The log-probs are those of the completion's tokens, at their positions in the sample.
    assert columns[TEACHER_LOGPROBS].tolist() == pytest.approx([0.0, -0.2, -0.3, 0.0, -0.5])
    assert columns[LOGPROB_AT_IDS].tolist() == [[0, 0], [3, 4], [4, 5], [0, 0], [6, 7]]
