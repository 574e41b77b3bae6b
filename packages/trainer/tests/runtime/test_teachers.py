"""A teacher on an engine: its log-probs, its likeliest tokens, in the order of the questions."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import MappingProxyType

import pytest
import torch

from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.runtime.engine_teacher import EngineTeacher
from temper_trainer.runtime.vllm_teacher import VllmTeacher
from temper_trainer.runtime.worker_group import InlineWorkerGroup
from temper_trainer.teacher.teacher_protocol import TeacherError, TeacherRequest
from temper_trainer.types import Completion, SamplingRequest

VOCABULARY = 23
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    **SIZES,
}


@pytest.fixture(scope="module")
def teacher() -> Iterator[EngineTeacher]:
    config = FSDPConfig(
        model=ModelSpec(architecture=ARCHITECTURE, seed=1), optimizer=None, device="cpu"
    )
    group = InlineWorkerGroup("teacher.t.0", engine_name="fsdp", config=config)
    group.init()
    made = EngineTeacher("t", replicas=[group], max_tokens=8, vocab_size=VOCABULARY)
    yield made
    made.close()


def question(i: int, *tokens: int, temperature: float = 1.0) -> TeacherRequest:
    return TeacherRequest(request_id=i, tokens=tokens, first_position=2, temperature=temperature)


def test_a_named_token_has_the_log_prob_that_it_has_when_it_is_given(
    teacher: EngineTeacher,
) -> None:
    (answer,) = teacher.score([question(7, 3, 1, 4, temperature=0.7)], top_k=4, timeout_s=60.0)
    assert answer.top_ids is not None
    assert answer.top_logprobs is not None
    assert answer.top_logprobs[0].tolist() == sorted(answer.top_logprobs[0].tolist(), reverse=True)
    given = [
        question(i, 3, 1, token, temperature=0.7)
        for i, token in enumerate(answer.top_ids[0].tolist())
    ]
    found = torch.cat([each.logprobs for each in teacher.score(given, top_k=0, timeout_s=60.0)])
    torch.testing.assert_close(found, answer.top_logprobs[0], rtol=1e-4, atol=1e-5)


def test_all_tokens_together_have_probability_one_and_a_small_vocabulary_is_filled_up(
    teacher: EngineTeacher,
) -> None:
    (answer,) = teacher.score([question(0, 5, 6, 7, 8)], top_k=VOCABULARY + 2, timeout_s=60.0)
    assert answer.top_logprobs is not None
    assert answer.top_logprobs.exp().sum(-1).tolist() == pytest.approx([1.0, 1.0], abs=1e-4)
    assert answer.top_logprobs[:, -2:].isinf().all()


def test_answers_come_in_the_order_of_the_questions_whatever_their_lengths(
    teacher: EngineTeacher,
) -> None:
    asked = [question(4, 1, 2, 3), question(9, *range(12)), question(2, 1, 2, 9, 9)]
    together = teacher.score(asked, top_k=0, timeout_s=60.0)
    assert [answer.request_id for answer in together] == [4, 9, 2]
    assert [len(answer.logprobs) for answer in together] == [1, 10, 2]
    for each, answer in zip(asked, together, strict=True):
        (alone,) = teacher.score([each], top_k=0, timeout_s=60.0)
        torch.testing.assert_close(alone.logprobs, answer.logprobs, rtol=1e-4, atol=1e-5)


def test_a_teacher_that_hangs_is_told_after_its_time_and_not_waited_for(
    teacher: EngineTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,), awaited = teacher._replicas, threading.Event()
    monkeypatch.setattr(group, "run", lambda *given: awaited.wait(60))
    begin = time.monotonic()
    with pytest.raises(
        TeacherError, match=r"teacher t did not answer within distillation\.timeout_s = 0\.2 s"
    ):
        teacher.score([question(0, 1, 2, 3)], top_k=0, timeout_s=0.2)
    assert time.monotonic() - begin < 30
    awaited.set()


def test_servers_that_hang_as_a_teacher_are_ended_and_not_started_again() -> None:
    class Hanging:
        """A server that answers nothing until it is ended."""

        name = "teacher t replica 0"
        versions = MappingProxyType({"vllm": "0.32.0"})

        def __init__(self) -> None:
            self.num_starts = 0
            self.asked: list[Future[object]] = []

        def start(self) -> None:
            self.num_starts += 1

        def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
            raise NotImplementedError

        def call(self, method: str, *arguments: object) -> "Future[object]":
            self.asked.append(Future())
            return self.asked[-1]

        def close(self) -> None:
            for future in self.asked:
                future.set_exception(ReplicaError("its end"))

    server = Hanging()
    spec = ServerSpec(arguments={}, end_token_ids=(), max_length=64, vocab_size=41)
    found = VllmTeacher(
        "t", servers=VllmSampler([server], spec=spec, max_restarts=3), vocab_size=41
    )
    with pytest.raises(
        TeacherError, match=r"teacher t did not answer within distillation\.timeout_s = 0\.2 s"
    ):
        found.score([question(0, 1, 2, 3)], top_k=0, timeout_s=0.2)
    assert server.num_starts == 1


def test_rows_of_a_servers_head_that_stand_for_no_token_are_named_by_nobody() -> None:
    class Server:
        """Its head has more rows than there are tokens, and token 41 is none."""

        name = "teacher t replica 0"
        versions = MappingProxyType({"vllm": "0.32.0"})

        def start(self) -> None: ...

        def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
            raise NotImplementedError

        def call(self, method: str, *arguments: object) -> "Future[object]":
            answered: Future[object] = Future()
            answered.set_result([([-1.5], [[7, 41]], [[-0.25, -2.0]])])
            return answered

        def close(self) -> None: ...

    spec = ServerSpec(arguments={}, end_token_ids=(), max_length=64, vocab_size=64)
    teacher = VllmTeacher(
        "t", servers=VllmSampler([Server()], spec=spec, max_restarts=3), vocab_size=41
    )
    (answer,) = teacher.score([question(0, 1, 2)], top_k=2, timeout_s=9.0)
    assert answer.top_ids is not None
    assert answer.top_logprobs is not None
    assert answer.top_ids.tolist() == [[7, 0]]
    assert answer.top_logprobs.tolist() == [[-0.25, -math.inf]]
