"""Check that the benchmarks' command lines are valid, before they take an hour on an idle host."""

import ast
from pathlib import Path

import pytest

from bench.bench_loops import LONG_TAILED, LOOPS, list_overrides, sampler_settings
from bench.bench_megatron_checkpoint import prepare_sources
from bench.bench_weight_sync import Actor, measure_channel_deltas
from temper_trainer.__main__ import main

PROGRAMS = sorted((Path(__file__).resolve().parents[2] / "bench").glob("bench_*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_every_benchmark_runs_without_arguments(program: Path) -> None:
    calls = [
        node for node in ast.walk(ast.parse(program.read_text())) if isinstance(node, ast.Call)
    ]
    declared = [call for call in calls if ast.unparse(call.func).endswith(".add_argument")]
    must_be_given = [
        ast.literal_eval(call.args[0])
        for call in declared
        if any(keyword.arg == "required" for keyword in call.keywords)
        or (
            not ast.literal_eval(call.args[0]).startswith("-")
            and not any(keyword.arg == "nargs" for keyword in call.keywords)
        )
    ]
    assert declared
    assert must_be_given == []


@pytest.mark.parametrize("settings", LOOPS.values(), ids=LOOPS.keys())
@pytest.mark.parametrize(
    ("rollout_python", "lengths"), [(None, ()), ("rollout-env/bin/python", LONG_TAILED)]
)
def test_each_configuration_of_bench_loops_is_valid(
    settings: tuple[str, ...],
    rollout_python: str | None,
    lengths: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = list_overrides(
        [*sampler_settings(rollout_python), *lengths, *settings],
        steps=12,
        folder=tmp_path / "loop_0",
    )
    code = main([*overrides, "--check"])
    output = capsys.readouterr()
    assert code == 0, output.err
    assert "rollout[0]: rollout on 1 CPU" in output.out, (
        "the sampler needs its own core to sample ahead"
    )


def test_megatron_checkpoint_bench_measures_only_this_checkout_by_default(tmp_path: Path) -> None:
    sources = prepare_sources(None, folder=tmp_path)
    assert list(sources) == ["now"]
    assert (sources["now"] / "temper_engine_megatron" / "engine.py").is_file()


def test_weight_sync_bench_sends_full_weights_and_deltas_over_gloo() -> None:
    full, delta = measure_channel_deltas(Actor("tiny"), [1e-5], repeats=1).values()
    assert full.fraction == 1.0
    # An update by 1e-5 rounds to the same bf16 value in many of the elements.
    assert 0.2 < delta.fraction < 0.9
    assert 0 < delta.num_bytes < full.num_bytes
