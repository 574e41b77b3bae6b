"""Test that outputs of several ranks are gathered in the requested order."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper_engine_api.batch import Denominators, SequenceBatch
from temper_engine_api.errors import BatchError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.outputs import collect_outputs, gather_outputs
from temper_engine_api.plan import build_packed_batch, plan_mini_batch

MakeBatch = Callable[..., SequenceBatch]
DENOMINATORS = Denominators(tokens=1, sequences=1, groups=1)


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12), dp_size=st.integers(1, 4))
def test_outputs_of_a_planned_batch_are_gathered_in_input_order(
    make_batch: MakeBatch, lengths: list[int], dp_size: int
) -> None:
    batch = make_batch(lengths, sample_ids=[100 - i for i in range(len(lengths))])
    plan = plan_mini_batch(lengths, dp_size=dp_size, max_tokens=9)
    parts = []
    for rank in range(dp_size):
        packed = build_packed_batch(batch, plan=plan, rank=rank, denominators=DENOMINATORS)
        columns = {
            HeadOutput.LOGPROB: packed.columns["advantages"],
            HeadOutput.SCORE: packed.sequence_columns["scores"],
        }
        parts.append(collect_outputs(packed, columns))
    gathered = gather_outputs([*parts, None], sample_ids=batch.sample_ids)
    assert torch.equal(gathered.columns[HeadOutput.LOGPROB], batch.columns["advantages"])
    assert torch.equal(gathered.columns[HeadOutput.SCORE], batch.sequence_columns["scores"])
    assert torch.equal(gathered.sequence_starts, batch.sequence_starts.long())


def test_dummies_are_dropped(make_batch: MakeBatch) -> None:
    plan = plan_mini_batch([3], dp_size=2, max_tokens=9)
    packed = build_packed_batch(make_batch([3]), plan=plan, rank=1, denominators=DENOMINATORS)
    outputs = collect_outputs(packed, {HeadOutput.LOGPROB: torch.ones(1)})
    assert outputs.sample_ids.tolist() == []
    assert outputs.columns[HeadOutput.LOGPROB].shape == (0,)


@pytest.mark.parametrize("requested", [[0, 1], [0, 1, 1], [0, 1, 5], [0, 1, 2, 2]])
def test_missing_or_repeated_id_is_refused(make_batch: MakeBatch, requested: list[int]) -> None:
    outputs = collect_outputs(make_batch([2, 3, 1]), {HeadOutput.LOGPROB: torch.ones(6)})
    with pytest.raises(BatchError, match="outputs have 3 sequences with 3 distinct ids"):
        outputs.reorder(torch.tensor(requested))


def test_no_outputs_at_all_is_an_error() -> None:
    with pytest.raises(BatchError, match="no rank returned outputs") as caught:
        gather_outputs([None, None], sample_ids=torch.tensor([0]))
    named = re.findall(r"HeadOutput\.(\w+)", str(caught.value))
    assert [HeadOutput[name] for name in named] == [HeadOutput.LOGPROB]
