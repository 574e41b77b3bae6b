"""A row of a product is the same bits whatever is computed beside it."""

import pytest
import torch

from temper_engine_api.batch_invariant import batch_invariant_linear


@pytest.mark.bitwise
@pytest.mark.parametrize("width", [16, 48, 896])
def test_a_row_does_not_depend_on_how_many_are_asked(width: int) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, width, generator=draw), torch.randn(101, width, generator=draw)
    whole = batch_invariant_linear(hidden, weight)
    for size in range(41):
        assert torch.equal(batch_invariant_linear(hidden[:size], weight), whole[:size]), size


def test_gradients_are_those_of_the_product() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, 8, generator=draw, dtype=torch.float64, requires_grad=True)
        for size in (3, 5)
    )
    assert torch.autograd.gradcheck(batch_invariant_linear, (hidden, weight))
