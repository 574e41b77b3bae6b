"""Test the store of process groups: torch's Store methods, and clients without the token."""

import logging
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from temper_engine_api.distributed import rendezvous
from temper_engine_api.distributed.authenticating_listener import MAX_HANDSHAKES
from temper_engine_api.distributed.rendezvous import (
    StoreServer,
    TokenStore,
    find_interface,
    get_run_token,
    store_from_environment,
)
from temper_engine_api.errors import EngineStateError

LOOPBACK = "127.0.0.1"
SOON = timedelta(seconds=20)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer(LOOPBACK, token="right")
    yield made
    made.close()


@pytest.fixture
def hasty_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    """A server with a time limit of a second for the handshake."""
    monkeypatch.setattr(rendezvous, "HANDSHAKE_S", 1)
    made = StoreServer(LOOPBACK, token="right")
    yield made
    made.close()


def client_of(
    server: StoreServer, *, token: str = "right", timeout: timedelta = SOON
) -> TokenStore:
    return TokenStore(server.address, server.port, token=token, timeout=timeout)


@pytest.mark.parametrize(
    "wrap", [lambda store: store, lambda store: dist.PrefixStore("group", store)]
)  # the second calls it from C++
def test_a_client_reads_what_another_wrote(server: StoreServer, wrap: Callable[[Any], Any]) -> None:
    one, two = wrap(client_of(server)), wrap(client_of(server))
    one.set("a", "text")
    one.set("b", b"\x00\xff")
    assert (two.get("a"), two.get("b")) == (b"text", b"\x00\xff")
    assert [one.add("n", 2), two.add("n", 3)] == [2, 5]
    assert one.get("n") == b"5"
    assert (two.check(["a", "n"]), two.check(["a", "missing"])) == (True, False)
    assert (one.compare_set("c", "", "new"), one.compare_set("c", "other", "newer")) == (
        b"new",
        b"new",
    )
    assert one.compare_set("c", "new", "newer") == b"newer"
    assert one.compare_set("absent", "something", "new") == b"something"
    one.multi_set(["x", "y"], ["1", b"2"])
    one.append("y", "3")
    assert two.multi_get(["x", "y"]) == [b"1", b"23"]
    assert one.num_keys() == 6
    assert [two.delete_key("x"), two.delete_key("x")] == [True, False]


def test_client_waits_for_a_key_until_its_timeout(server: StoreServer) -> None:
    one, two = client_of(server), client_of(server)
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(one.get, "late")
        two.wait([], timedelta(seconds=1))
        two.set("late", "now")
        assert value.result(timeout=20) == b"now"
    with pytest.raises(
        dist.DistStoreError, match=r"timed out after 0\.01 s waiting for keys late, never"
    ):
        two.wait(["late", "never"], timedelta(seconds=0.01))
    two.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError):
        two.get("never")


def test_clients_learn_that_another_one_has_abandoned_the_store(server: StoreServer) -> None:
    clients = [client_of(server) for _ in range(2)]
    assert [client.is_abandoned() for client in clients] == [False, False]
    clients[0].abandon()
    assert [client.is_abandoned() for client in clients] == [True, True]


def test_clone_waits_without_blocking_the_original(server: StoreServer) -> None:
    store = client_of(server)
    clone = store.clone()
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(clone.get, "late")
        store.set("late", "now")
        assert value.result(timeout=20) == b"now"


def test_gloo_group_forms_through_the_store(server: StoreServer) -> None:
    def sum_of_ranks(rank: int) -> float:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = SOON
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        store = client_of(server)
        group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 3, options)
        tensor = torch.ones(1) * rank
        group.allreduce([tensor]).wait()
        return tensor.item()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(sum_of_ranks, range(3))) == [3.0, 3.0, 3.0]


def test_a_client_without_the_token_neither_reads_nor_writes(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    client = client_of(server)
    client.set("secret", "value")
    with pytest.raises(EngineStateError, match="has another token"):
        client_of(server, token="wrong")
    assert client.num_keys() == 1
    line = "rejected a client of the store from 127.0.0.1: it has another token"
    deadline = time.monotonic() + 20
    while line not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)  # the server's thread logs it after the client was refused
    assert line in caplog.text


