"""Test full and hybrid sharding on two ranks against one.

The conformance kit tests everything else about ranks.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import pytest
import torch
from torch import Tensor

from temper_engine_fsdp.sharding.fsdp2 import _resolve_reshard

SCRIPT = Path(__file__).with_name("train_as_rank.py")


class Outcome(TypedDict):
    """Results of one rank."""

    norms: list[float]
    weights: dict[str, Tensor]
    reductions: list[int]
    """Collectives in a call with one micro-batch, and with several."""


def run_ranks(
    world_size: int,
    *,
    fsdp_size: str,
    folder: Path,
    strategy: str = "fsdp2",
    keeping: str = "reshards",
) -> list[Outcome]:
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), strategy, fsdp_size, keeping, str(folder)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(world_size)
    ]
    assert [rank.wait(timeout=200) for rank in ranks] == [0] * world_size
    return [torch.load(folder / f"rank-{rank}-of-{world_size}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_ranks(1, fsdp_size="all", folder=tmp_path_factory.mktemp("ranks") / "one_rank")[0]


# Two shards of one copy; two copies that are not sharded; parameters gathered for the next pass;
# both layers as one. Nightly, because each row starts two processes: in each pull request the
# conformance kit compares the first five with the oracle, in one session of ranks.
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "fsdp_size", "keeping"),
    [
        ("fsdp2", "all", "reshards"),
        ("fsdp1", "all", "reshards"),
        ("fsdp2", "1", "reshards"),
        ("fsdp1", "1", "reshards"),
        ("fsdp2", "all", "keeps"),
        ("fsdp2", "all", "together-reshards"),
        ("fsdp2", "all", "together-keeps"),
    ],
)
def test_two_ranks_train_like_one(
    one_rank: Outcome, fsdp_size: str, strategy: str, keeping: str, tmp_path: Path
) -> None:
    for outcome in run_ranks(
        2, fsdp_size=fsdp_size, strategy=strategy, keeping=keeping, folder=tmp_path / "ranks"
    ):
        # The last update is that of the first weights, loaded again.
        assert outcome["norms"][3] == pytest.approx(outcome["norms"][0], rel=1e-6)
        assert outcome["norms"] == pytest.approx(one_rank["norms"], rel=1e-5)
        # Gradients are reduced with the last micro-batch only.
        assert outcome["reductions"][0] == outcome["reductions"][1] > 0
        if strategy == "fsdp2" and fsdp_size == "all":
            assert outcome["reductions"][0] == (2 if "together" in keeping else 3)
        for name, weight in one_rank["weights"].items():
            torch.testing.assert_close(outcome["weights"][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("requested", "num_shards", "given"),
    [(True, 2, True), (False, 2, False), (2, 4, 2), (4, 4, True), (1, 1, True), (False, 1, False)],
)
def test_parameters_are_resharded_as_configured(
    requested: bool | int, num_shards: int, given: bool | int
) -> None:
    """torch reshards to a number of ranks only if it is smaller than the number of shards."""
    value = _resolve_reshard(requested, num_shards=num_shards)
    assert value == given
    assert isinstance(value, bool) == isinstance(given, bool)
