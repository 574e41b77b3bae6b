"""A rank's slice of a micro-batch: which tokens, at which positions, and who sees whom."""

import torch

from temper_engine_api.batch import from_sequences
from temper_engine_megatron.packing import local_micro_batch


def micro():
    return from_sequences([torch.arange(10, 13), torch.arange(20, 22)], loss_masks=[torch.zeros(3), torch.zeros(2)])


def test_slices_are_contiguous_and_padded_at_the_end():
    # 5 tokens padded to 8, four for each of two ranks.
    first, second = (local_micro_batch(micro(), cp_size=2, cp_rank=rank, token_multiple=4) for rank in (0, 1))
    assert first.tokens.tolist() == [10, 11, 12, 20]
    assert second.tokens.tolist() == [21, 0, 0, 0]
    assert (first.positions.tolist(), second.positions.tolist()) == ([0, 1, 2, 0], [1, 0, 0, 0])
    assert (first.first, second.first, second.size) == (0, 4, 4)


def test_a_token_sees_its_own_sequence_up_to_itself():
    whole = local_micro_batch(micro(), cp_size=1, cp_rank=0, token_multiple=1)
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [0, 0, 0, 1, 0],
            [0, 0, 0, 1, 1],
        ]
    ).bool()
    assert torch.equal(whole.attention.mask, expected)


def test_padding_sees_padding_only_and_nobody_sees_it():
    second = local_micro_batch(micro(), cp_size=2, cp_rank=1, token_multiple=4)
    assert second.attention.mask.shape == (4, 8)
    assert second.attention.mask[0].tolist() == [False] * 3 + [True, True] + [False] * 3
    assert second.attention.mask[3].tolist() == [False] * 5 + [True] * 3


def test_given_positions_are_kept():
    given = from_sequences([torch.arange(3)], loss_masks=[torch.zeros(3)])
    given = type(given)(**{**{f: getattr(given, f) for f in given.__slots__}, "position_ids": torch.tensor([5, 7, 9])})
    assert local_micro_batch(given, cp_size=1, cp_rank=0, token_multiple=2).positions.tolist() == [5, 7, 9, 0]
