"""Record the completions of a run in a file, and replay them in another run.

Training depends only on the completions with their log-probs and weight versions. A replayed run
therefore has the same weights bit for bit, even with loop ``async``, where sampling depends on
timing.
"""

import base64
import hashlib
import json
import os
import re
import struct
import time
from array import array
from collections.abc import Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypedDict

from temper_engine_api.errors import ConfigError
from temper_trainer.config.rollout import RECORD_FILE
from temper_trainer.types import (
    Completion,
    FinishReason,
    RefusedRequestError,
    SamplingRequest,
    pack_logprobs,
    pack_tokens,
)

if TYPE_CHECKING:
    # A check of the configuration reads a record, and does not need torch otherwise.
    from torch import Tensor


_FIELDS = frozenset(
    ("key", "tokens", "logprobs", "finish_reason", "weight_version", "token_versions")
)
"""Fields that every completion has."""


class EncodedExperts(TypedDict):
    """`Completion.routed_experts` in a record."""

    shape: list[int]
    """[tokens, layers, K]"""
    data: str
    """Base64 of the int16 values, in the byte order of the machine."""


class CompletionRecorder:
    """Appends one JSON line per finished completion, in the order of their arrival.

    Tokens, log-probs and versions are base64 of values of 4 bytes, in the byte order of the
    machine: 11 bytes per token. Lists of numbers would need 27, and 12 times the CPU time.
    """

    def __init__(self, path: Path) -> None:
        """Open the file; a resumed run continues it.

        Raises:
            ConfigError: If it has the format of an older version.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("rb") as file:
                _check_format(file.readline(), path=path)
        _remove_partial_line(path)
        # Each line is written at once: a batch must be recorded before it is trained, also if the
        # run is killed then.
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)
        self._begin = time.monotonic()

    def add(self, request: SamplingRequest, completion: Completion) -> None:
        """Write a completion."""
        row = {
            "key": compute_key(request),
            "arrival_s": round(time.monotonic() - self._begin, 6),
            "tokens": _encode(pack_tokens(completion.tokens)),
            "logprobs": _encode(pack_logprobs(completion.rollout_logprobs)),
            "finish_reason": completion.finish_reason.value,
            "weight_version": completion.weight_version,
            "token_versions": _encode(pack_tokens(completion.token_versions)),
        }
        if completion.routed_experts is not None:
            row["routed_experts"] = _encode_experts(completion.routed_experts)
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def add_refusal(self, request: SamplingRequest, error: RefusedRequestError) -> None:
        """Write that the sampler refused a request."""
        row = {"key": compute_key(request), "refused": str(error)}
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def add_cancellation(self, request: SamplingRequest) -> None:
        """Write that the caller gave a request up, and has not read its completion."""
        row = {"key": compute_key(request), "cancelled": True}
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")

    def add_batch(self, step: int, *, groups: Sequence[int]) -> None:
        """Write which groups a step of loop ``async`` trains."""
        self._file.write(json.dumps({"batch": step, "groups": list(groups)}) + "\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class CompletionReplay:
    """The completions of a record, by their request."""

    def __init__(self, path: Path, *, needs_experts: bool) -> None:
        """Read the record.

        Args:
            path: File of a `CompletionRecorder`.
            needs_experts: Completions must have the experts that the sampler chose.

        Raises:
            ConfigError: If the file cannot be read, was recorded by an older version, is damaged,
                or lacks experts. Base64 is only checked when a completion is replayed.
        """
        self._path = path
        self._offsets: dict[str, int] = {}
        """Position of each completion's line. A record may be larger than the memory."""
        self._cancelled: set[str] = set()
        """Keys of requests that their callers gave up."""
        self._batches: dict[int, list[int]] = {}
        self._needs_experts = needs_experts
        without_experts: set[str] = set()
        try:
            # To read a pipe would wait forever, and a completion's line is read again later.
            if path.exists() and not path.is_file():
                raise OSError("it is no regular file")
            with path.open("rb") as file:
                offset = 0
                for line in file:
                    _check_format(line, path=path)
                    row = json.loads(line)
                    if "batch" in row:
                        self._batches[row["batch"]] = row["groups"]
                    elif "cancelled" in row:
                        # The last row of a request counts. A run that was stopped also records
                        # this, and completes the request when it is resumed.
                        self._cancelled.add(row["key"])
                    else:
                        missing = _FIELDS - row.keys()
                        if missing and "refused" not in row:
                            raise ValueError(f"a completion has no {', '.join(sorted(missing))}")
                        self._cancelled.discard(row["key"])
                        self._offsets[row["key"]] = offset
                        if "routed_experts" in row:
                            without_experts.discard(row["key"])
                        elif needs_experts and "refused" not in row:
                            without_experts.add(row["key"])
                    offset += len(line)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._make_error(error) from error
        if without_experts:
            raise ConfigError(
                f"rollout.routing_replay is sampler, but rollout.replay {path} has completions "
                "without choices of experts: record the run with rollout.routing_replay=sampler, "
                "or set it to none."
            )

    def find_batch(self, step: int) -> Sequence[int]:
        """Return the groups that a step of loop ``async`` has trained.

        Raises:
            ConfigError: If they were not recorded.
        """
        groups = self._batches.get(step)
        if groups is None:
            raise ConfigError(
                f"rollout.replay {self._path} does not say which groups step {step} trained, so "
                "the replay would differ: replay with the configuration of the recorded run, and "
                "only the steps that it trained."
            )
        return groups

    def is_cancelled(self, request: SamplingRequest) -> bool:
        """Return True if the caller gave the request up in the recorded run."""
        return compute_key(request) in self._cancelled

    def find(self, request: SamplingRequest) -> Completion:
        """Return a request's recorded completion.

        Raises:
            RefusedRequestError: If the sampler refused it in the recorded run.
            ConfigError: If it was not recorded, or is damaged.
        """
        offset = self._offsets.get(compute_key(request))
        if offset is None:
            raise ConfigError(
                f"rollout.replay {self._path} has no completion for request {request.request_id} "
                f"with seed {request.seed}: replay with the configuration and data of the "
                "recorded run."
            )
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                row = json.loads(file.readline())
            if "refused" in row:
                raise RefusedRequestError(row["refused"], request.request_id)
            return Completion(
                request_id=request.request_id,
                tokens=array("I", _decode(row["tokens"])),
                rollout_logprobs=array("f", _decode(row["logprobs"])),
                finish_reason=FinishReason(row["finish_reason"]),
                weight_version=row["weight_version"],
                token_versions=array("I", _decode(row["token_versions"])) or (),
                # A run without routing replay may replay the record of one with it.
                routed_experts=_decode_experts(row["routed_experts"])
                if self._needs_experts
                else None,
            )
        except RefusedRequestError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._make_error(error) from error

    def _make_error(self, cause: Exception) -> ConfigError:
        return ConfigError(
            f"rollout.replay is {self._path}, which cannot be read ({cause}): name the "
            f"{RECORD_FILE} of a run with rollout.record=true."
        )


