"""Experts that a vLLM server reports, compared with full passes of transformers."""

import pytest
import torch

from packages.trainer.tests.rollout.conftest import Pairs
from packages.trainer.tests.rollout.models_for_tests import Pair, make_prompts, make_requests
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.types import Completion

from .conftest import Serve, Served

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SAMPLED = SamplingConfig(max_tokens=24)


@pytest.fixture(scope="module")
def served(serve: Serve, pairs: Pairs) -> Served:
    """One server of a mixture of experts, which reports its choices."""
    try:
        servers = serve(pairs.get("qwen3_moe_wide"), has_expert_choices=True)
    except ReplicaError as error:
        if "requires Model Runner V2" not in str(error):
            raise
        pytest.skip("needs vLLM 0.27 on a CPU: 0.32 reports experts only where Triton runs")
    servers.publish(1)
    return servers


def choose_experts(pair: Pair, tokens: list[int]) -> torch.Tensor:
    """Return the [T, layers, K] experts of a full pass, sorted: their order has no meaning."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for module in pair.model.modules()
        if type(module).__name__.endswith("Router")
    ]
    pair.next_logits(tokens)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).sort().values


def assert_equal_choices(pair: Pair, prompt: list[int], completion: Completion) -> None:
    assert completion.routed_experts is not None
    expected = choose_experts(pair, [*prompt, *completion.tokens[:-1]])
    assert expected.shape[1] == 2, "the dense layer has no experts"
    assert completion.routed_experts.long().sort().values.equal(expected)


def test_reported_experts_are_those_of_a_full_pass_after_every_weight_sync(served: Served) -> None:
    # The second prompt continues the first by more than a block of the prefix cache.
    long = make_prompts(1, seed=3, longest=20)[0] * 12
    prompts = [*make_prompts(4, seed=1), [7], long[:150], long[:190]]
    for seed in (5, 6):
        requests = make_requests(prompts, SAMPLED)
        for prompt, completion in zip(prompts, served.sampler.sample(requests), strict=True):
            assert_equal_choices(served.pair, prompt, completion)
        served.perturb(seed)
        served.publish_next()
