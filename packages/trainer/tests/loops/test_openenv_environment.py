"""Environments of OpenEnv in rollouts and in a run, with a server on loopback."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from packages.trainer.tests.loops.byte_tokenizer_for_tests import make_tokenizer
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.protocol import EnvironmentFactory
from temper_trainer.environment.tool_environment import make_environment_factory
from temper_trainer.loops import RunResult
from temper_trainer.loops.rollouts.multi_turn import Conversation
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.types import Prompt, SamplingRequest

pytest.importorskip("openenv", reason="needs temper-trainer[openenv]: nox -s adapters runs this")
# A dependency of openenv.
from websockets.sync.server import ServerConnection, serve

PROGRAM = Path(__file__).with_name("openenv_server_for_tests.py")


class Server:
    """A server in a process."""

    def __init__(self, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(port)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Running servers, of which the last one is used; ended with the test."""
    started = [Server()]
    yield started
    started[-1].kill()


def make_config(url: str, **arguments: str) -> EnvironmentConfig:
    return EnvironmentConfig(
        name="openenv",
        arguments={"url": url, "observation_field": "text"} | arguments,
        call_end=";",
        answer_start="<",
        answer_end=">",
        max_turns=8,
    )


def run_rollout(
    config: EnvironmentConfig,
    completions: Iterator[str],
    *,
    make: EnvironmentFactory | None = None,
) -> tuple[Conversation, dict[str, float], list[str]]:
    """Run one rollout with these completions; return what the policy has read before each."""
    tokenizer = make_tokenizer()
    read: list[str] = []

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def script(request: SamplingRequest) -> list[int]:
        read.append(tokenizer.decode(request.prompt_tokens))
        return ids(next(completions))

    prompt = Prompt(prompt_id=5, text="go", tokens=tuple(ids("go")), answer="")
    request = SamplingRequest(
        request_id=0, prompt_tokens=prompt.tokens, sampling=SamplingConfig(max_tokens=40), seed=1
    )
    with RolloutScheduler(
        ScriptedSampler(script, end_token_id=0),
        environment=config,
        make_environment=make_environment_factory(config, tokenizer=tokenizer),
    ) as scheduler:
        (conversation,), metrics = scheduler.run(
            scheduler.run_rollouts([request], prompts=[prompt])
        )
    return conversation, metrics, read


def test_policy_writes_actions_in_json_and_reads_a_field_of_observations(
    servers: list[Server],
) -> None:
    completions = iter(['{"words": "a"};', "7;", '{"text": "12ab"};', '{"text": "7"};'])
    conversation, metrics, read = run_rollout(make_config(servers[0].url), completions)
    assert read[0] == "go<5+1>"
    assert read[1].startswith('go<5+1>{"words": "a"};<error: Server error: ')
    assert read[2].endswith("7;<error: '7' is not a JSON object>")
    assert conversation.rewards == [0.0, 0.0, 0.5, 1.0]
    assert (metrics["environment/actions"], metrics["environment/wrong_actions"]) == (2, 2)


def test_damaged_answer_is_a_failure_and_not_a_wrong_action() -> None:
    def answer(client: ServerConnection) -> None:
        for message in client:
            is_reset = json.loads(message)["type"] == "reset"
            data = {"observation": {"text": "a"}, "reward": 0.0, "done": False}
            client.send(json.dumps({"type": "observation", "data": data}) if is_reset else "{")

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = make_config(f"http://127.0.0.1:{server.socket.getsockname()[1]}")
        with pytest.raises(json.JSONDecodeError):
            run_rollout(config, iter(['{"text": "a"};', "never sampled;"]))
        server.shutdown()


def test_rollout_whose_server_was_killed_starts_again_on_the_next_one(
    servers: list[Server],
) -> None:
    def kill_and_complete() -> Iterator[str]:
        yield "12;"
        servers[0].kill()
        servers.append(Server(servers[0].port))
        yield "12;"
        yield from ("3;", "ab;")

    config = replace(make_config(servers[0].url, action_field="text"), max_retries=1)
    conversation, _, read = run_rollout(config, kill_and_complete())
    assert read == ["go<5+1>", "go<5+1>12;<2>", "go<5+1>", "go<5+1>3;<2>"]
    assert conversation.rewards == [1.0, 0.0]


def test_policy_is_trained_in_an_openenv_environment(
    run: Callable[..., RunResult],
    rows: Callable[..., list[dict[str, float]]],
    tmp_path: Path,
    servers: list[Server],
) -> None:
    arguments = f"url: '{servers[0].url}', action_field: text, observation_field: text"
    run(
        tmp_path / "run",
        f"environment={{name: openenv, arguments: {{{arguments}}}, call_end: '=', "
        "answer_start: '', answer_end: '', max_turns: 2, max_observation_tokens: 8}",
        "warm_start.total_steps=30",
        "run.total_steps=3",
        "run.save_model=false",
        "sampling.max_tokens=16",
    )
    step_rows = rows(tmp_path / "run")
    assert sum(row["environment/actions"] for row in step_rows) >= 48
    assert all(row["batch/trained_tokens"] == row["rollout/tokens"] for row in step_rows)
