"""Messages between a server and its client: what is decoded, and what is refused."""

import pickle
import struct
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from packages.trainer.tests.rollout.models_for_tests import make_requests
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.packed_bucket import PackedBucket, TensorEntry
from temper_trainer.rollout.vllm.messages import (
    Call,
    CallResult,
    Hello,
    MessageError,
    PackedCompletion,
    ServerSpec,
    decode,
    decode_arguments,
    decode_result,
    encode,
    encode_value,
)
from temper_trainer.rollout.weight_delta import DeltaManifest, PackedDelta
from temper_trainer.types import Completion, FinishReason, pack_completion

BUCKET = PackedBucket(
    entries=(TensorEntry(name="w", shape=(2, 3), dtype="bfloat16", offset=64),),
    num_bytes=128,
    digest=2**64 - 1,
    path="/dev/shm/x",
)
CHANGES = PackedDelta(
    counts=(-1, 5), num_bytes=64, digest=None, updated_digest=2**63, path="/dev/shm/y"
)
REQUESTS = make_requests([[2], [3, 4]], SamplingConfig(max_tokens=4, top_p=0.9, stop=("ab",)))

COMPLETION = Completion(
    request_id=1,
    tokens=(1, 2**31),
    rollout_logprobs=(-0.125, float("-inf")),
    finish_reason=FinishReason.STOP_TEXT,
    weight_version=4,
)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


def call(method: str, *arguments: object) -> list[Any]:
    ask = decode(encode(Call(number=7, method=method, arguments=encode_value(arguments))))
    assert isinstance(ask, Call)
    return decode_arguments(ask)


@pytest.mark.parametrize(
    "read", [decode, lambda data: decode_arguments(Call(number=0, method="sample", arguments=data))]
)
def test_pickle_in_place_of_a_message_is_refused_and_not_executed(
    read: Callable[[bytes], Any], tmp_path: Path
) -> None:
    proof = tmp_path / "executed"
    pickled = pickle.dumps(Evil(proof))
    with pytest.raises(MessageError):
        read(pickled)
    assert not proof.exists()
    pickle.loads(pickled)
    assert proof.exists(), "the pickle would have done it"


def test_arguments_arrive_equal_and_of_their_own_types() -> None:
    manifest = DeltaManifest(version=3, base_version=2, deltas=(CHANGES,))
    assert call("sample", REQUESTS) == [REQUESTS]
    assert call("load_delta", (BUCKET,), manifest) == [[BUCKET], manifest]
    assert call("receive_weights", [BUCKET], 3) == [[BUCKET], 3]
    assert call("receive_weights", [BUCKET], 3, True) == [[BUCKET], 3, True]


def encode_sampled(*completions: Completion) -> bytes:
    return encode_value([PackedCompletion.pack(each) for each in completions])


def test_results_arrive_equal_bit_by_bit() -> None:
    value = encode_sampled(COMPLETION)
    answer = decode(encode(CallResult(number=1, method="sample", value=value)))
    assert isinstance(answer, CallResult)
    assert list(map(pack_completion, decode_result(answer))) == [pack_completion(COMPLETION)]
    locations = CallResult(
        number=1, method="device_locations", value=encode_value([("host", None)])
    )
    assert decode_result(locations) == [("host", None)]


def test_wider_arrays_of_a_sampler_arrive_as_4_bytes_per_number() -> None:
    tokens, logprobs = array("q", [1, 2, 3]), array("d", [-0.5, -0.25, -0.125])
    wide = replace(COMPLETION, tokens=tokens, rollout_logprobs=logprobs)
    (completion,) = decode_result(CallResult(number=1, method="sample", value=encode_sampled(wide)))
    assert list(completion.tokens) == [1, 2, 3]
    assert list(completion.rollout_logprobs) == [-0.5, -0.25, -0.125]


def test_each_column_of_a_completion_is_packed() -> None:
    packed = pack_completion(replace(COMPLETION, tokens=array("I", [1, 2]), token_versions=(3, 4)))
    columns = (packed.tokens, packed.rollout_logprobs, packed.token_versions)
    assert [getattr(column, "typecode", None) for column in columns] == ["I", "f", "I"]


def test_half_a_token_is_refused() -> None:
    packed = replace(PackedCompletion.pack(COMPLETION), tokens=b"12")
    with pytest.raises(MessageError, match="8 bytes of log-probs and 2 bytes of tokens"):
        decode_result(CallResult(number=1, method="sample", value=encode_value([packed])))


def test_experts_of_a_completion_arrive_equal() -> None:
    experts = torch.arange(12, dtype=torch.int16).reshape(2, 3, 2) + 300
    value = encode_sampled(replace(COMPLETION, routed_experts=experts))
    (arrived,) = decode_result(CallResult(number=1, method="sample", value=value))
    assert arrived.routed_experts.dtype == torch.int16
    assert arrived.routed_experts.equal(experts)


def test_experts_of_another_size_than_announced_are_refused() -> None:
    experts = torch.zeros(2, 3, 2, dtype=torch.int16)
    value = encode_sampled(replace(COMPLETION, routed_experts=experts))
    shape = struct.pack("<3I", 2, 3, 2)
    damaged = value.replace(shape, struct.pack("<3I", 2, 3, 1))
    assert damaged != value
    with pytest.raises(MessageError, match=r"24 bytes for experts of shape \(2, 3, 1\)"):
        decode_result(CallResult(number=1, method="sample", value=damaged))


def test_spec_arrives_equal() -> None:
    spec = ServerSpec(
        arguments={"model": "m", "seed": 0, "gpu": 0.5, "eager": True, "x": None},
        files={"config.json": b"\x00{}"},
        end_token_ids=(1, 2),
        max_length=8,
        vocab_size=9,
        environment={"A": "b"},
    )
    assert decode(encode(spec)) == spec
    assert decode(encode(Hello(versions={"vllm": "0.32.0"}))) == Hello(versions={"vllm": "0.32.0"})


@pytest.mark.parametrize(
    ("method", "arguments", "sentence"),
    [
        ("_llm", (), "a server has no method '_llm'"),
        ("__init__", (), "a server has no method '__init__'"),
        ("add", ((0, 0), REQUESTS[0]), "a server has no method 'add'"),
        ("load_files", ([BUCKET],), "load_files takes 2 to 2 arguments, but 1 were sent"),
        ("load_files", ([BUCKET], "three"), "Expected `int`, got `str`"),
        ("load_files", ([{"path": "/x"}], 3), "missing required field"),
        ("sample", ([{"request_id": 1}],), "missing required field"),
    ],
)
def test_call_with_other_methods_or_types_is_refused(
    method: str, arguments: tuple[object, ...], sentence: str
) -> None:
    with pytest.raises(MessageError, match=sentence):
        call(method, *arguments)


def test_unknown_message_is_refused() -> None:
    with pytest.raises(MessageError, match="unknown message 'Evil'"):
        decode(msgspec.msgpack.encode(("Evil", {})))
