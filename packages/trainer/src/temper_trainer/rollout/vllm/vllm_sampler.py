"""The ``vllm`` sampler: several replicas behind a load balancer; a dead one is started again and its requests are repeated."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from temper_engine_api.errors import ConfigError, WeightError
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.load_balancer import LoadBalancer
from temper_trainer.rollout.replica import Replica, ReplicaError
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.request_checks import check_completion, check_requests
from temper_trainer.rollout.vllm.vllm_versions import describe_versions, warn_if_untested
from temper_trainer.types import Completion, SamplingRequest
from temper_trainer.waits import track_wait

logger = logging.getLogger(__name__)

StartLoad = Callable[[Replica], "Future[object]"]
"""Gives one replica a whole set of weights; its result is the version that the replica then has."""


class VllmSampler:
    """Completes prompts on servers; may be called from several threads. See Sampler."""

    def __init__(self, replicas: Sequence[Replica], *, spec: ServerSpec, max_restarts: int) -> None:
        """A sampler over replicas that are started here.

        Args:
            replicas: not started yet.
            spec: what they were made from.
            max_restarts: of all replicas together, before the run stops.

        Raises:
            ReplicaError: one does not start; the others are ended.
        """
        self._replicas = list(replicas)
        self._spec = spec
        self._balancer = LoadBalancer(len(replicas))
        self._lives = [0] * len(replicas)
        self._restarts_left = max_restarts
        self._lock = threading.RLock()
        self._version = 0
        self._reload: StartLoad | None = None
        self._is_sent_once = False
        self._is_closed = False
        self.num_restarts = 0
        """Replicas that were started again."""
        try:
            _run_in_parallel([replica.start for replica in self._replicas])
        except BaseException:
            self.close()
            raise
        for warning in sorted({warn_if_untested(replica.versions) or "" for replica in replicas}):
            if warning:
                logger.warning("%s", warning)

    @property
    def software(self) -> str:
        """What computes the completions, with versions, for error messages."""
        found = sorted({describe_versions(replica.versions) for replica in self._replicas})
        return "; ".join(found)

    @property
    def weight_version(self) -> int:
        """Of the weights that every replica holds; 0 before the first set."""
        return self._version

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """One completion per request, in their order; what a dead replica had is asked again."""
        check_requests(requests, self._spec)
        found: dict[int, Completion] = {}
        left = list(range(len(requests)))
        while left:
            left = self._attempt(requests, left, found)
        return [found[place] for place in range(len(requests))]

    def interrupt(self) -> None:
        """End all open requests with what they have; ``sample`` returns at once."""
        for number, replica in enumerate(self._replicas):
            life = self._lives[number]
            try:
                replica.call("interrupt").result()
            except ReplicaError as error:
                self._revive(number, life=life, cause=error)

    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """Log-probs of every token but the first; the largest difference between replicas would be a stale one, so all are asked.

        Raises:
            ConfigError: a temperature other than 1, which vLLM does not report for prompts.
            WeightError: the replicas differ.
        """
        if temperature != 1:
            raise ConfigError(
                f"vLLM reports log-probs of given tokens at temperature 1 only, not at {temperature}."
            )
        rows = [tuple(row) for row in tokens]
        answers = self._call_all("logprobs", rows)
        first = answers[0]
        assert isinstance(first, list)
        for replica, other in zip(self._replicas, answers, strict=True):
            assert isinstance(other, list)
            # Not ">", which a NaN on either side would pass.
            if not all(
                abs(a - b) <= 1e-2
                for one, two in zip(first, other, strict=True)
                for a, b in zip(one, two, strict=True)
            ):
                raise WeightError(
                    f"{self._replicas[0].name} and {replica.name} give different log-probs: they hold different weights."
                )
        return first

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Not offered: servers take weights from a transport.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "sampler vllm takes weights through weight_sync.transport, not as a stream."
        )

    def load_while_sending(
        self,
        receive: StartLoad,
        send: Callable[[], object],
        *,
        version: int,
        reload: StartLoad | None,
    ) -> None:
        """As ``load``, for weights that every replica receives while they are sent: one that dies meanwhile ends the run.

        Args:
            receive: begins to receive.
            send: returns when everything was sent.
            version: of the set.
            reload: gives the set to a replica that was started again later; None where that can't be.

        Raises:
            ReplicaError: a replica died.
            WeightError: one did not take the set.
        """
        with self._lock:
            self._reload, self._is_sent_once = None, True
            futures = [receive(replica) for replica in self._replicas]
            send()
            for number, future in enumerate(futures):
                self._check_version(number, future.result(), version=version)
            self._version = version
            self._reload, self._is_sent_once = reload, reload is None

    def load(self, load: StartLoad, *, version: int) -> None:
        """Give every replica the same set of weights; kept to give it to a replica that is started again.

        Raises:
            WeightError: a replica did not take it, or reports another version.
        """
        with self._lock:
            self._reload, previous = load, self._reload
            lives = list(self._lives)
            futures = [load(replica) for replica in self._replicas]
            for number, future in enumerate(futures):
                try:
                    with track_wait(f"{self._replicas[number].name}: weights {version}"):
                        self._check_version(number, future.result(), version=version)
                except ReplicaError as error:
                    self._version = version  # the one that it is revived with
                    self._revive(number, life=lives[number], cause=error)
                except WeightError:
                    self._reload = previous
                    raise
            self._version = version

    def sleep(self) -> bool:
        """Give memory back until the next weights, where rollout.vllm.sleep_level says so; whether it does."""
        if not self._spec.sleep_level:
            return False
        self._call_all("sleep")
        return True

    def call_each(
        self, method: str, arguments: Sequence[tuple[object, ...] | None]
    ) -> list[object]:
        """A method of the replicas' engines, all at once, each with its own arguments; a dead one is started again and asked again.

        Args:
            method: of the engine.
            arguments: one entry for each replica; None asks it nothing.
        """
        results: list[object] = [None] * len(self._replicas)
        left = [number for number, given in enumerate(arguments) if given is not None]
        while left:
            lives = list(self._lives)
            futures = {
                number: self._replicas[number].call(method, *(arguments[number] or ()))
                for number in left
            }
            left = []
            for number, future in futures.items():
                try:
                    with track_wait(f"{self._replicas[number].name}: {method}"):
                        results[number] = future.result()
                except ReplicaError as error:
                    self._revive(number, life=lives[number], cause=error)
                    left.append(number)
        return results

    @property
    def replicas(self) -> Sequence[Replica]:
        """In the order of their numbers."""
        return tuple(self._replicas)

    def close(self) -> None:
        """End every server; calls that are open fail, and no server is started again."""
        self._is_closed = True
        for replica in self._replicas:
            replica.close()

    def _attempt(
        self,
        requests: Sequence[SamplingRequest],
        open_: Sequence[int],
        found: dict[int, Completion],
    ) -> list[int]:
        """Share the open requests out once; the places of those that a death left without a completion."""
        with self._lock:
            shares = self._balancer.assign([requests[place] for place in open_])
            lives = list(self._lives)
            asked = {
                number: (
                    [open_[i] for i in share],
                    self._replicas[number].sample([requests[open_[i]] for i in share]),
                )
                for number, share in enumerate(shares)
                if share
            }
        left: list[int] = []
        for number, (places, future) in asked.items():
            try:
                with track_wait(f"{self._replicas[number].name}: {len(places)} completions"):
                    completions = future.result()
                for place, completion in zip(places, completions, strict=True):
                    check_completion(
                        requests[place],
                        completion,
                        name=self._replicas[number].name,
                        version=self._version,
                    )
                    found[place] = completion
            except ReplicaError as error:
                self._revive(number, life=lives[number], cause=error)
                left += places
            finally:
                with self._lock:
                    self._balancer.release(number, [requests[place] for place in places])
        return left

    def _call_all(self, method: str, *arguments: object) -> list[object]:
        return self.call_each(method, [arguments] * len(self._replicas))

    def _revive(self, number: int, *, life: int, cause: ReplicaError) -> None:
        """Start a dead replica again with the last set of weights; once per death, however many calls noticed it.

        Raises:
            ReplicaError: there were too many deaths.
        """
        with self._lock:
            if self._lives[number] != life:
                return
            if self._is_closed:
                raise cause
            if self._is_sent_once:
                raise ReplicaError(
                    f"{cause}\nIt cannot be started again: its weights were sent once and are not kept."
                ) from cause
            if self._restarts_left == 0:
                raise ReplicaError(
                    f"{cause}\nrollout.vllm.max_restarts is used up: fix the cause above, or set a higher number."
                ) from cause
            self._restarts_left -= 1
            self.num_restarts += 1
            self._lives[number] += 1
            replica = self._replicas[number]
            logger.warning(
                "%s\n%s is started again (%d restarts left)",
                cause,
                replica.name,
                self._restarts_left,
            )
            replica.start()
            self._balancer.forget(number)
            if self._reload is not None:
                self._check_version(number, self._reload(replica).result(), version=self._version)

    def _check_version(self, number: int, reported: object, *, version: int) -> None:
        if reported != version:
            raise WeightError(
                f"weights {version} were published, but {self._replicas[number].name} holds {reported}."
            )


def _run_in_parallel(calls: Sequence[Callable[[], None]]) -> None:
    """Run calls in threads of their own; the first error is raised when all have ended."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
