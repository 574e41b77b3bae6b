"""A server that listens for runs, with strangers that connect, a second run and a full disk."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from packages.trainer.tests.loops.listeners_for_tests import Listeners, rows
from temper_engine_api.distributed import authenticating_listener
from temper_engine_api.errors import ConfigError
from temper_engine_api.process_folders import SHARED_MEMORY
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm import listening_server
from temper_trainer.rollout.vllm.listening_server import ListeningServer
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.remote_server import RemoteServer
from temper_trainer.rollout.vllm.server_addresses import TOKEN_VARIABLE
from temper_trainer.rollout.vllm.vllm_versions import find_temper_problem

MODULE = "packages.trainer.tests.rollout.vllm.temper_trainer_test_server"
SPEC = ServerSpec(
    arguments={},
    end_token_ids=(1,),
    max_length=64,
    vocab_size=41,
    environment={"BEHAVIOUR": "silent"},
)
HOST = "127.0.0.1"
MAX_HANDSHAKES = 16
"""Limit of handshakes at a time: low, so that they are all in progress on a busy machine too."""
CONNECT_AND_SLEEP = """
import socket, time
from temper_engine_api.distributed.authenticating_listener import authenticate_socket
from temper_trainer.rollout.vllm.messages import ServerSpec, encode
client = socket.create_connection(("{address}", {port}))
connection = authenticate_socket(client, b"secret of servers", is_server=False, timeout_s=20)
connection.recv_bytes()
environment = {{"BEHAVIOUR": "{behaviour}"}}
spec = ServerSpec(
    arguments={{}}, end_token_ids=(1,), max_length=64, vocab_size=41, environment=environment
)
connection.send_bytes(encode(spec))
if "{behaviour}" == "beats":
    connection.recv_bytes()
    connection.send_bytes(b"go")
    connection.recv_bytes()
print("connected", flush=True)
time.sleep(600)
"""


@pytest.fixture
def server(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ListeningServer]:
    """A server whose handshakes may take as many seconds as the parameter says, or one."""
    root = str(Path(__file__).parents[5])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(TOKEN_VARIABLE, "secret of servers")
    monkeypatch.setattr(listening_server, "HANDSHAKE_S", getattr(request, "param", 1.0))
    monkeypatch.setattr(listening_server, "_EXIT_GRACE_S", 1.0)
    monkeypatch.setattr(authenticating_listener, "MAX_HANDSHAKES", MAX_HANDSHAKES)
    made = ListeningServer(HOST, 0, token="secret of servers", module=MODULE)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.close()
    thread.join(timeout=20)
    assert not thread.is_alive()


@contextlib.contextmanager
def connect_run(port: int, *, spec: ServerSpec = SPEC) -> Iterator[RemoteServer]:
    """Connect to a server as a run does."""
    remote = RemoteServer(
        spec,
        address=f"{HOST}:{port}",
        start_timeout_s=60,
        stall_timeout_s=60,
        load_timeout_s=60,
    )
    try:
        remote.start()
        yield remote
    finally:
        remote.close()


@contextlib.contextmanager
def connect_strangers(server: ListeningServer, *, number: int) -> Iterator[list[socket.socket]]:
    """Connect clients that send nothing."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((HOST, server.port), timeout=20))
            for _ in range(number)
        ]


@pytest.mark.parametrize("server", [600.0], indirect=True)
def test_run_connects_while_strangers_send_nothing(server: ListeningServer) -> None:
    with connect_strangers(server, number=10), connect_run(server.port) as remote:
        assert remote.versions == {"vllm": "0.32.0"}


def test_run_connects_after_the_handshakes_of_many_strangers_have_timed_out(
    server: ListeningServer,
) -> None:
    before = threading.active_count()
    with connect_strangers(server, number=4 * MAX_HANDSHAKES) as strangers:
        begin = time.monotonic()
        while threading.active_count() < before + MAX_HANDSHAKES:
            assert time.monotonic() < begin + 20
        assert threading.active_count() <= before + MAX_HANDSHAKES
        with connect_run(server.port) as remote:
            assert remote.versions == {"vllm": "0.32.0"}
        while strangers[0].recv(1024):
            pass  # the challenge, then the end


