"""The messages between the trainer and a server process, and their encoding.

Messages are MessagePack and are checked against the types below when they are decoded, so that
neither side unpickles anything. Messages go through a socket pair that the server inherits, so no
other process has access. Both sides need temper-trainer and msgspec; only the server needs vLLM.
"""

import inspect
import math
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from temper_trainer.rollout.vllm.vllm_versions import UNKNOWN_VERSION
from temper_trainer.types import Completion, FinishReason, pack_logprobs, pack_tokens

if TYPE_CHECKING:
    from torch import Tensor

Argument = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message: the server runs and waits for its `ServerSpec`."""

    versions: Mapping[str, str]
    """Versions of vllm, torch and transformers in the server's environment, if installed."""
    temper: str = UNKNOWN_VERSION
    """Version of temper-trainer in the server's environment."""
    problem: str | None = None
    """The reason why vLLM cannot run in that environment; None if it probably can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Everything that a server needs to start."""

    arguments: Mapping[str, Argument]
    """Arguments of vLLM's EngineArgs; without `model` if `files` are given."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of a model directory without weights, by file name."""
    end_token_ids: tuple[int, ...]
    """Tokens that end a completion."""
    max_length: int
    """Longest sequence, in tokens."""
    vocab_size: int
    """Number of token ids."""
    sleep_level: int = 0
    """See rollout.vllm.sleep_level."""
    has_expert_choices: bool = False
    """True if the server must return the chosen experts with each completion."""
    directory: str = ""
    """A temporary directory of this server, which the trainer creates and removes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the server sets before it imports vLLM."""
    secrets: tuple[str, ...] = ()
    """Parts of `arguments` that the server hides in its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A method call from the trainer."""

    number: int
    """Unique for the connection."""
    method: str
    """A method of `ServerCalls`."""
    arguments: bytes
    """Encoded; see `encode_value` and `decode_arguments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """A call's result."""

    number: int
    """Number of the call."""
    method: str
    value: bytes
    """Encoded; see `encode_value` and `decode_result`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """A call failed; the server continues."""

    number: int
    """Number of the call."""
    kind: str
    """Name of the exception's class."""
    text: str
    """Message of the exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The server is making progress; sent at most once a second while it samples."""

    num_finished: int = 0
    """Completions since the previous message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The server's process runs; sent every few seconds by its own thread once it is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The model is built."""

    device: str
    """Device type, such as cpu or cuda."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCompletion:
    """A completion whose numbers are bytes, because lists take a hundred times as long to decode.

    The bytes have the byte order of the host. Both hosts must have the same one.
    """

    request_id: int
    tokens: bytes
    """4 bytes per token."""
    rollout_logprobs: bytes
    """4 bytes per token."""
    finish_reason: FinishReason
    weight_version: int
    routed_experts: Any = None
    """See `Completion`."""

    @classmethod
    def pack(cls, completion: Completion) -> "PackedCompletion":
        """Return a completion in the form in which a server sends it."""
        return cls(
            request_id=completion.request_id,
            tokens=pack_tokens(completion.tokens).tobytes(),
            rollout_logprobs=pack_logprobs(completion.rollout_logprobs).tobytes(),
            finish_reason=completion.finish_reason,
            weight_version=completion.weight_version,
            routed_experts=completion.routed_experts,
        )

    def unpack(self) -> Completion:
        """Return the completion, with its numbers in arrays.

        Raises:
            MessageError: If there are not 4 bytes for each token.
        """
        if len(self.tokens) % 4 or len(self.tokens) != len(self.rollout_logprobs):
            raise msgspec.ValidationError(
                f"{len(self.rollout_logprobs)} bytes of log-probs and {len(self.tokens)} bytes of "
                "tokens in a completion"
            )
        return Completion(
            request_id=self.request_id,
            tokens=array("I", self.tokens),
            rollout_logprobs=array("f", self.rollout_logprobs),
            finish_reason=self.finish_reason,
            weight_version=self.weight_version,
            routed_experts=self.routed_experts,
        )


Message = Hello | ServerSpec | Call | CallResult | CallError | Progress | Heartbeat | Ready
MessageError = msgspec.MsgspecError
"""Raised for bytes that are not a message, or not of the expected types."""

_MESSAGE_TYPES: dict[str, type[Message]] = {
    each.__name__: each
    for each in (Hello, ServerSpec, Call, CallResult, CallError, Progress, Heartbeat, Ready)
}
_EXPERTS_CODE = 1
"""MessagePack extension type of `Completion.routed_experts`."""
_EXPERTS_SHAPE = struct.Struct("<3I")
_FRAME = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


def encode(message: Message) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode((type(message).__name__, message))


def decode(data: bytes) -> Message:
    """Decode a message from `encode`.

    Raises:
        MessageError: If the bytes are not a message.
    """
    name, body = _FRAME.decode(data)
    # Unlike pickle, this creates only types from the list.
    if name not in _MESSAGE_TYPES:
        raise msgspec.ValidationError(f"unknown message {name!r}")
    return msgspec.msgpack.decode(body, type=_MESSAGE_TYPES[name])


def encode_value(value: object) -> bytes:
    """Encode the result of a call, or the tuple of its arguments."""
    return msgspec.msgpack.encode(value, enc_hook=_encode_experts)


def decode_arguments(call: Call) -> list[Any]:
    """Decode a call's arguments.

    Raises:
        MessageError: If there is no such method, or it takes other arguments.
    """
    types, num_required, _ = _signature(call.method)
    given = msgspec.msgpack.decode(call.arguments, type=list[msgspec.Raw])
    if not num_required <= len(given) <= len(types):
        raise msgspec.ValidationError(
            f"{call.method} takes {num_required} to {len(types)} arguments, but {len(given)} were "
            "sent"
        )
    return [msgspec.msgpack.decode(raw, type=each) for raw, each in zip(given, types)]


def decode_result(result: CallResult) -> Any:
    """Decode a call's result.

    Raises:
        MessageError: If the result has another type than the method declares.
    """
    _, _, result_type = _signature(result.method)
    value = msgspec.msgpack.decode(result.value, type=result_type, ext_hook=_decode_experts)
    return [each.unpack() for each in value] if result_type == list[PackedCompletion] else value


def _encode_experts(value: object) -> msgspec.msgpack.Ext:
    """Encode the [tokens, layers, K] int16 tensor of chosen experts.

    It is the only type in a message that MessagePack does not know.
    """
    import torch

    if not isinstance(value, torch.Tensor) or value.dtype != torch.int16 or value.dim() != 3:
        raise TypeError(f"a message cannot hold a value of type {type(value).__name__}")
    data = value.numpy().astype("<i2", copy=False).tobytes()
    return msgspec.msgpack.Ext(_EXPERTS_CODE, _EXPERTS_SHAPE.pack(*value.shape) + data)


def _decode_experts(code: int, data: memoryview) -> "Tensor":
    import torch

    if code != _EXPERTS_CODE or len(data) < _EXPERTS_SHAPE.size:
        raise msgspec.ValidationError(f"unknown extension {code} of {len(data)} bytes")
    shape = _EXPERTS_SHAPE.unpack(data[: _EXPERTS_SHAPE.size])
    values = bytearray(data[_EXPERTS_SHAPE.size :])  # a tensor needs memory that can be written
    if not values or len(values) != 2 * math.prod(shape):
        raise msgspec.ValidationError(f"{len(values)} bytes for experts of shape {shape}")
    return torch.frombuffer(values, dtype=torch.int16).reshape(shape)


@cache
def _signature(method: str) -> tuple[tuple[Any, ...], int, Any]:
    """Return the types of a method's arguments, how many are required, and the result's type.

    A message contains completions as `PackedCompletion`.
    """
    # Imported late because it imports torch: a server sets environment variables before that.
    from temper_trainer.rollout.vllm.server_methods import ServerMethods

    function = getattr(ServerMethods, method, None)
    if method.startswith("_") or not inspect.isfunction(function):
        raise msgspec.ValidationError(f"a server has no method {method!r}")
    parameters = list(inspect.signature(function).parameters.values())[1:]
    hints = get_type_hints(function)
    num_required = sum(parameter.default is parameter.empty for parameter in parameters)
    result_type = hints["return"]
    if result_type == list[Completion]:
        result_type = list[PackedCompletion]
    return tuple(hints[parameter.name] for parameter in parameters), num_required, result_type
