"""Test chunked log-probs against their definition, in float64 with all logits."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from temper_engine_fsdp.model import token_logprobs
from temper_engine_fsdp.model.token_logprobs import TokenLogprobs, chunked_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """N positions, V tokens, D dimensions, K further ids."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: Tensor
    extra_ids: Tensor
    softcap: float | None = None

    def fused(
        self, *, chunk_tokens: int | None = None, entropy_has_gradient: bool = True
    ) -> TokenLogprobs:
        return chunked_logprobs(
            self.hidden,
            self.weight,
            self.labels,
            temperature=self.temperature,
            extra_ids=self.extra_ids,
            needs_entropy=True,
            entropy_has_gradient=entropy_has_gradient,
            chunk_tokens=chunk_tokens,
            softcap=self.softcap,
        )

    def naive(self) -> TokenLogprobs:
        logits = self.hidden.double() @ self.weight.double().t()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logits = logits / self.temperature.double()[:, None]
        logprobs = torch.log_softmax(logits, dim=-1)
        return TokenLogprobs(
            logprob=logprobs.gather(1, self.labels[:, None])[:, 0],
            logsumexp=torch.logsumexp(logits, dim=-1),
            entropy=-(logprobs.exp() * logprobs).sum(-1),
            extra_logprobs=logprobs.gather(1, self.extra_ids),
        )


def make_case(*, positions: int = 37, vocabulary: int = 101, scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(7)
    return Case(
        hidden=torch.randn(positions, 16, generator=generator).requires_grad_(),
        weight=(scale * torch.randn(vocabulary, 16, generator=generator)).requires_grad_(),
        labels=torch.randint(0, vocabulary, (positions,), generator=generator),
        temperature=0.5 + torch.rand(positions, generator=generator),
        extra_ids=torch.randint(0, vocabulary, (positions, 3), generator=generator),
    )


def mixed_loss(columns: TokenLogprobs) -> Tensor:
    """Weight every column and position differently, so that errors cannot cancel."""
    at = torch.arange(1.0, columns.logprob.shape[0] + 1, dtype=columns.logprob.dtype).sin()
    loss = (
        (columns.logprob * at).sum()
        + 0.3 * (columns.logsumexp * at.square()).sum()
        + 0.1 * columns.extra_logprobs.sum()
    )
    return loss + 0.7 * (columns.entropy * at).sum() if columns.entropy.requires_grad else loss


def gradients(case: Case, loss: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, (case.hidden, case.weight))


# 1 position a chunk; a last chunk of 37 - 3 * 12 = 1; one of 37 - 4 * 8 = 5; exactly one chunk;
# more than there are.
@pytest.mark.parametrize("chunk_tokens", [1, 8, 12, 37, 64])
def test_columns_equal_their_definition_at_every_chunk_boundary(chunk_tokens: int) -> None:
    case = make_case()
    fused, naive = case.fused(chunk_tokens=chunk_tokens), case.naive()
    for name in ("logprob", "logsumexp", "entropy", "extra_logprobs"):
        torch.testing.assert_close(
            getattr(fused, name), getattr(naive, name).float(), rtol=2e-6, atol=2e-6
        )


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_soft_capped_logits_equal_their_definition(chunk_tokens: int) -> None:
    case = replace(make_case(scale=3.0), softcap=5.0)
    fused, naive = case.fused(chunk_tokens=chunk_tokens), case.naive()
    # The cap matters: without it, some log-prob differs by more than 1.
    uncapped = replace(case, softcap=None).naive()
    assert float((uncapped.logprob - naive.logprob).detach().abs().max()) > 1.0
    for name in ("logprob", "logsumexp", "entropy", "extra_logprobs"):
        torch.testing.assert_close(
            getattr(fused, name), getattr(naive, name).float(), rtol=4e-6, atol=4e-6
        )
    for actual, expected in zip(
        gradients(case, mixed_loss(fused)), gradients(case, mixed_loss(naive))
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 8, 64])
def test_gradients_of_hidden_and_weight_equal_autograds(chunk_tokens: int) -> None:
    case = make_case()
    for fused, naive in zip(
        gradients(case, mixed_loss(case.fused(chunk_tokens=chunk_tokens))),
        gradients(case, mixed_loss(case.naive())),
    ):
        torch.testing.assert_close(fused, naive, rtol=1e-5, atol=1e-5)


