"""A vLLM server with two workers, each of which gets the weights from another rank of the actor."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from packages.trainer.tests.rollout.conftest import Pairs
from packages.trainer.tests.rollout.models_for_tests import make_prompts, make_requests
from temper_engine_api.distributed.rendezvous import StoreServer
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    pack_tensors,
    plan_layout,
    split_into_buckets,
)
from temper_trainer.rollout.weight_channel import ChannelSpec, WeightChannel

from .conftest import Serve, Served

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

BUCKET_BYTES = 20_000


def send(spec: ChannelSpec, server: StoreServer, weights: list[NamedWeight]) -> None:
    """Send all weights as one rank of the actor."""
    channel = WeightChannel(spec, device=torch.device("cpu"), server=server)
    for part in split_into_buckets(weights, bucket_bytes=BUCKET_BYTES):
        entries, num_bytes = plan_layout(part)
        data = channel.get_bucket_buffer(num_bytes)
        pack_tensors(data, part, entries)
        channel.send(data)
    channel.close()


def publish(served: Served, version: int) -> None:
    """Send the weights from two ranks, each to one worker of the server."""
    weights = [
        NamedWeight(name, value.detach()) for name, value in served.pair.model.named_parameters()
    ]
    layouts = [plan_layout(part) for part in split_into_buckets(weights, bucket_bytes=BUCKET_BYTES)]
    buckets = [PackedBucket(entries=e, num_bytes=n, digest=None) for e, n in layouts]
    servers = [StoreServer("127.0.0.1", token="secret") for _ in range(2)]
    specs = [
        ChannelSpec(
            backend="gloo",
            address="127.0.0.1",
            port=server.port,
            size=2,
            buffer_bytes=max(bucket.num_bytes for bucket in buckets),
            with_digest=True,
            token="secret",
        )
        for server in servers
    ]
    (replica,) = served.sampler.replicas
    with ThreadPoolExecutor(2) as ranks:
        sending = [
            ranks.submit(send, spec, server, weights)
            for spec, server in zip(specs, servers, strict=True)
        ]
        replica.call("join_channels", [replace(spec, rank=1) for spec in specs]).result()
        served.sampler.load(
            lambda each: each.call("receive_weights", buckets, version), version=version
        )
        for each in sending:
            each.result()


def test_each_worker_loads_its_shard_of_the_weights_of_another_rank(
    serve: Serve, pairs: Pairs
) -> None:
    served = serve(pairs.get("qwen3_wide"), more={"tensor_parallel_size": 2})
    requests = make_requests(make_prompts(6), SamplingConfig(temperature=0, max_tokens=16))
    for version in (1, 2):
        publish(served, version)
        expected = served.pair.sampler().sample(requests)
        for actual, hf in zip(served.sampler.sample(requests), expected, strict=True):
            assert tuple(actual.tokens) == hf.tokens
            assert actual.weight_version == version
            assert actual.rollout_logprobs == pytest.approx(hf.rollout_logprobs, abs=5e-5)
        served.perturb(version)
