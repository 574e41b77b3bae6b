"""Which page of steps a configuration means: ``sync``, ``one_step_off`` or ``async``, all over the same rooms."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from temper_engine_api.objective import Objective
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.loops import step as sync
from temper_trainer.loops.asynchronous import Asynchronous
from temper_trainer.loops.controllers import Controllers
from temper_trainer.loops.one_step_off import OneStepOff
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.step import StepResult
from temper_trainer.types import DataCursor


class Steps(Protocol):
    """The steps of one run, one after the other."""

    @property
    def cursor(self) -> DataCursor:
        """Of the first prompt that no step has trained on."""
        ...

    def step(
        self, *, step: int, objectives: Mapping[str, Objective], controllers: Controllers
    ) -> StepResult:
        """The next step."""
        ...

    def settled(self) -> AbstractContextManager[None]:
        """A context in which nothing else samples or scores."""
        ...


class Synchronous:
    """Loop ``sync``: a step samples with the newest weights, trains, and publishes."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    @property
    def cursor(self) -> DataCursor:
        """Where the data stand."""
        return self._rooms.prompts.cursor

    def step(
        self, *, step: int, objectives: Mapping[str, Objective], controllers: Controllers
    ) -> StepResult:
        """See ``rl_step``."""
        return sync.rl_step(self._rooms, step=step, objectives=objectives, controllers=controllers)

    def settled(self) -> AbstractContextManager[None]:
        """Between two steps nothing is open."""
        return nullcontext()


@contextmanager
def open_steps(rooms: Rooms, *, state: TrainerState, controllers: Controllers) -> Iterator[Steps]:
    """The loop that the configuration names, from the step after a state's; what it began is ended with the body."""
    if rooms.config.loop == "sync":
        yield Synchronous(rooms)
        return
    steps: OneStepOff | Asynchronous
    if rooms.config.loop == "one_step_off":
        steps = OneStepOff(rooms)
    else:
        steps = Asynchronous(rooms, first_step=state.step + 1, moments=controllers.rewards)
    try:
        yield steps
    finally:
        steps.close()
