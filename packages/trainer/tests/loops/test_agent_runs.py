"""Agents that only know an OpenAI client: as functions of a run, and as programs."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from packages.trainer.tests.loops.byte_tokenizer_for_tests import make_tokenizer
from packages.trainer.tests.process_groups_for_tests import check_group_ids, needs_waitid
from temper_engine_api.distributed.rendezvous import get_run_token
from temper_engine_api.errors import ConfigError
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment import agent_environment
from temper_trainer.environment.agent_environment import AgentFailedError
from temper_trainer.environment.tool_environment import make_environment_factory
from temper_trainer.loops import RunResult
from temper_trainer.loops.rollouts.multi_turn import Conversation
from temper_trainer.loops.rollouts.rollout_scheduler import (
    EnvironmentTimeoutError,
    IdleAgentError,
    RolloutScheduler,
)
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.types import Prompt, SamplingRequest

from .listeners_for_tests import Listeners
from .listeners_for_tests import rows as rows_in_security_md

PROGRAM = shlex.join([sys.executable, str(Path(__file__).parent / "agents_for_tests.py")])
needs_proc = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose /proc names the sockets of a process"
)
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@needs_proc
def test_policy_is_trained_by_a_function_that_uses_a_client(
    run: Callable[..., RunResult],
    rows: Callable[..., list[dict[str, float]]],
    tmp_path: Path,
) -> None:
    with Listeners() as listeners:
        run(
            tmp_path / "run",
            "environment={name: agent, arguments: {function: 'agents_for_tests:ask_twice'}, "
            "max_turns: 2, max_tokens: 120}",
            f'data.chat_template="{TEMPLATE}"',
            "run.save_model=false",
            "sampling.max_tokens=12",
            "data.eval=null",
            "warm_start=null",
            "run.total_steps=2",
        )
    listeners.check([*rows_in_security_md(run="inline"), *rows_in_security_md(run="agent")])
    listeners.check_secret(get_run_token(), folder=tmp_path)
    step_rows = rows(tmp_path / "run")
    assert [row["agent/requests"] for row in step_rows] == [32, 32]
    assert all(row["rollout/turns_mean"] == 2 for row in step_rows)
    assert all(row["batch/trained_tokens"] == row["rollout/tokens"] for row in step_rows)
    # The agent's reward for digits, and that of the reward function.
    assert all(row["reward/std"] > 0 for row in step_rows)


def run_programs(
    command: str,
    *,
    num_rollouts: int = 1,
    step_timeout_s: float | None = None,
    extra: Mapping[str, object] | None = None,
) -> list[Conversation]:
    tokenizer = make_tokenizer()
    config = EnvironmentConfig(
        name="agent", arguments={"command": command}, step_timeout_s=step_timeout_s
    )
    prompt = Prompt(prompt_id=3, text="6*7=", tokens=(1,), answer="", extra=extra or {})
    requests = [
        SamplingRequest(
            request_id=i, prompt_tokens=(1,), sampling=SamplingConfig(max_tokens=64), seed=i
        )
        for i in range(num_rollouts)
    ]
    with RolloutScheduler(
        ScriptedSampler(lambda _: [2] * 20, end_token_id=0),
        environment=config,
        make_environment=make_environment_factory(
            config, tokenizer=tokenizer, chat_template=TEMPLATE
        ),
    ) as scheduler:
        conversations, _ = scheduler.run(
            scheduler.run_rollouts(requests, prompts=[prompt] * num_rollouts)
        )
    return conversations


def test_program_gets_its_endpoint_from_variables_and_prints_its_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "not for agents")
    (conversation,) = run_programs(PROGRAM)
    assert make_tokenizer().decode(conversation.request.prompt_tokens) == "6*7="
    assert len(conversation.tokens) == 8
    assert conversation.rewards == [0.25]


@needs_proc
def test_agents_need_one_socket_which_security_md_lists() -> None:
    with Listeners() as listeners:
        run_programs(PROGRAM)
    listeners.check(rows_in_security_md(run="agent"))


def test_error_of_a_program_is_reported_and_the_others_are_killed() -> None:
    command = "sh -c 'read line; case $OPENAI_MODEL in policy) echo broken >&2; exit 3; esac'"
    with pytest.raises(AgentFailedError, match=r"(?s)prompt 3 .*status 3; .*broken"):
        run_programs(command, num_rollouts=4)


def test_task_that_is_no_json_fails_before_the_program_starts(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="keys must be str"):
        run_programs(f"tee {tmp_path}/task", step_timeout_s=5.0, extra={"by_pair": {(1, 2): 3}})
    assert not (tmp_path / "task").exists()


def test_program_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    program = tmp_path / "agent.sh"
    program.write_text(f"sleep 1000 &\necho $! >> {tmp_path}/children\nwait\n")
    with pytest.raises(EnvironmentTimeoutError):
        run_programs(f"sh {program}", num_rollouts=2, step_timeout_s=0.5)
    children = (tmp_path / "children").read_text().split()
    assert children
    command = ["ps", "-o", "stat=", "-p", ",".join(children)]
    deadline = time.monotonic() + 20
    states = ["unknown"]
    # A container may have no process that collects the dead, which then stay as zombies.
    while any(not state.startswith("Z") for state in states) and time.monotonic() < deadline:
        listed = subprocess.run(command, check=False, capture_output=True, text=True)
        states = listed.stdout.split()
    assert all(state.startswith("Z") for state in states)


@needs_waitid
def test_group_of_a_program_is_killed_before_its_id_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = check_group_ids(monkeypatch, agent_environment)
    with pytest.raises(IdleAgentError):
        run_programs("true")
    with pytest.raises(EnvironmentTimeoutError):
        run_programs("sleep 1000", step_timeout_s=2.0)
    assert len(killed) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "set either command"),
        ({"command": "a", "function": "b:c"}, "set either command"),
        ({"function": "b:c", "variables": "HOME"}, "variables has no effect"),
    ],
)
def test_agent_is_either_a_command_or_a_function(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvironmentConfig(name="agent", arguments=arguments)
