"""Test that full log-probs equal chunked ones, compiled or not."""

import pytest
import torch

from temper_engine_fsdp.model.token_logprobs import TokenLogprobs, chunked_logprobs, full_logprobs

# Torch's compiler looks at the gradients of tensors that have none, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def inputs() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(23, 16, generator=draw).requires_grad_(),
        "weight": torch.randn(53, 16, generator=draw).requires_grad_(),
        "labels": torch.randint(53, (23,), generator=draw),
        "temperature": torch.rand(23, generator=draw) + 0.5,
        "extra_ids": torch.randint(53, (23, 3), generator=draw),
    }


def gradients(
    columns: TokenLogprobs, given: dict[str, torch.Tensor], *, with_entropy: bool
) -> list[torch.Tensor]:
    loss = (
        (columns.logprob * torch.arange(23)).sum()
        + columns.logsumexp.square().sum()
        + columns.extra_logprobs.pow(3).sum()
    )
    loss = loss + (columns.entropy.square().sum() if with_entropy else 0.0)
    return list(torch.autograd.grad(loss, (given["hidden"], given["weight"])))


# Nightly: compiling the head takes longer than its computation, which runs without it every day.
@pytest.mark.parametrize("uses_compile", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_outputs_and_gradients_equal_the_chunked_head(
    with_entropy: bool, uses_compile: bool
) -> None:
    given = inputs()
    chunked = chunked_logprobs(
        **given, needs_entropy=True, entropy_has_gradient=with_entropy, chunk_tokens=7
    )
    full = full_logprobs(
        **given, needs_entropy=True, entropy_has_gradient=with_entropy, uses_compile=uses_compile
    )
    for name in ("logprob", "logsumexp", "entropy", "extra_logprobs"):
        torch.testing.assert_close(
            getattr(full, name), getattr(chunked, name), rtol=1e-5, atol=1e-5
        )
    full_gradients, chunked_gradients = (
        gradients(columns, given, with_entropy=with_entropy) for columns in (full, chunked)
    )
    for actual, expected in zip(full_gradients, chunked_gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_full_and_chunked_head_are_equal_without_a_temperature() -> None:
    given = inputs()
    del given["temperature"], given["extra_ids"]
    torch.testing.assert_close(
        full_logprobs(**given).logprob, chunked_logprobs(**given).logprob, rtol=1e-5, atol=1e-5
    )


def test_logits_are_not_kept_without_gradients() -> None:
    given = {name: tensor.detach() for name, tensor in inputs().items()}
    assert full_logprobs(**given).logprob.grad_fn is None
