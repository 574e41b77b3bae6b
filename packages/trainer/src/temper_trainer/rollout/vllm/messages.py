"""The messages between a server process and its client, and their encoding.

A message is MessagePack, checked against the types below when it is decoded: neither side unpickles
anything. The connection is a socket pair that the server inherits, so no other process can reach it.
Both sides have temper-trainer and msgspec; only the server has vLLM.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_type_hints

import msgspec

Argument = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The server runs and waits for its `ServerSpec`; the first message on a connection."""

    versions: Mapping[str, str]
    """Of vllm, torch and transformers in the server's environment; absent if not installed."""
    problem: str | None = None
    """Why vLLM cannot run in that environment; None if nothing was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """Everything that a server needs to start."""

    arguments: Mapping[str, Argument]
    """Of vLLM's EngineArgs; ``model`` is absent where ``files`` are given."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """A model directory without weights, by file name: small, so that it can travel to another node."""
    end_token_ids: tuple[int, ...]
    """Tokens that end a completion."""
    max_length: int
    """Longest sequence, in tokens."""
    vocab_size: int
    """Token ids lie below it."""
    sleep_level: int = 0
    """See rollout.vllm.sleep_level."""
    directory: str = ""
    """A temporary directory of this server alone; its client makes it and removes it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of vLLM's own that the server sets before it imports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call."""

    number: int
    """Unique for its client."""
    method: str
    """A method of `ServerCalls`."""
    arguments: bytes
    """Encoded; see `encode_value` and `decode_arguments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What a call returned."""

    number: int
    """Of the call."""
    method: str
    """Of the call."""
    value: bytes
    """Its result, encoded; see `encode_value` and `decode_result`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """Why a call has no result; the server goes on."""

    number: int
    """Of the call."""
    kind: str
    """Name of the exception's class."""
    text: str
    """Its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The server has done something; sent at most once a second while it samples."""

    num_finished: int = 0
    """Completions since the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The server's process runs; sent every few seconds by a thread of its own once it is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The model is built."""

    device: str
    """cpu, cuda ..."""


Message = Hello | ServerSpec | Call | CallResult | CallError | Progress | Heartbeat | Ready
MessageError = msgspec.MsgspecError
"""Raised for bytes that are not a message, or not of the expected types."""

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Hello, ServerSpec, Call, CallResult, CallError, Progress, Heartbeat, Ready)
}
_FRAME = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return msgspec.msgpack.encode((type(message).__name__, message))


def decode(data: bytes) -> Message:
    """Return the message that `encode` wrote.

    Raises:
        MessageError: If the bytes are not a message.
    """
    kind, body = _FRAME.decode(data)
    if kind not in _KINDS:
        raise msgspec.ValidationError(f"unknown message {kind!r}")
    return msgspec.msgpack.decode(body, type=_KINDS[kind])


def encode_value(value: object) -> bytes:
    """Return the bytes of a call's arguments, as a tuple, or of its result."""
    return msgspec.msgpack.encode(value)


def decode_arguments(ask: Call) -> list[Any]:
    """Return the arguments of a call.

    Raises:
        MessageError: If there is no such method, or it takes other arguments.
    """
    types, num_required, _ = _signature(ask.method)
    given = msgspec.msgpack.decode(ask.arguments, type=list[msgspec.Raw])
    if not num_required <= len(given) <= len(types):
        raise msgspec.ValidationError(
            f"{ask.method} takes {num_required} to {len(types)} arguments, but {len(given)} were sent"
        )
    return [msgspec.msgpack.decode(raw, type=kind) for raw, kind in zip(given, types)]


def decode_result(answer: CallResult) -> Any:
    """Return the result of a call.

    Raises:
        MessageError: If the result is not what the method returns.
    """
    _, _, kind = _signature(answer.method)
    return msgspec.msgpack.decode(answer.value, type=kind)


@cache
def _signature(method: str) -> tuple[tuple[Any, ...], int, Any]:
    """Return the types of a method's arguments, how many are required, and the result's type."""
    # Imported here because it imports torch, and a server sets its environment before that.
    from temper_trainer.rollout.vllm.server_methods import ServerMethods

    function = getattr(ServerMethods, method, None)
    if method.startswith("_") or not inspect.isfunction(function):
        raise msgspec.ValidationError(f"a server has no method {method!r}")
    parameters = list(inspect.signature(function).parameters.values())[1:]
    hints = get_type_hints(function)
    num_required = sum(parameter.default is parameter.empty for parameter in parameters)
    return tuple(hints[parameter.name] for parameter in parameters), num_required, hints["return"]