def test_second_run_is_refused_until_the_first_has_ended(
    server: ListeningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect_run(server.port):
        with (
            pytest.raises(ConfigError, match="it serves another run; wait for its end"),
            connect_run(server.port),
        ):
            pass
        # On a busy host, a process needs more than the second of the fixture to end.
        monkeypatch.setattr(listening_server, "_EXIT_GRACE_S", 60.0)
    with connect_run(server.port) as remote:
        assert remote.versions == {"vllm": "0.32.0"}


def test_workers_of_a_process_that_crashed_end_before_the_next_run(
    server: ListeningServer, tmp_path: Path
) -> None:
    environment = {"BEHAVIOUR": "crashes", "FILE": str(tmp_path / "worker")}
    with (
        pytest.raises(ReplicaError),
        connect_run(server.port, spec=replace(SPEC, environment=environment)),
    ):
        pass
    worker, folder = (tmp_path / "worker").read_text().split()
    os.kill(int(worker), 0)
    # In a temporary directory, the paths of sockets could be too long.
    assert Path(folder).parent == SHARED_MEMORY
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    with connect_run(server.port):
        assert not Path(folder).exists()
        deadline = time.monotonic() + 20
        # Its parent has ended too, so the process of the test cannot wait for it.
        while is_running(int(worker)):
            assert time.monotonic() < deadline


def is_running(process: int) -> bool:
    """Return True if a process runs, and False if it has ended or is a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_server_with_another_version_of_temper_is_refused() -> None:
    assert find_temper_problem("0.2.0", run="0.2.0") is None
    assert find_temper_problem("unknown", run="0.2.0") is None
    problem = find_temper_problem("0.1.9", run="0.2.0")
    assert problem is not None
    assert "has temper-trainer 0.1.9, but the run has 0.2.0" in problem


def test_server_serves_the_next_run_only_when_it_has_ended_the_process_of_the_last_one(
    server: ListeningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect_run(server.port):
        pass

    def refuse(group: int, number: int) -> None:
        raise PermissionError(1, "not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refuse)
        for _ in range(2):
            with (
                pytest.raises(ConfigError, match="process of its last run could not be ended"),
                connect_run(server.port),
            ):
                pass
    with connect_run(server.port) as remote:
        assert remote.versions == {"vllm": "0.32.0"}


def test_server_whose_disk_was_full_serves_the_next_run(
    server: ListeningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with (
        pytest.raises(ConfigError, match=r"its process could not be started .*missing"),
        connect_run(server.port),
    ):
        pass
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with connect_run(server.port) as remote:
        assert remote.versions == {"vllm": "0.32.0"}


@pytest.fixture
def other_host() -> Iterator[tuple[str, str]]:
    """A network namespace, and an address of this host that it can reach."""
    name, ends = f"temper-{os.getpid()}", [f"tls{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace ({error}): run as root on Linux with iproute2")
    ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", name)
    ip("addr", "add", "10.211.78.1/24", "dev", ends[0])
    ip("-n", name, "addr", "add", "10.211.78.2/24", "dev", ends[1])
    ip("link", "set", ends[0], "up")
    ip("-n", name, "link", "set", ends[1], "up")
    yield name, "10.211.78.1"
    ip("link", "del", ends[0])
    ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


# Nightly: needs root for a network namespace, and waits until the host counts as lost.
@pytest.mark.nightly
@pytest.mark.parametrize("behaviour", ["builds", "beats"])  # sends nothing; sends all the time
def test_run_whose_host_has_lost_its_network_frees_the_server(
    server: ListeningServer,  # sets the variables of its processes
    other_host: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    behaviour: str,
) -> None:
    namespace, address = other_host
    monkeypatch.setattr(listening_server, "DEAD_HOST_S", 6)
    distant = ListeningServer(address, 0, token="secret of servers", module=MODULE)
    threading.Thread(target=distant.serve_forever, daemon=True).start()
    program = CONNECT_AND_SLEEP.format(address=address, port=distant.port, behaviour=behaviour)
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "connected\n"
            ip("link", "set", f"tls{os.getpid() % 100000}a", "down")
            child = distant._child
            assert child is not None
            child.wait(timeout=40)
        finally:
            run.kill()
            distant.close()


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose /proc names the sockets of a process"
)
def test_listening_server_opens_only_the_socket_in_security_md(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "5ec2e7 of servers")
    # A server inherits from nohup that SIGHUP is ignored; env restores the default.
    command = ["env", "--default-signal=HUP", sys.executable]
    command += ["-m", listening_server.__name__, f"{HOST}:0"]
    with Listeners() as listeners:
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            # SPEC has no model, which the process of a run finds.
            with pytest.raises((ConfigError, ReplicaError)), connect_run(port):
                pass
            process.send_signal(signal.SIGHUP)
        assert process.returncode == 129
    listeners.check(rows(run="listening server"))
    assert not [command for command in listeners.commands if b"5ec2e7" in command]


def test_server_with_a_short_secret_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "5ec2e7")
    with pytest.raises(SystemExit, match="2"):
        listening_server.main([f"{HOST}:0"])
    message = capsys.readouterr().err
    assert f"{TOKEN_VARIABLE} has 6 characters, but must have at least 16" in message
    assert "5ec2e7" not in message
