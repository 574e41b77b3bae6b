"""Start a process per rank without importing torch again in each of them."""

import multiprocessing
from collections.abc import Callable

from torch.multiprocessing.spawn import start_processes

# Fork from a server that has imported once what the tests import: an import takes seconds in each
# process. The server has no threads, which a fork would lose.
multiprocessing.set_forkserver_preload(
    [
        "hypothesis",
        "pytest",
        "temper_engine_api.distributed.rank_failures",
        "temper_engine_api.engine",
        # The first optimizer of a process imports this.
        "torch._dynamo",
        "torch.distributed.checkpoint",
    ]
)


def run_ranks(job: Callable[..., None], *arguments: object, num_ranks: int = 2) -> None:
    """Call `job(rank, *arguments)` in a new process per rank.

    The processes do not see changes to the environment of the test.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank raised; the other one is stopped.
    """
    start_processes(job, args=arguments, nprocs=num_ranks, start_method="forkserver")