def test_entropy_without_gradient_leaves_the_other_gradients_as_they_are() -> None:
    case = make_case()
    columns = case.fused(entropy_has_gradient=False)
    assert not columns.entropy.requires_grad
    naive = case.naive()
    naive = TokenLogprobs(
        logprob=naive.logprob,
        logsumexp=naive.logsumexp,
        entropy=naive.entropy.detach(),
        extra_logprobs=naive.extra_logprobs,
    )
    for actual, expected in zip(
        gradients(case, mixed_loss(columns)), gradients(case, mixed_loss(naive))
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_entropy_that_the_loss_ignores_costs_no_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the entropy's gradient was computed")

    case = make_case()
    expected = gradients(case, case.fused(entropy_has_gradient=False).logprob.sum())
    monkeypatch.setattr(token_logprobs, "_entropy_coefficient", refuse)
    for actual, plain in zip(gradients(case, case.fused().logprob.sum()), expected, strict=True):
        assert torch.equal(actual, plain)


def test_log_probs_have_the_same_bits_with_and_without_entropy() -> None:
    """A row of 300,000 tokens exceeds the cache, so that rows are computed one by one."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw) for n in (9, 300_000))
    labels = torch.arange(9)
    plain = chunked_logprobs(hidden, weight, labels)
    measured = chunked_logprobs(hidden, weight, labels, needs_entropy=True)
    assert torch.equal(measured.logprob, plain.logprob)
    assert torch.equal(measured.logsumexp, plain.logsumexp)


def test_peaked_logits_stay_finite_and_exact() -> None:
    # Standard deviation 200 in the logits: all mass on one token, log-probs of the others below
    # -100.
    case = make_case(scale=50.0)
    fused, naive = case.fused(chunk_tokens=5), case.naive()
    torch.testing.assert_close(fused.logprob, naive.logprob.float(), rtol=2e-6, atol=2e-4)
    torch.testing.assert_close(fused.entropy, naive.entropy.float(), rtol=1e-4, atol=1e-5)
    for actual, expected in zip(
        gradients(case, mixed_loss(case.fused())), gradients(case, mixed_loss(naive))
    ):
        assert bool(actual.isfinite().all())
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_uniform_logits_have_the_entropy_and_logprob_of_the_vocabulary() -> None:
    # A weight of zeros makes every token equally likely: log-prob -log 101, entropy log 101,
    # logsumexp log 101.
    case = make_case()
    columns = chunked_logprobs(case.hidden, torch.zeros(101, 16), case.labels, needs_entropy=True)
    expected = torch.full((37,), math.log(101.0))
    torch.testing.assert_close(columns.logprob, -expected)
    torch.testing.assert_close(columns.entropy, expected)
    torch.testing.assert_close(columns.logsumexp, expected)


def test_an_id_requested_twice_gets_its_gradient_twice() -> None:
    case = make_case(positions=1)
    once = chunked_logprobs(case.hidden, case.weight, case.labels, extra_ids=torch.tensor([[4]]))
    twice = chunked_logprobs(
        case.hidden, case.weight, case.labels, extra_ids=torch.tensor([[4, 4]])
    )
    single, double = (
        gradients(case, once.extra_logprobs.sum()),
        gradients(case, twice.extra_logprobs.sum()),
    )
    for one, two in zip(single, double):
        torch.testing.assert_close(two, 2 * one)


def test_no_position_gives_empty_columns_and_gradients_of_zero() -> None:
    case = make_case(positions=0)
    columns = case.fused()
    assert columns.logprob.shape == (0,)
    hidden, weight = gradients(case, columns.logprob.sum())
    assert hidden.shape == (0, 16)
    assert torch.equal(weight, torch.zeros(101, 16))


def test_bf16_inputs_give_float32_columns_from_bf16_logits() -> None:
    case = make_case()
    hidden, weight = case.hidden.detach().bfloat16(), case.weight.detach().bfloat16()
    columns = chunked_logprobs(hidden, weight, case.labels)
    logits = (hidden @ weight.t()).float()
    expected = torch.log_softmax(logits, dim=-1).gather(1, case.labels[:, None])[:, 0]
    assert columns.logprob.dtype == torch.float32
    torch.testing.assert_close(columns.logprob, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.bitwise
def test_a_log_prob_does_not_depend_on_the_number_of_requested_ones() -> None:
    # Evaluation answers every position, training only the trained ones: an on-policy ratio must be
    # exactly 1 all the same.
    case = make_case()
    all_tokens = case.fused()
    for size in (1, 2, 3, 5, 36):
        few = chunked_logprobs(
            case.hidden[:size],
            case.weight,
            case.labels[:size],
            temperature=case.temperature[:size],
            needs_entropy=True,
        )
        assert torch.equal(few.logprob, all_tokens.logprob[:size])
        assert torch.equal(few.entropy, all_tokens.entropy[:size])
