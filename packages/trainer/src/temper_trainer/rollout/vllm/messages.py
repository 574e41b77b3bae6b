"""What a server process and its client say to each other, over a Unix socket; both have temper-trainer, only the server has vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Argument = str | int | float | bool | None


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
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of vLLM's own that the server sets before it imports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A call."""

    number: int
    """Unique for its client."""
    method: str
    """``sample``, ``interrupt``, or a method of the engine."""
    arguments: tuple[object, ...] = ()
    """Plain values and the trainer's own dataclasses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a call returned."""

    number: int
    """Of the call."""
    value: object
    """Its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a call has no result; the server goes on."""

    number: int
    """Of the call."""
    kind: str
    """Name of the exception's class."""
    text: str
    """Its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The server has done something; sent at most once a second while it samples."""

    num_finished: int = 0
    """Completions since the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The model is built."""

    vllm_version: str
    """For the log."""
    device: str
    """cpu, cuda ..."""
