"""Test that values of several ranks are gathered without pickle."""

import os
import pickle
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from temper_engine_api.distributed import process_group
from temper_engine_api.distributed.process_group import ThreadGroup, gather_objects
from temper_engine_api.errors import MessageError

from .rank_processes import run_ranks


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


def _join(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def _gather_values(rank: int, folder: str) -> None:
    _join(rank, folder)
    # Messages of different lengths: what a rank sends is padded.
    item = {"rank": rank, "names": ["weight"] * (3 * rank), "values": torch.full((rank,), 0.5)}
    for gathered in (gather_objects(item), ThreadGroup(timeout_s=20.0).gather(item)):
        assert [each["rank"] for each in gathered] == [0, 1]
        assert [len(each["names"]) for each in gathered] == [0, 3]
        assert [each["values"].tolist() for each in gathered] == [[], [0.5]]
    dist.destroy_process_group()


def _send_a_pickle(rank: int, folder: str) -> None:
    _join(rank, folder)
    evil, group = Evil(Path(folder, "executed")), ThreadGroup(timeout_s=20.0)
    if rank == 1:
        # The same collectives as all_gather_object, without reading what the other rank sends.
        sent = torch.frombuffer(bytearray(pickle.dumps(evil)), dtype=torch.uint8)
        headers = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(headers, torch.tensor([len(sent), 0]), group=group.get())
        longest = max(int(header[0]) for header in headers)
        padded = torch.cat([sent, sent.new_zeros(longest - len(sent))])
        dist.all_gather([torch.empty_like(padded) for _ in headers], padded, group=group.get())
    else:
        with pytest.raises(MessageError, match="rank 1 of the group sent an invalid message"):
            group.gather(["a value that is plain"])
    dist.barrier()
    dist.destroy_process_group()


def _send_an_unsupported_value(rank: int, folder: str) -> None:
    _join(rank, folder)
    item: object = {"a set"} if rank == 1 else "a string"
    start = time.monotonic()
    with pytest.raises(
        MessageError,
        match=r"rank 1 of the group could not send its value: a value of type builtins\.set",
    ):
        ThreadGroup(timeout_s=20.0).gather(item)
    assert time.monotonic() - start < 10.0, "the other rank waited for the timeout"
    assert gather_objects(rank) == [0, 1], "the ranks are still at the same collective"
    dist.destroy_process_group()


def _claim_lengths(rank: int, folder: str) -> None:
    _join(rank, folder)
    for length in (2**62, 2**40, 0, -8):
        if rank == 1:
            headers = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(headers, torch.tensor([length, 0]))
            continue
        with pytest.raises(MessageError, match=f"rank 1 .* {length} bytes, .* at most 4294967296"):
            gather_objects("a value")
    dist.barrier()
    dist.destroy_process_group()


def _send_a_value_above_the_limit(rank: int, folder: str) -> None:
    _join(rank, folder)
    process_group.MAX_MESSAGE_BYTES = 1000
    item = torch.zeros(1001 * rank, dtype=torch.uint8)
    with pytest.raises(MessageError, match=r"rank 1 .* could not send its value: .* at most 1000"):
        gather_objects(item)
    assert gather_objects(rank) == [0, 1], "the ranks are still at the same collective"
    dist.destroy_process_group()


def test_a_length_that_no_message_has_is_refused_before_memory_is_allocated(
    tmp_path: Path,
) -> None:
    run_ranks(_claim_lengths, str(tmp_path))


def test_all_ranks_raise_if_the_value_of_one_is_too_large(tmp_path: Path) -> None:
    run_ranks(_send_a_value_above_the_limit, str(tmp_path))


def test_ranks_gather_values_of_different_lengths_in_rank_order(tmp_path: Path) -> None:
    run_ranks(_gather_values, str(tmp_path))


def test_all_ranks_raise_if_one_cannot_encode_its_value(tmp_path: Path) -> None:
    run_ranks(_send_an_unsupported_value, str(tmp_path))


def test_a_pickle_from_another_rank_is_not_executed(tmp_path: Path) -> None:
    run_ranks(_send_a_pickle, str(tmp_path))
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "executed")))
    assert (tmp_path / "executed").exists(), "the pickle would have done it"


def test_store_of_a_failed_start_is_not_kept_with_its_short_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in (("ADDR", "127.0.0.1"), ("PORT", str(port))):
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    rendezvous = process_group._Rendezvous()
    rendezvous.next_store(timedelta(seconds=4))
    store, _, _ = rendezvous.next_store(timedelta(seconds=60))
    assert store.timeout == timedelta(seconds=60)