def test_pickle_of_an_unknown_client_is_not_executed(server: StoreServer, tmp_path: Path) -> None:
    # With TCPStore both worked: a torch client that only knows the port, and a pickle as message.
    with pytest.raises(RuntimeError):
        dist.TCPStore(
            server.address,
            server.port,
            is_master=False,
            timeout=timedelta(seconds=1),
            wait_for_workers=False,
        )
    proof = tmp_path / "executed"
    with socket.create_connection((server.address, server.port)) as unknown:
        connection = Connection(os.dup(unknown.fileno()))
        connection.recv_bytes()  # the challenge
        connection.send(Evil(proof))
        refusal = connection.recv_bytes()
        with pytest.raises((EOFError, OSError)):
            connection.recv_bytes()
    assert refusal == b"#FAILURE#"
    assert not proof.exists()
    pickle.loads(pickle.dumps(Evil(proof)))
    assert proof.exists(), "the standard unpickler executes this pickle"
    assert client_of(server).num_keys() == 0


def test_silent_client_delays_no_other_and_is_disconnected(
    hasty_server: StoreServer,
) -> None:
    with socket.create_connection((hasty_server.address, hasty_server.port), timeout=20) as silent:
        client_of(hasty_server).set("a", "b")
        while silent.recv(1024):
            pass  # the challenge, then the end


def test_client_that_sends_single_bytes_is_disconnected_after_the_time_limit(
    hasty_server: StoreServer,
) -> None:
    begin = time.monotonic()
    with socket.create_connection((hasty_server.address, hasty_server.port), timeout=0.4) as slow:
        slow.recv(1024)  # the challenge
        for byte in b"\0\0\0\xff" + bytes(12):  # the length of an answer, and its first bytes
            slow.send(bytes([byte]))
            try:
                is_hung_up_on = not slow.recv(1024)
            except TimeoutError:
                continue
            break
    assert is_hung_up_on
    assert time.monotonic() - begin < 5
    client_of(hasty_server).set("a", "b")


def test_store_survives_clients_that_use_up_the_open_files(
    hasty_server: StoreServer,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = f"""
import socket, time
address = ("{hasty_server.address}", {hasty_server.port})
silent = [socket.create_connection(address) for _ in range(300)]
print("connected", flush=True)
time.sleep(600)
"""
    unknown_clients = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    try:
        assert unknown_clients.stdout is not None
        num_open = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 40, hard))
        assert unknown_clients.stdout.readline() == "connected\n"
        time.sleep(1.5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        unknown_clients.kill()
        unknown_clients.communicate()
    client = client_of(hasty_server)
    client.set("a", "b")
    assert client.get("a") == b"b"


def test_handshakes_of_unknown_clients_use_a_limited_number_of_threads(server: StoreServer) -> None:
    before = threading.active_count()
    unknown_clients = [
        socket.create_connection((server.address, server.port), timeout=20) for _ in range(200)
    ]
    time.sleep(1)
    assert threading.active_count() - before <= MAX_HANDSHAKES
    for unknown in unknown_clients:
        unknown.close()
    client_of(server).set("a", "b")


def test_server_listens_only_on_its_own_address_and_keeps_its_port(server: StoreServer) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((server.address, server.port))
    with socket.socket() as second:
        second.bind(("127.0.0.2", server.port))  # which a listener on every address would not allow


def test_closed_server_releases_its_port() -> None:
    server = StoreServer(LOOPBACK, token="t")
    server.close()
    with pytest.raises(EngineStateError, match="can't be reached"):
        client_of(server, timeout=timedelta(seconds=1))


def test_client_that_starts_first_waits_for_the_server(server: StoreServer) -> None:
    address, port = server.address, server.port
    server.close()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(TokenStore, address, port, token="right", timeout=SOON)
        time.sleep(0.3)
        late = StoreServer(address, port=port, token="right")
        assert early.result(timeout=20).num_keys() == 0
    late.close()


def test_concurrent_additions_are_all_counted(server: StoreServer) -> None:
    def count(_: int) -> None:
        store = client_of(server)
        for _ in range(50):
            store.add("n", 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(8)))
    assert client_of(server).get("n") == b"400"


def test_ranks_connect_to_the_store_named_in_their_environment(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {
        "MASTER_ADDR": server.address,
        "MASTER_PORT": str(server.port),
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TEMPER_STORE_TOKEN": "right",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store, rank, world_size = store_from_environment(SOON)
    assert (type(store), rank, world_size) == (TokenStore, 1, 2)


def test_the_run_has_one_long_token() -> None:
    assert get_run_token() == get_run_token()
    assert len(get_run_token()) == 64


@pytest.mark.skipif(
    not os.path.exists("/sys/class/net/lo"), reason="needs Linux with the interface lo"
)
def test_the_loopback_interface_is_found_by_its_address() -> None:
    assert find_interface(LOOPBACK) == "lo"
    assert find_interface("192.0.2.1") is None
