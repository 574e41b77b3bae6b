"""Deltas to the transformers sampler: the same bits as full weights, and full weights if stale."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from packages.trainer.tests.rollout.models_for_tests import Pair, make_pair, make_tokenizer
from temper_engine_api.errors import WeightError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.weights import NamedWeight, WeightStream
from temper_trainer.config.rollout import RolloutConfig
from temper_trainer.rollout.hf_sampler import HfSampler
from temper_trainer.rollout.weight_delta import StaleBaseError
from temper_trainer.weight_sync.stream_transport import (
    InProcessTransport,
    StreamDeltaTransport,
    cache_current_weights,
    export_delta,
)

BUCKET_BYTES = 3000
"""Bucket size that one float32 matrix of 24 x 40 or 41 x 24 fits into."""


class Actor:
    """One rank, in this process: a model's weights as a sampler gets them."""

    is_first, rank, num_updates = True, 0, 0

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.transport_state: dict[str, object] = {}
        self.weights = weights

    def export_weights(self) -> WeightStream:
        """Yield all weights."""
        return WeightStream(
            iter([NamedWeight(name, tensor) for name, tensor in self.weights.items()])
        )

    def run_on_all(self, call: Callable[..., Any], *arguments: object) -> list[Any]:
        return [call(self, *arguments)]

    def train(self, seed: int, *, changed_fraction: float) -> None:
        """Change a share of the elements of every tensor."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.weights.items():
            is_changed = torch.rand(tensor.shape, generator=generator) < changed_fraction
            self.weights[name] = torch.where(is_changed, tensor + 1, tensor)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair("qwen2", tmp_path)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def actor(pair: Pair, request: pytest.FixtureRequest) -> Actor:
    names = [name for name in pair.model.state_dict() if name != "lm_head.weight"]
    return Actor({name: pair.model.state_dict()[name].to(request.param) for name in names})


def sampler_of(pair: Pair) -> HfSampler:
    return HfSampler(
        model=ModelSpec(path=str(pair.directory)),
        tokenizer=make_tokenizer(),
        config=RolloutConfig(),
        device="cpu",
    )


def weights_of(sampler: HfSampler) -> dict[str, Tensor]:
    model = sampler._require_model()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def transport_to(sampler: HfSampler, actor: Actor) -> StreamDeltaTransport:
    send_full_weights = InProcessTransport(actor=actor, sampler=sampler)
    return StreamDeltaTransport(
        send_full_weights,
        actor=actor,
        sampler=sampler,
        bucket_bytes=BUCKET_BYTES,
        max_changed_fraction=0.25,
    )


def send_full_weights(actor: Actor, pair: Pair) -> dict[str, Tensor]:
    """Return the weights of a sampler that got all of the actor's weights at once."""
    fresh = sampler_of(pair)
    fresh.load_weights(
        (NamedWeight(name, tensor) for name, tensor in actor.weights.items()), version=1
    )
    return weights_of(fresh)


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(
        actual[name].view(torch.uint8).equal(expected[name].view(torch.uint8)) for name in expected
    )


@pytest.mark.bitwise
def test_after_a_delta_the_sampler_has_the_bits_of_full_weights(pair: Pair, actor: Actor) -> None:
    sampler = sampler_of(pair)
    transport = transport_to(sampler, actor)
    sent_fractions, sizes = [], []
    for version, changed_fraction in enumerate((0.0, 0.02, 0.0, 0.9, 0.02), start=1):
        actor.train(version, changed_fraction=changed_fraction)
        sent = transport.send(version)
        sent_fractions.append(sent.fraction)
        sizes.append(sent.num_bytes)
        assert sampler.weight_version == version
        assert_same_bits(weights_of(sampler), send_full_weights(actor, pair))
    assert sent_fractions[0] == sent_fractions[3] == 1.0, (
        "the first set, and one of which nearly everything changed"
    )
    assert (sent_fractions[2], sizes[2]) == (0.0, 0)
    assert 0 < sent_fractions[1] < 0.3  # 2 %, and the small tensors whole
    assert sizes[1] < sizes[0] / 2


