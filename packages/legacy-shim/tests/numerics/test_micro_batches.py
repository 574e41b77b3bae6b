from pathlib import Path
from typing import Any

import pytest
from golden_traces import GOLDEN, json_of, needs_golden, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from temper_legacy_shim.workers.batches.updates import rows_by_count, rows_by_tokens

# Traces that only read log-probs made no update whose split could be compared.
DYNAMIC = (
    sorted(path for path in GOLDEN.glob("*/*dynamic*/*fsdp2_ws*") if "logprob" not in str(path))
    if GOLDEN.is_dir()
    else []
)


@needs_golden
@pytest.mark.parametrize("folder", DYNAMIC, ids=lambda path: "/".join(path.parts[-3:]))
def test_the_split_by_tokens_is_the_old_one_row_by_row(folder: Path) -> None:
    case: dict[str, Any] = json_of(folder / "case.json")
    partitions: Any = json_of(folder / "metrics.json")["micro_batch_partitions_per_rank"]
    lengths: list[int] = (
        tensors_of((folder / case["inputs"]).resolve())["attention_mask"].sum(1).tolist()
    )
    size = case["ppo_mini_batch_size_after_worker_normalization"]
    for (first, last), updates in zip(case["rows_per_rank"], partitions, strict=True):
        own = lengths[first:last]
        minis = [own[start : start + size] for start in range(0, len(own), size)]
        for i, split in enumerate(updates):
            assert (
                rows_by_tokens(
                    minis[i % len(minis)], max_tokens=case["config"]["ppo_max_token_len_per_gpu"]
                )
                == split
            )


@settings(deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40), budget=st.integers(1, 20000)
)
def test_every_row_is_in_one_micro_batch_and_their_number_follows_from_the_budget(
    lengths: list[int], budget: int
) -> None:
    split = rows_by_tokens(lengths, max_tokens=budget)
    assert sorted(row for rows in split for row in rows) == list(range(len(lengths)))
    assert len(split) == min(len(lengths), -(-sum(lengths) // budget))


def test_the_split_by_count_leaves_a_shorter_last_piece() -> None:
    assert rows_by_count(5, size=2) == [[0, 1], [2, 3], [4]]