def _check_format(line: bytes, *, path: Path) -> None:
    """Raise ConfigError if a line of a record has lists of numbers, as older versions wrote it."""
    if re.search(rb'"tokens": ?\[', line):
        raise ConfigError(
            f"{path} was recorded by an older version of Temper: record it again, in another "
            "run.dir or after removing this file."
        )


def _remove_partial_line(path: Path) -> None:
    """Remove the end of a file after its last newline: the run was killed while it wrote it."""
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
        os.truncate(path, end)


def _encode(values: "array[int] | array[float]") -> str:
    return base64.b64encode(values).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _encode_experts(experts: "Tensor") -> EncodedExperts:
    data = experts.numpy().astype("int16", copy=False).tobytes()
    return EncodedExperts(shape=list(experts.shape), data=base64.b64encode(data).decode())


def _decode_experts(encoded: EncodedExperts) -> "Tensor":
    import torch

    data = bytearray(_decode(encoded["data"]))
    return torch.frombuffer(data, dtype=torch.int16).reshape(encoded["shape"])


def compute_key(request: SamplingRequest) -> str:
    """Return a digest of seed, prompt and greedy or not, which identify a request in a run."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(struct.pack("<q?", request.seed, request.sampling.temperature == 0))
    digest.update(struct.pack(f"<{len(request.prompt_tokens)}q", *request.prompt_tokens))
    return digest.hexdigest()