def test_restarted_sampler_gets_full_weights(
    pair: Pair, actor: Actor, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = sampler_of(pair)
    transport = transport_to(sampler, actor)
    transport.send(1)
    actor.train(1, changed_fraction=0.02)
    again = sampler_of(pair)
    restarted = transport_to(again, actor)
    restarted._key, restarted._base_version = transport._key, 1
    sent = restarted.send(2)
    assert (
        "a delta relative to weights 1 arrived, but the sampler has weights 0. Sending all"
        in caplog.text
    )
    assert sent.fraction == 1.0
    assert_same_bits(weights_of(again), send_full_weights(actor, pair))
    actor.train(2, changed_fraction=0.02)
    assert restarted.send(3).fraction < 1.0
    assert_same_bits(weights_of(again), send_full_weights(actor, pair))


def test_after_a_failed_publish_the_next_one_sends_full_weights(pair: Pair, actor: Actor) -> None:
    sampler = sampler_of(pair)
    transport = transport_to(sampler, actor)
    transport.send(1)
    left = actor.weights.popitem()
    with pytest.raises(WeightError, match="other names, shapes or dtypes"):
        transport.send(2)
    actor.weights |= dict([left])
    assert transport.send(2).fraction == 1.0
    assert_same_bits(weights_of(sampler), send_full_weights(actor, pair))


def test_stale_damaged_or_mismatching_deltas_change_nothing(pair: Pair, actor: Actor) -> None:
    sampler = sampler_of(pair)
    sampler.load_weights(
        (NamedWeight(name, tensor) for name, tensor in actor.weights.items()), version=1
    )
    before = weights_of(sampler)
    cache_current_weights(actor, "key", BUCKET_BYTES, 1)
    actor.train(1, changed_fraction=0.02)
    first, *rest = export_delta(actor, "key", BUCKET_BYTES, 2, 1, 0.25)
    with pytest.raises(
        StaleBaseError, match="a delta relative to weights 7 arrived, but the sampler has weights 1"
    ):
        sampler.load_delta([first, *rest], base_version=7, version=8)
    damaged = replace(rest[-1], data=rest[-1].data.flip(0))
    renamed = replace(
        first, entries=tuple(replace(entry, name=f"other.{entry.name}") for entry in first.entries)
    )
    for buckets, complaint in (
        ([first, *rest[:-1], damaged], "arrived damaged"),
        ([first, *rest[:-1]], "not all of them in order"),
        ([renamed, *rest], r"other\.\S+ of shape .* but the model has no such tensor"),
    ):
        with pytest.raises(WeightError, match=complaint):
            sampler.load_delta(buckets, base_version=1, version=2)
    assert sampler.weight_version == 1
    assert_same_bits(weights_of(sampler), before)
    sampler.load_delta([first, *rest], base_version=1, version=2)
    assert_same_bits(weights_of(sampler), send_full_weights(actor, pair))


def test_rank_0_reports_a_missing_base(actor: Actor) -> None:
    with pytest.raises(WeightError, match="does not have weights 3 any more"):
        export_delta(actor, "another key", BUCKET_BYTES, 4, 3, 0.25)


def test_other_ranks_take_part_in_gathering_full_weights_and_deltas() -> None:
    gathered: list[str] = []

    class Other(Actor):
        is_first = False

        def export_weights(self) -> WeightStream:
            return WeightStream(
                NamedWeight(name, tensor)
                for name, tensor in self.weights.items()
                if gathered.append(name) is None
            )

    other = Other({"a": torch.zeros(3), "b": torch.zeros(3)})
    cache_current_weights(other, "key", BUCKET_BYTES, 1)
    assert export_delta(other, "key", BUCKET_BYTES, 2, 1, 0.25) == []
    assert gathered == ["a", "b"] * 2
