"""A server whose engine samples with transformers, for runs on machines without vLLM.

It speaks the protocol of a vLLM server in a process of its own, and joins weight channels.
"""

import os
import queue
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from temper_engine_api.specs import ModelSpec
from temper_trainer.config.rollout import RolloutConfig
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.rollout.packed_bucket import PackedBucket, open_weight_file, unpack_tensors
from temper_trainer.rollout.vllm.messages import Call, Hello, Ready, ServerSpec, decode, encode
from temper_trainer.rollout.vllm.server import ServerLoop, read_messages
from temper_trainer.rollout.weight_channel import (
    ChannelSpec,
    WeightChannel,
    join_channel,
    locate_device,
)
from temper_trainer.types import Completion, FinishReason, RefusedRequestError, SamplingRequest


class TransformersEngine:
    """The methods of `VllmEngine` that a run without deltas and teachers needs."""

    def __init__(self, spec: ServerSpec) -> None:
        folder = Path(spec.directory)
        for name, content in spec.files.items():
            (folder / name).write_bytes(content)
        architecture = AutoConfig.from_pretrained(folder).to_dict()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        torch.set_num_threads(1)
        self._sampler = HfSampler(
            model=ModelSpec(architecture=architecture),
            tokenizer=tokenizer,
            config=RolloutConfig(max_concurrent=64),
        )
        self._max_length = architecture["max_position_embeddings"]
        self._channel: WeightChannel | None = None
        self._open: list[tuple[tuple[int, int], SamplingRequest]] = []

    @property
    def is_idle(self) -> bool:
        """True if no request is open."""
        return not self._open

    def add(self, key: tuple[int, int], request: SamplingRequest) -> None:
        """Start a request; refuse one that is too long, as vLLM does."""
        if len(request.prompt_tokens) > self._max_length:
            raise RefusedRequestError(f"request {request.request_id} is too long.")
        self._open.append((key, request))

    def step(self) -> list[tuple[tuple[int, int], Completion]]:
        """Sample all open requests to their ends."""
        opened, self._open = self._open, []
        # Ids are unique for one client only.
        finished = [self._sampler.sample([request])[0] for _, request in opened]
        return [(key, completion) for (key, _), completion in zip(opened, finished, strict=True)]

    def interrupt(self, call: int | None = None) -> list[tuple[tuple[int, int], Completion]]:
        """Return all open requests, or those of one call, without tokens."""
        opened = [each for each in self._open if call is None or each[0][0] == call]
        self._open = [each for each in self._open if each not in opened]
        return [
            (
                key,
                Completion(
                    request_id=request.request_id,
                    tokens=(),
                    rollout_logprobs=(),
                    finish_reason=FinishReason.INTERRUPTED,
                    weight_version=self._sampler.weight_version,
                ),
            )
            for key, request in opened
        ]

    def compute_logprobs(self, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs of given tokens."""
        return self._sampler.compute_logprobs(tokens, temperature=1.0)

    def device_locations(self) -> list[tuple[str, str | None]]:
        """Return the CPU of this host."""
        location = locate_device(torch.device("cpu"))
        return [(location.host, location.gpu)]

    def cached_version(self) -> int:
        """Return -1: no delta can be applied."""
        return -1

    def load_files(self, buckets: Sequence[PackedBucket], version: int) -> int:
        """Load all weights from files."""
        return self._load(
            [(bucket, open_weight_file(bucket)) for bucket in buckets], version=version
        )

    def join_channels(self, channels: Sequence[ChannelSpec]) -> None:
        """Join a channel, and leave an earlier one."""
        self._leave()
        (channel,) = channels
        self._channel = join_channel(channel.to_dict(), device=torch.device("cpu"))

    def receive_weights(
        self, buckets: Sequence[PackedBucket], version: int, keep_copy: bool = False
    ) -> int:
        """Receive all weights; leave the channel after an error."""
        assert self._channel is not None
        try:
            arrived = [(bucket, self._channel.receive(bucket).clone()) for bucket in buckets]
        except Exception:
            self._leave()
            raise
        return self._load(arrived, version=version)

    def _leave(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _load(self, arrived: Sequence[tuple[PackedBucket, torch.Tensor]], *, version: int) -> int:
        weights = (each for bucket, data in arrived for each in unpack_tensors(data, bucket))
        self._sampler.load_weights(weights, version=version)
        return version


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection: "Connection[Any, Any]" = Connection(descriptor)
    connection.send_bytes(encode(Hello(versions={"vllm": "0.32.0"})))
    spec = decode(connection.recv_bytes())
    assert isinstance(spec, ServerSpec)
    inbox: queue.SimpleQueue[Call] = queue.SimpleQueue()
    threading.Thread(target=read_messages, args=(connection, inbox), daemon=True).start()
    engine: Any = TransformersEngine(spec)
    connection.send_bytes(encode(Ready(device="cpu")))
    ServerLoop(engine, connection, inbox).run()
