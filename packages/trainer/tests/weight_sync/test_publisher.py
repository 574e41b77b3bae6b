"""Publishing to the honest fake sampler: numbers, and the canary."""

import math

import pytest
import torch

from temper_engine_api.errors import WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.weight_sync.buckets import WeightBucket, pack_buckets
from temper_trainer.weight_sync.publisher import Canary, Publisher
from temper_trainer.weight_sync.stream_transport import StreamTransport


def export() -> list[WeightBucket]:
    return list(pack_buckets([NamedWeight("w", torch.zeros(2))]))


def sampler(logprob: float = -1.0) -> ScriptedSampler:
    return ScriptedSampler(
        lambda request: [request.prompt_tokens[-1]], end_token_id=1, logprob=logprob
    )


def publisher_of(receiver: ScriptedSampler, *, version: int = 0) -> Publisher:
    return Publisher(
        transport=StreamTransport(export=export, sampler=receiver),
        sampler=receiver,
        version=version,
    )


def test_every_publish_has_the_next_version() -> None:
    receiver = sampler()
    publisher = publisher_of(receiver, version=4)
    assert [publisher.publish()["weight_sync/version"] for _ in range(3)] == [5.0, 6.0, 7.0]
    assert receiver.weight_version == 7


def test_agreeing_canary_reports_its_difference() -> None:
    canary = Canary(tokens=(3, 4, 5), engine_logprobs=lambda: [-1.0, -1.01], tolerance=0.05)
    metrics = publisher_of(sampler()).publish(canary)
    assert metrics["weight_sync/canary_difference"] == pytest.approx(0.01)


@pytest.mark.parametrize("wrong", [-1.2, float("inf")])
def test_differing_canary_stops_the_run(wrong: float) -> None:
    canary = Canary(tokens=(3, 4, 5), engine_logprobs=lambda: [-1.0, wrong], tolerance=0.05)
    with pytest.raises(WeightError, match=r"differ by .* rollout\.canary_tolerance"):
        publisher_of(sampler()).publish(canary)


@pytest.mark.parametrize(
    ("trained", "sampled", "message"),
    [
        (math.nan, math.nan, r"the engine's log-probs .* are NaN: its weights contain NaN"),
        (math.nan, -1.0, r"the engine's log-probs .* are NaN: its weights contain NaN"),
        (-1.0, math.nan, r"the sampler's log-probs .* are NaN, but the engine's are numbers"),
        # The difference of two infinities is NaN.
        (-math.inf, -math.inf, r"differ by nan .* rollout\.canary_tolerance"),
    ],
)
def test_canary_tells_nan_from_other_weights(trained: float, sampled: float, message: str) -> None:
    canary = Canary(tokens=(3, 4, 5), engine_logprobs=lambda: [-1.0, trained], tolerance=0.05)
    with pytest.raises(WeightError, match=message):
        publisher_of(sampler(sampled)).publish(canary)


def test_sampler_with_old_weights_is_refused() -> None:
    class Deaf(ScriptedSampler):
        """Takes weights and stays at its version."""

        @property
        def weight_version(self) -> int:
            return 0

    deaf = Deaf(lambda request: [request.prompt_tokens[-1]], end_token_id=1)
    with pytest.raises(
        WeightError, match="weights 1 were published, but the sampler has weights 0"
    ):
        publisher_of(deaf).publish()


def test_differing_canary_names_the_versions_of_the_sampler() -> None:
    receiver = sampler()
    transport = StreamTransport(export=export, sampler=receiver)
    publisher = Publisher(
        transport=transport, sampler=receiver, software="vLLM 0.33.0 (tested: 0.26 to 0.32)"
    )
    canary = Canary(tokens=(3, 4), engine_logprobs=lambda: [-2.0], tolerance=0.05)
    with pytest.raises(WeightError, match=r"runs on vLLM 0\.33\.0 \(tested: 0\.26 to 0\.32\)"):
        publisher.publish(canary)
