"""The process of one rank: it joins process groups, runs jobs and returns their results."""

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
from temper_engine_api.specs import Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """One job for one rank."""

    engine: str
    """Entry point name or ``module:Class``."""
    layout: Layout
    rendezvous: str
    """File that the ranks use to form their process group; a new path means a new group."""
    device: Literal["cpu", "cuda"]
    compute: Compute
    """Compute dtype of engines whose setup does not set one."""
    job: str
    """Function to run, as `module:function`."""
    arguments: Mapping[str, object]
    """Keyword arguments for the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    """Close all engines and leave the process group.

    All ranks of a group get it at once, because NCCL destroys a group only collectively.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReply:
    """Result of one request."""

    value: object = None
    """The job's return value."""
    num_data_ranks: int = 1
    """Number of data-parallel ranks of the last engine that this rank built."""
    error: str | None = None
    """The traceback if the job raised."""


def serve_jobs(connection: Connection, *, index: int, stack_file: str) -> None:
    """Run requested jobs until the connection is closed.

    Args:
        connection: Connection that receives pickled requests and sends pickled replies.
        index: Rank of this process in every process group that it joins.
        stack_file: File that SIGUSR1 writes the current stack to.
    """
    # All ranks share the host's cores.
    torch.set_num_threads(1)
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        server = _RankServer(index)
        while True:
            try:
                # Unpickling is safe: the test session that started this process wrote the bytes.
                request: JobRequest | LeaveRequest = pickle.loads(connection.recv_bytes())  # noqa: S301
            except EOFError:
                break
            connection.send_bytes(pickle_reply(server.answer(request)))
        server.leave()


class _ToHost(pickle.Pickler):
    """Pickle tensors on the CPU, because the expected values are computed there."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def pickle_reply(reply: "JobReply") -> bytes:
    buffer = io.BytesIO()
    _ToHost(buffer, pickle.HIGHEST_PROTOCOL).dump(reply)
    return buffer.getvalue()


class _RankServer:
    """The rank's process group and its engines, kept between requests."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._rendezvous: str | None = None
        self._ranks: dict[str, Rank] = {}
        self._num_modules = 0
        self._froze_engines = False
        """True if engines may have existed when modules were excluded from garbage collection."""

    def answer(self, request: JobRequest | LeaveRequest) -> JobReply:
        """Run the job; return exceptions of any kind, so that the session can name the rank."""
        try:
            if isinstance(request, LeaveRequest):
                self.leave()
                return JobReply()
            self._join(request)
            rank = self._rank(request)
            self._freeze_new_modules()
            # The result of a job must not depend on the jobs before it.
            random.seed(0)
            torch.manual_seed(0)
            try:
                value = _import_job(request.job)(rank, **request.arguments)
                return JobReply(value=value, num_data_ranks=rank.num_data_ranks)
            finally:
                rank.close_temporary_engines()
        # A SystemExit would end the rank, and the session would see a death without a traceback.
        except BaseException:  # noqa: BLE001  (the session raises it)
            return JobReply(error=traceback.format_exc())

    def leave(self) -> None:
        """Close every engine and leave the process group."""
        for rank in self._ranks.values():
            rank.close_all()
        self._ranks = {}
        if self._froze_engines:
            gc.unfreeze()
        # An engine in a reference cycle would keep its memory and the threads of its process groups
        # until some later collection.
        gc.collect()
        if self._froze_engines:
            gc.freeze()
            self._froze_engines = False
        if dist.is_initialized():
            dist.destroy_process_group()
        self._rendezvous = None

    def _join(self, request: JobRequest) -> None:
        if self._rendezvous == request.rendezvous:
            return
        self.leave()
        # Engines read these variables, as under torchrun.
        os.environ |= {
            "RANK": str(self._index),
            "LOCAL_RANK": str(self._index),
            "WORLD_SIZE": str(request.layout.world_size),
        }
        # All ranks run on this host: use the loopback interface.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        if request.device == "cuda":
            torch.cuda.set_device(self._index)
        dist.init_process_group(
            # NCCL has no collectives for CPU tensors, so Gloo serves those.
            "cpu:gloo,cuda:nccl" if request.device == "cuda" else "gloo",
            init_method=f"file://{request.rendezvous}",
            rank=self._index,
            world_size=request.layout.world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        self._rendezvous = request.rendezvous

    def _rank(self, request: JobRequest) -> Rank:
        if request.engine not in self._ranks:
            # Imported modules live as long as the process. Do not collect garbage during the
            # import, and leave modules out of the collection in close().
            gc.disable()
            try:
                engine = load_engine_class(request.engine)
            finally:
                if self._has_new_modules():
                    self._freeze()
                gc.enable()
            self._ranks[request.engine] = Rank(
                engine,
                index=self._index,
                layout=request.layout,
                device=request.device,
                compute=request.compute,
            )
        return self._ranks[request.engine]

    def _freeze_new_modules(self) -> None:
        """Exclude modules that earlier jobs have imported from garbage collection."""
        if self._has_new_modules():
            gc.collect()
            self._freeze()

    def _has_new_modules(self) -> bool:
        # One collection takes as long as a small test, so wait until many modules are new. A freeze
        # also costs later: if it includes engines, leave() has to look through all modules again.
        return len(sys.modules) > self._num_modules + 100

    def _freeze(self) -> None:
        self._num_modules = len(sys.modules)
        gc.freeze()
        self._froze_engines = bool(self._ranks)


def _import_job(name: str) -> Callable[..., object]:
    module, _, function = name.partition(":")
    job: Callable[..., object] = vars(import_module(module))[function]
    return job
