"""Test the parts of sequence parallelism that need one process.

The layouts sp2 and sp4 of the conformance kit test its gradients.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from temper_engine_api.batch import from_sequences
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model.output_head import HeadRequest, build_head_request
from temper_engine_fsdp.model.sequence_parallel import check_heads


def ask(*, bounds: tuple[int, int]) -> HeadRequest:
    # Two sequences of 4 and 3 tokens: positions 1, 2, 3 and 5, 6 have a predecessor; the last
    # tokens are 3 and 6.
    batch = from_sequences(
        [torch.arange(4), torch.arange(3)], loss_masks=[torch.arange(4) > 0, torch.arange(3) > 0]
    )
    requested = frozenset({HeadOutput.LOGPROB})
    return build_head_request(
        batch,
        requested_outputs=requested,
        with_gradient=requested,
        trained_only=False,
        device=torch.device("cpu"),
        bounds=bounds,
    )


def test_each_output_is_computed_by_the_rank_with_the_previous_token() -> None:
    # 7 tokens on 2 ranks: slices of 4, the second with one token of padding. Token 4 begins a
    # sequence, so no token predicts it.
    first, second = ask(bounds=(0, 4)), ask(bounds=(4, 8))
    assert first.positions.tolist() == [1, 2, 3]
    assert second.positions.tolist() == [5, 6]
    assert (first.score_sequences.tolist(), second.score_sequences.tolist()) == ([0], [1])
    assert (first.first_position, second.first_position) == (0, 4)


def test_output_at_the_start_of_a_slice_belongs_to_the_previous_rank() -> None:
    assert ask(bounds=(0, 2)).positions.tolist() == [1, 2]
    assert ask(bounds=(2, 4)).positions.tolist() == [3]


def test_a_size_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"sequence_parallel is 3, but must divide the model's 4 attention heads"
    ):
        check_heads(4, size=3)


def test_a_size_that_does_not_divide_the_ranks_is_refused(start: Callable[..., FSDPEngine]) -> None:
    with pytest.raises(
        ConfigError, match=r"sequence_parallel is 2, but must divide the world size 1"
    ):
        start(sequence_parallel=2)
    if dist.is_initialized():
        dist.destroy_process_group()
