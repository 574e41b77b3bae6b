"""The hf sampler against what transformers computes one sequence at a time."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from packages.trainer.tests.rollout.conftest import Pairs
from packages.trainer.tests.rollout.models_for_tests import (
    ARCHITECTURES,
    END,
    Pair,
    make_prompts,
    make_requests,
)
from temper_engine_api.errors import ConfigError, EngineStateError
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.types import FinishReason

GREEDY = SamplingConfig(temperature=0.0, max_tokens=12)
SAMPLED = SamplingConfig(temperature=0.8, max_tokens=12)
MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """Compute SplitMix64 with Python integers."""

    def mix(state: int) -> int:
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
        return state ^ (state >> 31)

    return (mix(mix(seed & MASK) + (position + 1) * 0x9E3779B97F4A7C15 & MASK) >> 12) / 2**52


def draw_one_by_one(
    pair: Pair, prompt: Sequence[int], sampling: SamplingConfig, *, seed: int
) -> tuple[list[int], list[float]]:
    """Sample a completion from full forward passes and a cumulative sum in float64."""
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < sampling.max_tokens and tokens[-1:] != [END]:
        probabilities = (
            pair.next_logits([*prompt, *tokens]).double() / sampling.temperature
        ).softmax(-1)
        point = uniform(seed, len(tokens))
        tokens.append(int((probabilities.cumsum(-1) <= point).sum()))
        logprobs.append(math.log(probabilities[tokens[-1]]))
    return tokens, logprobs


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_generate_with_more_requests_than_slots(
    name: str, pairs: Pairs
) -> None:
    pair, prompts = pairs.get(name), make_prompts(11)
    completions = pair.sampler(max_concurrent=3).sample(make_requests(prompts, GREEDY))
    assert [c.tokens for c in completions] == [
        pair.greedy(prompt, max_tokens=12) for prompt in prompts
    ]
    assert [c.request_id for c in completions] == list(range(11))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cache_grows_with_longer_prompts_and_shrinks_at_the_end(name: str, pairs: Pairs) -> None:
    pair, prompts = (
        pairs.get(name),
        [[5], *make_prompts(6, longest=70), *make_prompts(5, seed=2, longest=230)],
    )
    completions = pair.sampler(max_concurrent=4).sample(
        make_requests(prompts, replace(GREEDY, max_tokens=25))
    )
    assert [c.tokens for c in completions] == [
        pair.greedy(prompt, max_tokens=25) for prompt in prompts
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sampled_tokens_and_logprobs_equal_draws_from_full_forward_passes(
    name: str, pairs: Pairs
) -> None:
    pair, prompts = pairs.get(name), make_prompts(5, seed=1)
    completions = pair.sampler(max_concurrent=4).sample(
        make_requests(prompts, SAMPLED, seeds=[9, -1, 2**70, 3, 4])
    )
    for completion, prompt, seed in zip(completions, prompts, [9, -1, 2**70, 3, 4], strict=True):
        tokens, logprobs = draw_one_by_one(pair, prompt, SAMPLED, seed=seed)
        assert list(completion.tokens) == tokens
        assert completion.rollout_logprobs == pytest.approx(logprobs, abs=1e-5)


@settings(max_examples=15)
@given(data=st.data(), max_concurrent=st.integers(1, 9))
def test_completion_does_not_depend_on_other_requests(
    data: st.DataObject, max_concurrent: int, qwen2: Pair
) -> None:
    requests = make_requests(make_prompts(4) * 2, SAMPLED)
    separate = {r.request_id: qwen2.sampler().sample([r])[0] for r in requests[:2]}
    others = data.draw(st.permutations(requests))[: data.draw(st.integers(2, 8))]
    together = qwen2.sampler(max_concurrent=max_concurrent).sample(
        [*others, *(r for r in requests[:2] if r not in others)]
    )
    for completion in together:
        if completion.request_id in separate:
            assert completion.tokens == separate[completion.request_id].tokens
            assert completion.rollout_logprobs == pytest.approx(
                separate[completion.request_id].rollout_logprobs, abs=1e-5
            )


def test_equal_prompts_with_different_seeds_give_different_completions(qwen2: Pair) -> None:
    prompt = make_prompts(1)[0]
    completions = qwen2.sampler().sample(make_requests([prompt] * 8, SAMPLED))
    assert len({c.tokens for c in completions}) > 4
    again = qwen2.sampler().sample(make_requests([prompt] * 8, SAMPLED))
    assert again == completions


def test_greedy_and_sampled_requests_can_be_in_one_batch(qwen2: Pair) -> None:
    prompts = make_prompts(2)
    greedy, sampled = make_requests(prompts, GREEDY)[0], make_requests(prompts, SAMPLED)[1]
    first, second = qwen2.sampler().sample([greedy, sampled])
    assert first.tokens == qwen2.greedy(prompts[0], max_tokens=12)
    assert list(second.tokens) == draw_one_by_one(qwen2, prompts[1], SAMPLED, seed=1)[0]
    # The log-prob of a greedy token is the model's own, at temperature 1.
    assert first.rollout_logprobs[0] == pytest.approx(
        float(qwen2.next_logits(prompts[0]).log_softmax(-1).max()), abs=1e-5
    )


def test_teacher_forced_logprobs_equal_those_of_sampling(qwen2: Pair) -> None:
    prompts = make_prompts(6)
    sampler = qwen2.sampler()
    completions = sampler.sample(make_requests(prompts, SAMPLED))
    logprobs = sampler.compute_logprobs(
        [[*p, *c.tokens] for p, c in zip(prompts, completions, strict=True)], temperature=0.8
    )
    for prompt, completion, row in zip(prompts, completions, logprobs, strict=True):
        assert len(row) == len(prompt) + len(completion.tokens) - 1
        assert row[len(prompt) - 1 :] == pytest.approx(completion.rollout_logprobs, abs=1e-5)


@settings(max_examples=10)
@given(top_k=st.sampled_from([0, 1, 3]), top_p=st.sampled_from([1.0, 0.6, 0.05]))
def test_every_token_is_in_the_support_of_top_k_and_top_p(
    top_k: int, top_p: float, qwen2: Pair
) -> None:
    sampling = SamplingConfig(max_tokens=6, top_k=top_k, top_p=top_p)
    prompts = make_prompts(2) * 2
    for completion, prompt in zip(
        qwen2.sampler().sample(make_requests(prompts, sampling)), prompts, strict=True
    ):
        for i, token in enumerate(completion.tokens):
            probabilities = qwen2.next_logits([*prompt, *completion.tokens[:i]]).softmax(-1)
            likelier = probabilities[probabilities > probabilities[token]]
            kept = probabilities.sort(descending=True).values[: top_k or None].sum()
            assert top_k == 0 or len(likelier) < top_k
            assert len(likelier) == 0 or float(likelier.sum() / kept) < top_p + 1e-6
            # Measured before anything is cut off.
            assert completion.rollout_logprobs[i] == pytest.approx(
                math.log(probabilities[token]), abs=1e-5
            )


def test_completion_has_its_finish_reason(qwen2: Pair) -> None:
    completions = qwen2.sampler().sample(
        make_requests(make_prompts(40), SamplingConfig(max_tokens=9))
    )
    for completion in completions:
        if completion.finish_reason is FinishReason.END_TOKEN:
            assert completion.tokens.index(END) == len(completion.tokens) - 1
        else:
            assert completion.finish_reason is FinishReason.MAX_TOKENS
            assert END not in completion.tokens
            assert len(completion.tokens) == 9
    assert len({completion.finish_reason for completion in completions}) == 2


def test_end_token_of_the_generation_config_ends_a_completion(qwen2: Pair, tmp_path: Path) -> None:
    shutil.copytree(qwen2.directory, tmp_path, dirs_exist_ok=True)
    free = qwen2.sampler().sample(make_requests(make_prompts(1), SAMPLED))[0].tokens
    GenerationConfig(eos_token_id=[END, free[2]]).save_pretrained(tmp_path)
    (ended,) = (
        Pair(model=qwen2.model, directory=tmp_path)
        .sampler()
        .sample(make_requests(make_prompts(1), SAMPLED))
    )
    assert ended.finish_reason is FinishReason.END_TOKEN
    assert ended.tokens == free[: free.index(free[2]) + 1]


def test_stop_text_ends_a_completion_and_is_part_of_it(qwen2: Pair) -> None:
    prompt = make_prompts(1)[0]
    free = qwen2.sampler().sample(make_requests([prompt], SAMPLED, seeds=[3]))[0].tokens
    # Tokens 2 to 40 are a to z, 0 to 9 and three signs: the third and fourth drawn are the stop
    # text.
    text = "".join(
        "abcdefghijklmnopqrstuvwxyz0123456789.,;"[token - 2] for token in free if token > END
    )
    stopping = replace(SAMPLED, stop=("##", text[2:4]))
    (stopped,) = qwen2.sampler().sample(make_requests([prompt], stopping, seeds=[3]))
    assert stopped.finish_reason is FinishReason.STOP_TEXT
    assert stopped.tokens == free[: text.index(text[2:4]) + 2]


def test_one_token_prompts_and_one_token_completions_work(qwen2: Pair) -> None:
    completions = qwen2.sampler().sample(
        make_requests([[5], [6]], SamplingConfig(temperature=0.0, max_tokens=1))
    )
    assert [c.tokens for c in completions] == [
        (int(qwen2.next_logits([t]).argmax()),) for t in (5, 6)
    ]


def test_no_requests_give_no_completions(qwen2: Pair) -> None:
    assert qwen2.sampler().sample([]) == []


def test_hf_sampler_implements_the_sampler_protocol(qwen2: Pair) -> None:
    assert isinstance(qwen2.sampler(), Sampler)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "complaint"),
    [
        (
            [5] * 252,
            5,
            r"needs 257 positions \(a prompt of 252 tokens .*, but the model has 256",
        ),
        ([], 5, "at least one token"),
        ([41], 5, "ids from 0 to 40"),
    ],
)
def test_request_that_cannot_be_served_is_refused(
    prompt: list[int], max_tokens: int, complaint: str, qwen2: Pair
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        qwen2.sampler().sample(make_requests([prompt], SamplingConfig(max_tokens=max_tokens)))


def test_requests_with_equal_ids_are_refused(qwen2: Pair) -> None:
    with pytest.raises(ConfigError, match="share a request_id"):
        qwen2.sampler().sample(make_requests([[5]], GREEDY) * 2)


def test_all_positions_of_the_model_can_be_used(qwen2: Pair) -> None:
    sampling = SamplingConfig(temperature=0.0, max_tokens=4)
    (completion,) = qwen2.sampler().sample(make_requests([[5] * 252], sampling))
    assert completion.tokens == qwen2.greedy([5] * 252, max_tokens=4)


def test_closed_sampler_raises(qwen2: Pair) -> None:
    sampler = qwen2.sampler()
    sampler.close()
    with pytest.raises(EngineStateError, match="is closed"):
        sampler.sample(make_requests([[5]], GREEDY))


def test_bf16_logprobs_are_close_to_fp32(qwen2: Pair) -> None:
    sequences = make_prompts(6)
    low, high = (
        qwen2.sampler(dtype=dtype).compute_logprobs(sequences, temperature=1.0)
        for dtype in ("bf16", "fp32")
    )
    for a, b in zip(low, high, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0.05, atol=0.15)
