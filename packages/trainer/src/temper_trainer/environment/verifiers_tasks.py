"""Run tasks of the library `verifiers`, whose agents request completions from the policy.

The library is installed by the extra ``temper-trainer[verifiers]``.

``python -m temper_trainer.environment.verifiers_tasks TASKSET`` prints one row of data for each
task. With `environment.name=agent`, `run_task` runs the task of a row.
"""

import functools
import json
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verifiers.v1 import Agent, AgentConfig, EvalClientConfig, SubprocessConfig, TasksetConfig
from verifiers.v1.utils.loaders import default_harness_id, harness_config_type, load_taskset

from temper_engine_api.errors import TemperError
from temper_trainer.environment.agent_environment import AgentTask


class VerifiersError(TemperError, RuntimeError):
    """The agent of a task failed."""


async def run_task(task: AgentTask) -> float:
    """Run the task of a row, and return its reward.

    The row has the fields ``taskset`` and ``task``. The field ``harness``, if there is one, names
    the program that verifiers runs as the agent; the default is that of the taskset.

    Raises:
        VerifiersError: If the agent or the scoring failed.
    """
    extra = task.prompt.extra
    taskset = str(extra["taskset"])
    harness = str(extra.get("harness") or default_harness_id(taskset))
    with _export_key(task.api_key) as variable:
        agent = Agent(
            AgentConfig(
                harness=harness_config_type(harness)(id=harness),
                runtime=SubprocessConfig(),
                model=task.model,
                client=EvalClientConfig(base_url=task.base_url, api_key_var=variable),
            )
        )
        trace = await agent.run(_load_tasks(taskset)[int(str(extra["task"]))])
    if not trace.ok:
        errors = "; ".join(f"{each.type}: {each.message}" for each in trace.errors)
        raise VerifiersError(f"task {extra['task']} of {taskset} failed: {errors}")
    return float(trace.reward)


def list_rows(taskset: str) -> Iterator[dict[str, Any]]:
    """Yield a row of data for each task. `run_task` finds the task by the number in the row."""
    for number, task in enumerate(_load_tasks(taskset)):
        yield {
            "question": task.data.prompt_text,
            "answer": "",
            "taskset": taskset,
            "task": number,
        }


@contextmanager
def _export_key(key: str) -> Iterator[str]:
    """Export the key of a rollout in a new environment variable and yield the variable's name.

    Verifiers reads keys only from environment variables. It removes variables with API_KEY in their
    names from the environment of programs that it starts.
    """
    variable = f"TEMPER_API_KEY_{uuid.uuid4().hex}"
    os.environ[variable] = key
    try:
        yield variable
    finally:
        del os.environ[variable]


@functools.cache
def _load_tasks(taskset: str) -> Sequence[Any]:
    """Return all tasks of a taskset, which is a module or an installed package."""
    return tuple(load_taskset(TasksetConfig(id=taskset)))


def main(arguments: Sequence[str]) -> None:
    """Print the rows of a taskset as JSON."""
    (taskset,) = arguments
    for row in list_rows(taskset):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
