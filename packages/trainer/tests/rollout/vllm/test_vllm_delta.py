"""Test deltas on a vLLM server, through shared memory and a channel, bit for bit."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from packages.trainer.tests.rollout.models_for_tests import make_pair, make_prompts
from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.rollout.vllm.server_process import ServerProcess
from temper_trainer.rollout.weight_delta import StaleBaseError
from temper_trainer.weight_sync.collective_transport import CollectiveTransport
from temper_trainer.weight_sync.shared_memory_transport import SharedMemoryDeltaTransport
from temper_trainer.weight_sync.transport import Transport

from .conftest import Serve, Served

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

BUCKET_BYTES = 7000
"""Small enough that q, k and v of a layer, which vLLM fuses, are in different buckets."""
ROWS = make_prompts(6, seed=4, longest=40)


class Actor:
    """One rank, in this process, with the reference model's weights."""

    is_first, rank, num_updates = True, 0, 0

    def __init__(self, served: Served) -> None:
        self.transport_state: dict[str, object] = {}
        self._served = served

    def export_weights(self) -> WeightStream:
        """Yield all weights."""
        return WeightStream(
            iter(
                [
                    NamedWeight(name, tensor)
                    for name, tensor in self._served.pair.model.state_dict().items()
                ]
            )
        )

    def run_on_all(self, call: Callable[..., Any], *arguments: object) -> list[Any]:
        return [call(self, *arguments)]

    @torch.no_grad()
    def train(self, seed: int, *, only: str = "") -> None:
        """Change a tenth of the elements of tensors whose name holds ``only``, by much."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self._served.pair.model.named_parameters():
            if only in name:
                parameter += (torch.rand(parameter.shape, generator=generator) < 0.1) * 0.3
        self.num_updates += 1


@pytest.fixture(scope="module")
def served(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Two servers for a model of this file alone: `Actor.train` changes it without saving it."""
    return serve(make_pair("qwen3_wide", tmp_path_factory.mktemp("model")), num_replicas=2)


@pytest.fixture
def actor(served: Served) -> Actor:
    return Actor(served)


@pytest.fixture(params=["shared_memory", "collective"])
def transport(request: pytest.FixtureRequest, served: Served, actor: Actor) -> Iterator[Transport]:
    made: Transport
    if request.param == "shared_memory":
        made = SharedMemoryDeltaTransport(
            actor=actor,
            sampler=served.sampler,
            bucket_bytes=BUCKET_BYTES,
            with_digest=True,
            max_changed_fraction=0.25,
        )
    else:
        made = CollectiveTransport(
            actor=actor,
            sampler=served.sampler,
            backend="gloo",
            workers_per_replica=1,
            bucket_bytes=BUCKET_BYTES,
            with_digest=True,
            load_timeout_s=60,
            can_resend=True,
            max_changed_fraction=0.25,
        )
    yield made
    made.close()


def assert_bits_of_full_weights(served: Served) -> None:
    """Log-probs on every replica are exactly those after a whole set of the same weights."""
    after_changes = [
        replica.call("compute_logprobs", ROWS).result() for replica in served.sampler.replicas
    ]
    buckets = served.write_buckets(served.sampler.weight_version + 1_000_000 * len(after_changes))
    for replica, logprobs in zip(served.sampler.replicas, after_changes, strict=True):
        replica.call("load_files", buckets, served.sampler.weight_version).result()
        assert replica.call("compute_logprobs", ROWS).result() == logprobs


def test_delta_gives_the_bits_of_full_weights(
    served: Served, actor: Actor, transport: Transport
) -> None:
    version = served.sampler.weight_version
    fractions = []
    for step, only in enumerate(("", "", "layers.1.self_attn.k_proj", "no such tensor"), start=1):
        actor.train(version + step, only=only)
        fractions.append(transport.send(version + step).fraction)
        assert served.sampler.weight_version == version + step
        reference_model = served.pair.model
        row_logprobs = served.sampler.compute_logprobs(ROWS, temperature=1.0)
        for row, logprobs in zip(ROWS, row_logprobs, strict=True):
            expected = (
                reference_model(input_ids=torch.tensor([row]))
                .logits[0, :-1]
                .float()
                .log_softmax(-1)
            )
            chosen = expected.gather(-1, torch.tensor(row)[1:, None])[:, 0].tolist()
            assert logprobs == pytest.approx(chosen, abs=2e-5)
    assert fractions[0] == 1.0
    assert 0.05 < fractions[1] < 0.2
    assert 0 < fractions[2] < 0.01, "k alone changed, of a layer that vLLM has fused with q and v"
    assert fractions[3] == 0.0
    assert_bits_of_full_weights(served)


def test_restarted_server_has_the_same_bits_and_accepts_the_next_delta(
    served: Served, actor: Actor, transport: Transport
) -> None:
    version = served.sampler.weight_version
    transport.send(version + 1)
    actor.train(version)
    transport.send(version + 2)
    before = served.sampler.compute_logprobs(ROWS, temperature=1.0)
    replica = served.sampler.replicas[0]
    assert isinstance(replica, ServerProcess)
    assert replica.process_id is not None
    restarts = served.sampler.num_restarts
    os.killpg(replica.process_id, signal.SIGKILL)
    assert served.sampler.compute_logprobs(ROWS, temperature=1.0) == before
    assert served.sampler.num_restarts == restarts + 1
    actor.train(version + 1)
    assert transport.send(version + 3).fraction < 0.2
    assert_bits_of_full_weights(served)


def test_server_refuses_a_delta_to_weights_that_it_does_not_have(
    served: Served, actor: Actor
) -> None:
    replica = served.sampler.replicas[0]
    served.publish_next()  # through files: nothing is held
    with pytest.raises(
        StaleBaseError,
        match=r"a delta relative to weights 5 arrived, but the server has a copy of no weights",
    ):
        replica.call("receive_delta", [], 5, 6).result()


def test_damaged_delta_is_refused_and_the_old_weights_stay(served: Served, actor: Actor) -> None:
    transport = SharedMemoryDeltaTransport(
        actor=actor,
        sampler=served.sampler,
        bucket_bytes=BUCKET_BYTES,
        with_digest=True,
        max_changed_fraction=0.25,
    )
    version = served.sampler.weight_version
    transport.send(version + 1)
    before = served.sampler.compute_logprobs(ROWS, temperature=1.0)
    actor.train(version)
    run_on_all = actor.run_on_all

    def run_and_damage(call: Callable[..., Any], *arguments: object) -> list[Any]:
        results = run_on_all(call, *arguments)
        if call.__name__ == "write_delta":
            path = results[0].deltas[-1].path
            data = torch.from_file(
                path, shared=True, size=results[0].deltas[-1].num_bytes, dtype=torch.uint8
            )
            data[3] ^= 1
        return results

    actor.run_on_all = run_and_damage  # type: ignore[method-assign]
    with pytest.raises(WeightError, match=r"rollout replica 0: .* arrived damaged"):
        transport.send(version + 2)
    assert served.sampler.compute_logprobs(ROWS, temperature=1.0) == before
    actor.run_on_all = run_on_all  # type: ignore[method-assign]
    transport.send(version + 2)
    assert_bits_of_full_weights(served)
    transport.close()
