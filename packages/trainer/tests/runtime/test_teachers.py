"""A teacher on an engine: its log-probs and top-k tokens, in the order of the requests."""

import math
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import fields
from types import MappingProxyType

import pytest
import torch

from temper_engine_api.batch import PackedBatch, SequenceBatch, concatenate, from_sequences
from temper_engine_api.objective import HeadOutput
from temper_engine_api.outputs import StepResult
from temper_engine_api.reduction import count_denominators
from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.runtime.engine_teacher import EngineTeacher, score_tokens
from temper_trainer.runtime.vllm_teacher import VllmTeacher
from temper_trainer.runtime.worker_group import InlineWorkerGroup, TrainingWorker
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


CONFIG = FSDPConfig(
    model=ModelSpec(architecture=ARCHITECTURE, seed=1), optimizer=None, device="cpu"
)


@pytest.fixture(scope="module")
def teacher() -> Iterator[EngineTeacher]:
    group = InlineWorkerGroup("teacher.t.0", engine_name="fsdp", config=CONFIG)
    group.init()
    made = EngineTeacher("t", replicas=[group], max_tokens=8, vocab_size=VOCABULARY)
    yield made
    made.close()


def question(i: int, *tokens: int, temperature: float = 1.0) -> TeacherRequest:
    return TeacherRequest(request_id=i, tokens=tokens, first_position=2, temperature=temperature)


def test_top_k_logprob_of_a_token_equals_its_given_logprob(
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
    given_logprobs = torch.cat(
        [each.logprobs for each in teacher.score(given, top_k=0, timeout_s=60.0)]
    )
    torch.testing.assert_close(given_logprobs, answer.top_logprobs[0], rtol=1e-4, atol=1e-5)


def test_all_top_k_probabilities_sum_to_one_and_small_vocabularies_are_padded(
    teacher: EngineTeacher,
) -> None:
    (answer,) = teacher.score([question(0, 5, 6, 7, 8)], top_k=VOCABULARY + 2, timeout_s=60.0)
    assert answer.top_logprobs is not None
    assert answer.top_logprobs.exp().sum(-1).tolist() == pytest.approx([1.0, 1.0], abs=1e-4)
    assert answer.top_logprobs[:, -2:].isinf().all()


def test_scores_are_returned_in_the_order_of_the_requests(
    teacher: EngineTeacher,
) -> None:
    requested = [question(4, 1, 2, 3), question(9, *range(12)), question(2, 1, 2, 9, 9)]
    together = teacher.score(requested, top_k=0, timeout_s=60.0)
    assert [answer.request_id for answer in together] == [4, 9, 2]
    assert [len(answer.logprobs) for answer in together] == [1, 10, 2]
    for each, answer in zip(requested, together, strict=True):
        (separate,) = teacher.score([each], top_k=0, timeout_s=60.0)
        torch.testing.assert_close(separate.logprobs, answer.logprobs, rtol=1e-4, atol=1e-5)


def test_all_columns_of_a_batch_reach_the_engine() -> None:
    class RecordingWorker(TrainingWorker):
        def forward(
            self, part: PackedBatch, outputs: Collection[HeadOutput], without_adapter: bool = False
        ) -> StepResult:
            received.append(part)
            return super().forward(part, outputs, without_adapter)

    received: list[PackedBatch] = []
    lengths = (3, 2, 4)
    batch = from_sequences(
        [torch.arange(1, length + 1) for length in lengths],
        loss_masks=[torch.arange(length) > 0 for length in lengths],
        sequence_columns={"weights": torch.tensor([0.5, 1.5, 2.5])},
    )
    part = PackedBatch(
        **{
            **{column.name: getattr(batch, column.name) for column in fields(SequenceBatch)},
            "position_ids": torch.tensor([4, 5, 6, 1, 2, 0, 2, 4, 6]),
            "media": ("image 0", None, "image 2"),
        },
        micro_batch_starts=torch.tensor([0, 2, 3], dtype=torch.int32),
        denominators=count_denominators(batch),
    )
    worker = RecordingWorker(engine_name="fsdp", config=CONFIG, num_threads=None)
    worker.init()
    try:
        scores = score_tokens(worker, part, 2, VOCABULARY)
        expected = worker.forward(part, [HeadOutput.LOGPROB]).outputs
    finally:
        worker.close()
    assert [single.num_micro_batches for single in received[:2]] == [1, 1]
    joined = concatenate(received[:2])
    assert joined.position_ids is not None
    assert joined.position_ids.tolist() == [4, 5, 6, 1, 2, 0, 2, 4, 6]
    assert joined.media == ("image 0", None, "image 2")
    assert joined.sequence_columns["weights"].tolist() == [0.5, 1.5, 2.5]
    assert scores is not None
    assert expected is not None
    torch.testing.assert_close(
        scores.logprobs, expected.columns[HeadOutput.LOGPROB], rtol=1e-4, atol=1e-5
    )


def test_hanging_teacher_is_reported_after_its_timeout(
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


def test_hanging_teacher_servers_are_ended_and_not_restarted() -> None:
    class Hanging:
        """A server that answers nothing until it is ended."""

        name = "teacher t replica 0"
        versions = MappingProxyType({"vllm": "0.32.0"})

        def __init__(self) -> None:
            self.num_starts = 0
            self.requested: list[Future[object]] = []

        def start(self) -> None:
            self.num_starts += 1

        def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
            raise NotImplementedError

        def call(self, method: str, *arguments: object) -> "Future[object]":
            self.requested.append(Future())
            return self.requested[-1]

        def close(self) -> None:
            for future in self.requested:
                future.set_exception(ReplicaError("its end"))

    server = Hanging()
    spec = ServerSpec(arguments={}, end_token_ids=(), max_length=64, vocab_size=41)
    vllm_teacher = VllmTeacher(
        "t", servers=VllmSampler([server], spec=spec, max_restarts=3), vocab_size=41
    )
    with pytest.raises(
        TeacherError, match=r"teacher t did not answer within distillation\.timeout_s = 0\.2 s"
    ):
        vllm_teacher.score([question(0, 1, 2, 3)], top_k=0, timeout_s=0.2)
    assert server.num_starts == 1


def test_padded_rows_of_a_servers_head_are_never_returned() -> None:
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
