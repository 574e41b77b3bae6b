"""The first module that a rank process imports; it imports neither torch nor an engine."""

import gc
from multiprocessing.connection import Connection


def start_rank(connection: Connection, *, index: int, stack_file: str) -> None:
    """Import the rest without looking for garbage among imported objects, and serve jobs.

    The arguments are those of `serve_jobs`.
    """
    gc.disable()
    from temper_engine_api.conformance.harness.rank_process import serve_jobs

    gc.freeze()
    gc.enable()
    serve_jobs(connection, index=index, stack_file=stack_file)
