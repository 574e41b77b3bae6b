"""The other end of the fleet: a process that joins the process group it is told to, runs jobs in it, and sends back what they return."""

import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist

from temper_engine_api.conformance.harness.engine_lookup import load_engine_class
from temper_engine_api.conformance.harness.rank import COLLECTIVE_TIMEOUT_S, Rank
from temper_engine_api.layout import Layout
from temper_engine_api.training_specs import Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One job for one rank."""

    engine: str
    """Name or ``module:Class``."""
    layout: Layout
    """Ranks of the process group, and how the engine is configured on them."""
    rendezvous: str
    """Path of the file through which its ranks meet; another path is another process group."""
    device: Literal["cpu", "cuda"]
    """Where the engine computes."""
    compute: Compute
    """In what, where a job's recipe does not say."""
    job: str
    """``module:function``."""
    arguments: Mapping[str, object]
    """Of the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    """Close all engines and leave the process group, which every rank of it is told at once: NCCL ends a group only together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReply:
    """What came of it."""

    value: object = None
    """What the job returned."""
    error: str | None = None
    """The traceback, if it raised."""


def serve_jobs(connection: Connection, *, index: int, stack_file: str) -> None:
    """Answer requests until the other end is closed.

    Args:
        connection: requests and replies, pickled.
        index: this process's rank in any process group that it is part of.
        stack_file: where the stack goes on SIGUSR1.
    """
    torch.set_num_threads(1)
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        server = _RankServer(index)
        while True:
            try:
                # Both ends are ours: the other one is the test session that started this process.
                request: JobRequest | LeaveRequest = pickle.loads(connection.recv_bytes())  # noqa: S301
            except EOFError:
                break
            connection.send_bytes(pickle_reply(server.answer(request)))
        server.leave()


class _ToHost(pickle.Pickler):
    """Tensors travel in host memory: what they are compared with was computed there."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def pickle_reply(reply: "JobReply") -> bytes:
    buffer = io.BytesIO()
    _ToHost(buffer, pickle.HIGHEST_PROTOCOL).dump(reply)
    return buffer.getvalue()


class _RankServer:
    """The rank's process group and engines between two requests."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._rendezvous: str | None = None
        self._ranks: dict[str, Rank] = {}

    def answer(self, request: JobRequest | LeaveRequest) -> JobReply:
        """Run the job; an exception of any kind is a reply, so that the session can tell which rank said what."""
        try:
            if isinstance(request, LeaveRequest):
                self.leave()
                return JobReply()
            self._join(request)
            rank = self._rank(request)
            random.seed(0)
            torch.manual_seed(0)
            try:
                return JobReply(value=_import_job(request.job)(rank, **request.arguments))
            finally:
                rank.close_temporary_engines()
        except BaseException:  # noqa: BLE001  (reported on the other end)
            return JobReply(error=traceback.format_exc())

    def leave(self) -> None:
        """Close every engine and leave the process group."""
        for rank in self._ranks.values():
            rank.close_all()
        self._ranks = {}
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._rendezvous = None

    def _join(self, request: JobRequest) -> None:
        if self._rendezvous == request.rendezvous:
            return
        self.leave()
        # As torchrun sets them.
        os.environ |= {
            "RANK": str(self._index),
            "LOCAL_RANK": str(self._index),
            "WORLD_SIZE": str(request.layout.world_size),
        }
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        if request.device == "cuda":
            torch.cuda.set_device(self._index)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if request.device == "cuda" else "gloo",
            init_method=f"file://{request.rendezvous}",
            rank=self._index,
            world_size=request.layout.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        self._rendezvous = request.rendezvous

    def _rank(self, request: JobRequest) -> Rank:
        if request.engine not in self._ranks:
            engine = load_engine_class(request.engine)
            # Modules stay as long as the process: a full collection, such as an engine makes when it is closed, need not look at them.
            gc.freeze()
            self._ranks[request.engine] = Rank(
                engine,
                index=self._index,
                layout=request.layout,
                device=request.device,
                compute=request.compute,
            )
        return self._ranks[request.engine]


def _import_job(name: str) -> Callable[..., object]:
    module, _, function = name.partition(":")
    job: Callable[..., object] = vars(import_module(module))[function]
    return job
