"""Check that the benchmarks' command lines are valid, before they take an hour on an idle host."""

import ast
from pathlib import Path

import pytest

from bench.bench_loops import LOOPS, overrides_of, sampler_settings
from temper_trainer.__main__ import main

PROGRAMS = sorted((Path(__file__).resolve().parents[2] / "bench").glob("bench_*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_every_program_runs_without_an_argument_as_the_session_calls_it(program: Path) -> None:
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
@pytest.mark.parametrize("rollout_python", [None, "rollout-env/bin/python"])
def test_each_loop_of_the_bench_of_loops_is_a_run(
    settings: tuple[str, ...],
    rollout_python: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = overrides_of(
        [*sampler_settings(rollout_python), *settings], steps=12, folder=tmp_path / "loop_0"
    )
    code = main([*asked, "--check"])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "rollout[0]: rollout on 1 CPU" in said.out, (
        "the sampler must have a core of its own to run ahead on"
    )
