"""Which replica takes which request: sessions stay where their beginning is remembered, unless that replica has far more to do."""

from collections import OrderedDict
from collections.abc import Sequence

from temper_trainer.types import SamplingRequest

MAX_LOAD_RATIO = 1.5
"""A session moves when its replica would have this many times the load of the least loaded one."""
MAX_SESSIONS = 65_536
"""Sessions whose replica is remembered; the ones unused for longest are forgotten first."""


class LoadBalancer:
    """Load is counted in tokens: of prompts, and of completions at their longest."""

    def __init__(self, num_replicas: int) -> None:
        self._load = [0] * num_replicas
        self._home: OrderedDict[int, int] = OrderedDict()

    @property
    def load(self) -> tuple[int, ...]:
        """Tokens in work, by replica."""
        return tuple(self._load)

    def assign(self, requests: Sequence[SamplingRequest]) -> list[list[int]]:
        """For each replica, the places in ``requests`` of those that it takes; their load counts until ``release``."""
        chosen: list[list[int]] = [[] for _ in self._load]
        for place, request in enumerate(requests):
            replica = self._choose(request)
            chosen[replica].append(place)
            self._load[replica] += _count_tokens(request)
        return chosen

    def release(self, replica: int, requests: Sequence[SamplingRequest]) -> None:
        """These are done, or have failed."""
        self._load[replica] -= sum(_count_tokens(request) for request in requests)

    def forget(self, replica: int) -> None:
        """It was started anew and remembers nothing."""
        for session in [session for session, home in self._home.items() if home == replica]:
            del self._home[session]

    def _choose(self, request: SamplingRequest) -> int:
        session = hash(request.prompt_tokens) if request.session is None else request.session
        least = min(range(len(self._load)), key=self._load.__getitem__)
        home = self._home.get(session, least)
        if self._load[home] + _count_tokens(request) > MAX_LOAD_RATIO * (
            self._load[least] + _count_tokens(request)
        ):
            home = least
        self._home[session] = home
        self._home.move_to_end(session)
        if len(self._home) > MAX_SESSIONS:
            self._home.popitem(last=False)
        return home


def _count_tokens(request: SamplingRequest) -> int:
    return len(request.prompt_tokens) + request.sampling.max_tokens
