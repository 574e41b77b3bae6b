"""Runs: reinforcement learning, distillation, supervised training, evaluation and generation.

Start at `run.training_run.train`. One RL step is `rl_loop.StepLoop.run_step`.
"""

from temper_trainer.loops.run.training_run import RunResult, train

__all__ = ["RunResult", "train"]
