"""Test descriptions of a buffer that another process maps, and which are refused."""

import json
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from temper_engine_api.distributed.rendezvous import StoreServer, TokenStore
from temper_engine_api.errors import EngineStateError, WeightError
from temper_trainer.rollout.packed_bucket import PackedBucket
from temper_trainer.rollout.shared_buffer import SharedBuffer, parse_shared_buffer
from temper_trainer.rollout.weight_channel import ChannelSpec, WeightChannel, _make_gloo_options

SOON = timedelta(seconds=30)
BUFFER = SharedBuffer(
    nonce="right",
    handle="ab" * 65,
    storage_bytes=256,
    storage_offset=512,
    tensor_offset=0,
    counter="/torch_12_3456_0",
    counter_offset=7,
    event="cd" * 64,
    must_sync=True,
)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


def read(message: bytes) -> SharedBuffer:
    return parse_shared_buffer(message, nonce="right", num_bytes=256)


def test_buffer_description_survives_a_round_trip() -> None:
    assert read(BUFFER.to_json()) == BUFFER


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nonce": "wrong"}, "the nonce of another channel"),
        ({"storage_bytes": 255}, "storage_bytes = 255"),
        ({"storage_bytes": 2**60}, "storage_bytes = "),
        ({"storage_offset": -1}, "storage_offset = -1"),
        ({"tensor_offset": 1}, "tensor_offset = 1"),
        ({"counter_offset": -1}, "counter_offset = -1"),
        ({"counter_offset": True}, "counter_offset = True"),
        ({"must_sync": 1}, "must_sync = 1"),
        ({"handle": "ab"}, "a handle of another length"),
        ({"handle": "zz" * 65}, "a handle of another length"),
        ({"event": "cd" * 63}, "a handle of another length"),
        ({"counter": "/../etc/passwd"}, "counter = '/../etc/passwd'"),
        ({"more": 1}, "not exactly the fields"),
    ],
)
def test_value_out_of_its_range_is_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(WeightError, match=sentence):
        read(json.dumps({**asdict(BUFFER), **change}).encode())


@pytest.mark.parametrize(
    "message", [b"", b"[1]", b"\xff\xfe", b"3", pickle.dumps({"nonce": "right"})]
)
def test_invalid_description_of_a_buffer_is_refused(message: bytes) -> None:
    with pytest.raises(WeightError, match="so it is not mapped"):
        read(message)


@pytest.fixture
def spec() -> ChannelSpec:
    """Return the spec of a channel whose receivers map a buffer; the test opens its port."""
    return ChannelSpec(
        backend="cuda_ipc",
        address="127.0.0.1",
        port=0,
        size=2,
        buffer_bytes=256,
        with_digest=False,
        timeout_s=30,
    )


def test_pickle_in_the_store_of_a_channel_is_not_executed(
    spec: ChannelSpec, tmp_path: Path
) -> None:
    # The exploit of which this is the regression test: whoever knew the port could set the key
    # "buffer" to a pickle, which every receiver executed. Here the stranger even knows the token.
    server = StoreServer(spec.address, token=spec.token)
    spec = replace(spec, port=server.port)
    proof = tmp_path / "executed"
    stranger = TokenStore(spec.address, spec.port, token=spec.token, timeout=SOON)
    stranger.set("buffer", pickle.dumps(Evil(proof)))

    def sender() -> None:
        store = TokenStore(spec.address, spec.port, token=spec.token, timeout=SOON)
        store.set("joined 0", b"")
        dist.ProcessGroupGloo(store, 0, 2, _make_gloo_options(spec, timeout=SOON))  # type: ignore[arg-type]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(sender)
        with pytest.raises(WeightError, match="bytes that are not JSON"):
            WeightChannel(replace(spec, rank=1), device=torch.device("cpu"))
    server.close()
    assert not proof.exists()
    pickle.loads(pickle.dumps(Evil(proof)))
    assert proof.exists(), "the pickle would have done it"


def test_store_of_a_channel_cannot_be_written_without_the_token(
    spec: ChannelSpec,
) -> None:
    server = StoreServer(spec.address, token=spec.token)
    with pytest.raises(EngineStateError, match="has another token"):
        TokenStore(spec.address, server.port, token="guessed", timeout=SOON)
    with pytest.raises(RuntimeError):  # torch's own client, which needed no token
        dist.TCPStore(
            spec.address,
            server.port,
            is_master=False,
            timeout=timedelta(seconds=1),
            wait_for_workers=False,
        )
    server.close()


def receive(spec: ChannelSpec, results: "Queue[list[int]]", num_sets: int) -> None:
    """Receive weights in another process on the same GPU."""
    channel = WeightChannel(replace(spec, rank=1), device=torch.device("cuda", 0))
    for _ in range(num_sets):
        data = channel.receive(PackedBucket(entries=(), num_bytes=256, digest=None))
        results.put(data.tolist())
    channel.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_buffer_on_the_gpu_is_read_by_another_process(spec: ChannelSpec) -> None:
    context = multiprocessing.get_context("spawn")
    results: Queue[list[int]] = context.Queue()
    server = StoreServer(spec.address, token=spec.token)
    spec = replace(spec, port=server.port, with_digest=True)
    receiver = context.Process(target=receive, args=(spec, results, 2))
    receiver.start()
    channel = WeightChannel(spec, device=torch.device("cuda", 0), server=server)
    for number in range(2):
        data = channel.get_bucket_buffer(256)
        data.copy_(torch.arange(256, dtype=torch.uint8) + number)
        channel.send(data)
        assert results.get(timeout=60) == [(i + number) % 256 for i in range(256)]
    receiver.join(timeout=60)
    assert receiver.exitcode == 0
    channel.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_nccl_group_is_opened_and_closed_through_the_store() -> None:
    server = StoreServer("127.0.0.1", token="t")
    store = TokenStore("127.0.0.1", server.port, token="t", timeout=SOON)
    for number in range(2):  # as an engine that is closed and made again
        own = dist.PrefixStore(str(number), store)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=own, rank=0, world_size=1)
        tensor = torch.ones(4, device="cuda")
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 4
        dist.destroy_process_group()
    server.close()
