"""Runs: reinforcement learning, distillation, supervised training, evaluation and generation.

Start at `run.training_run.train`. One RL step is `rl_loop.StepLoop.run_step`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from temper_trainer.loops.run.training_run import RunResult, train

__all__ = ["RunResult", "train"]


def __getattr__(name: str) -> object:
    # Imported on first use, because it imports torch, which processes that only watch for signals
    # do not need.
    if name in __all__:
        from temper_trainer.loops.run import training_run

        return getattr(training_run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
