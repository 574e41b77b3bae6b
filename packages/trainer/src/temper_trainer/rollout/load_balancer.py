"""Assign requests to replicas by load, so that the turns of one rollout stay on one replica."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from temper_trainer.types import SamplingRequest

MAX_LOAD_RATIO = 1.5
"""A session moves if its replica would have this many times the load of the least loaded one."""
MAX_SESSIONS = 65_536
"""Sessions whose replica is remembered; the least recently used are forgotten first."""


class LoadBalancer:
    """Assigns requests to enabled replicas and counts the load of each; from any thread.

    Requests of one session go to the same replica, whose prefix cache has their common tokens,
    unless its load is far above that of another replica. Load is counted in tokens: prompt plus
    `max_tokens`.
    """

    def __init__(self, num_replicas: int) -> None:
        """Enable this many replicas."""
        self._load = [0] * num_replicas
        self._enabled = set(range(num_replicas))
        self._home: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def load(self) -> tuple[int, ...]:
        """Tokens of open requests, by replica."""
        return tuple(self._load)

    def add(self) -> int:
        """Add a replica that is not enabled yet, and return its number."""
        with self._lock:
            self._load.append(0)
            return len(self._load) - 1

    def enable(self, replica: int) -> None:
        """Assign requests to a replica from now on."""
        self._enabled.add(replica)

    def disable(self, replica: int) -> None:
        """Assign no further requests to a replica."""
        self._enabled.discard(replica)
        self.forget(replica)

    def assign(self, requests: Sequence[SamplingRequest]) -> list[list[int]]:
        """Return the request indices for each replica; they count until `release`.

        At least one replica must be enabled.
        """
        chosen: list[list[int]] = [[] for _ in self._load]
        with self._lock:
            for index, request in enumerate(requests):
                replica = self._choose(request)
                chosen[replica].append(index)
                self._load[replica] += _count_tokens(request)
        return chosen

    def release(self, replica: int, requests: Sequence[SamplingRequest]) -> None:
        """Subtract the load of requests that are finished or failed."""
        with self._lock:
            self._load[replica] -= sum(_count_tokens(request) for request in requests)

    def forget(self, replica: int) -> None:
        """Forget the sessions of a replica that was restarted: its prefix cache is empty."""
        with self._lock:
            for session in [key for key, home in self._home.items() if home == replica]:
                del self._home[session]

    def _choose(self, request: SamplingRequest) -> int:
        # Requests without a session: equal prompts, such as in a group, stay together.
        session = hash(request.prompt_tokens) if request.session is None else request.session
        least_loaded = min(sorted(self._enabled), key=self._load.__getitem__)
        home = self._home.get(session, least_loaded)
        cost = _count_tokens(request)
        if self._load[home] + cost > MAX_LOAD_RATIO * (self._load[least_loaded] + cost):
            # Computing the prefix again costs less than waiting behind a much longer queue.
            home = least_loaded
        self._home[session] = home
        self._home.move_to_end(session)
        if len(self._home) > MAX_SESSIONS:
            self._home.popitem(last=False)
        return home


def _count_tokens(request: SamplingRequest) -> int:
    # An upper bound, because the length of a completion is not known before.
    return len(request.prompt_tokens) + request.sampling.max_tokens
