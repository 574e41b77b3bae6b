"""The port at which the ranks of a role find each other; no collective."""

import os

import torch.distributed as dist


class MeetingPoint:
    """A store that listens as long as this lives, so that nobody else can take its port before the ranks come."""

    def __init__(self, address: str) -> None:
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.port: int = self._store.port


def take_place(*, rank: int, world_size: int, address: str, port: int) -> None:
    """Tell whatever this process will start where rank 0 is, in the variables of torchrun: no rank need listen, somebody does."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", MASTER_ADDR=address, MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
