"""Test that the compatibility matrix notices a contract that was changed in a copy.

Three guards must each report it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.api import find_broken_promises, write_lock
from tools.compat import (
    MATRIX,
    RECORDS,
    Trial,
    find_missing_trials,
    list_trials,
    pytest_arguments,
    read_matrix,
    record_passed,
    start_trials,
    unpack_trial,
    update_matrix,
)
from tools.release_records import ReleaseError, ReleaseSource, git, has_object, list_published
from tools.requirements import sibling_requirements
from tools.site.compatibility import build_compatibility_page

ROOT = Path(__file__).resolve().parents[2]
PAIR = "engine-api:engine-fsdp"

METHOD = ("init_model", "build_model")
ARGUMENT = (
    "sample_ids: Sequence[int] | None = None,\n    group_ids",
    "sample_ids: Sequence[int],\n    group_ids",
)

SMALLEST = {
    "trainer": "batching/test_step_plan.py"
    "::test_denominators_are_counted_over_the_mini_batch_after_masking",
    "engine-fsdp": "test_engine.py::test_the_training_loop_of_the_rfc_lowers_the_loss",
}
"""The smallest test of each dependent package that calls the contract."""

# Nightly: importing an engine takes ten seconds, and the trainer's trial shows the same.
SIBLINGS = ["trainer", pytest.param("engine-fsdp", marks=pytest.mark.nightly)]


def _find_trial(dependent: str) -> Trial:
    """Return a trial of this checkout's engine-api with the last release of a sibling."""
    try:
        matching = [
            each
            for each in list_trials(ROOT, f"engine-api:{dependent}")
            if each.released.package == dependent
        ]
    except ReleaseError as error:
        pytest.skip(f"a clone with its full history runs this: {error}")
    if not matching:
        pytest.skip(
            f"the last release of {dependent} is for an earlier contract than this one; "
            "the next release runs this"
        )
    return matching[0]


def _make_lowest_trial(dependent: str) -> Trial:
    """Return a trial of this checkout's sibling with the first engine-api within its bounds."""
    bounds = [
        each.specifier
        for each in sibling_requirements(ROOT / "packages" / dependent)
        if each.name == "temper-engine-api"
    ]
    records = list_published(ROOT, "engine-api")
    first = next(
        (each for each in records if all(each.version in each_bound for each_bound in bounds)), None
    )
    if first is None:
        pytest.skip(
            f"{dependent} requires a later engine-api than the last release: "
            "the next release runs this"
        )
    if first == records[-1]:
        pytest.skip(
            f"{dependent} accepts no engine-api before the last release, "
            "with which nox -s compat tests it"
        )
    if not has_object(ROOT, first.commit):
        pytest.skip("a clone with its full history runs this")
    source = ReleaseSource(
        package="engine-api", version=first.version, treeish=first.tree, commit=first.commit
    )
    return Trial(dependency="engine-api", dependent=dependent, released=source, tree=first.tree)


def _broken_copy(folder: Path, *changes: tuple[str, str]) -> Path:
    """Copy this checkout's engine-api and rename something everywhere in the copy."""
    copy = folder / "engine-api"
    shutil.copytree(
        ROOT / "packages" / "engine-api",
        copy,
        ignore=shutil.ignore_patterns("__pycache__", "tests"),
    )
    write_lock(copy)
    for path in sorted(copy.glob("src/**/*.py")):
        text = path.read_text()
        for old, new in changes:
            text = text.replace(old, new)
        path.write_text(text)
    return copy


def _run(
    folder: Path, trial: Trial, *, engine_api: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the smallest test of a trial with the path that nox would set up."""
    files = unpack_trial(ROOT, trial, folder)
    sources = {**files.sources, "engine-api": engine_api or files.sources["engine-api"]}
    path = os.pathsep.join(str(each / "src") for each in sources.values())
    command = [
        sys.executable,
        *pytest_arguments(files, [SMALLEST[trial.dependent]]),
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    return subprocess.run(
        command,
        cwd=files.root,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("dependent", SIBLINGS)
def test_last_release_of_a_sibling_runs_with_this_contract(dependent: str, tmp_path: Path) -> None:
    done = _run(tmp_path, _find_trial(dependent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("dependent", SIBLINGS)
def test_this_checkout_runs_with_the_lowest_contract_within_its_bounds(
    dependent: str, tmp_path: Path
) -> None:
    trial = _make_lowest_trial(dependent)
    done = _run(tmp_path, trial)
    assert done.returncode == 0, (
        f"{trial.name}: raise the bound in {dependent}/pyproject.toml, or fix this\n"
        f"{done.stdout}{done.stderr}"
    )
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_engines_of_this_checkout_can_be_imported_with_the_released_contract(
    tmp_path: Path,
) -> None:
    try:
        contract_trials = [
            each for each in list_trials(ROOT, PAIR) if each.released.package == "engine-api"
        ]
    except ReleaseError as error:
        pytest.skip(f"a clone with its full history runs this: {error}")
    if not contract_trials:
        pytest.skip(
            "the engine requires a later contract than the last release: the next release runs this"
        )
    files = unpack_trial(ROOT, contract_trials[0], tmp_path)
    path = os.pathsep.join(str(each / "src") for each in files.sources.values())
    program = """
import temper_engine_fsdp.engine, temper_engine_megatron.engine
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_fsdp.training import lora_adapter as of_fsdp
from temper_engine_megatron.adapter import adapter_plan as of_megatron
for adapter in (of_fsdp, of_megatron):
    adapter._fresh_config(LoraSpec(rank=2, alpha=4.0), model=ModelSpec(path='model'))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dependent", SIBLINGS)
def test_new_required_argument_fails_compat(dependent: str, tmp_path: Path) -> None:
    done = _run(tmp_path, _find_trial(dependent), engine_api=_broken_copy(tmp_path, ARGUMENT))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "from_sequences() missing 1 required keyword-only argument: 'sample_ids'" in done.stdout


# Nightly: importing an engine takes ten seconds. The lock notices the change below, every day.
@pytest.mark.nightly
def test_renamed_method_fails_compat(tmp_path: Path) -> None:
    done = _run(tmp_path, _find_trial("engine-fsdp"), engine_api=_broken_copy(tmp_path, METHOD))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "has no attribute 'init_model'" in done.stdout


def test_renamed_method_and_new_required_argument_break_the_lock(tmp_path: Path) -> None:
    messages = "\n".join(find_broken_promises(_broken_copy(tmp_path, METHOD, ARGUMENT)))
    assert "BaseEngine.init_model is gone" in messages
    assert re.search(r"from_sequences\(sample_ids\) was '.*= None' and is '.*required'", messages)


def test_next_contract_refuses_the_last_release_of_an_engine(tmp_path: Path) -> None:
    copy = _broken_copy(tmp_path)
    declared = (copy / "pyproject.toml").read_text()
    (copy / "pyproject.toml").write_text(
        re.sub(r'(?m)^version = ".*"$', 'version = "0.99.0"', declared)
    )
    released = unpack_trial(ROOT, _find_trial("engine-fsdp"), tmp_path / "released").sources[
        "engine-fsdp"
    ]
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    for package in (copy, released):
        subprocess.run(
            [sys.executable, "-c", build, str(wheels)],
            cwd=package,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    # Python can import from a wheel file
    path = os.pathsep.join(str(each) for each in sorted(wheels.iterdir()))
    program = "from temper_engine_api.registry import load_engine_class; load_engine_class('fsdp')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ContractVersionError: engine 'fsdp' of temper-engine-fsdp 0." in done.stderr
    assert "and temper-engine-api 0.99.0 is installed" in done.stderr


@pytest.fixture(scope="module")
def trial() -> Trial:
    return _find_trial("engine-fsdp")


def test_trial_runs_the_tests_of_the_dependent_package(trial: Trial, tmp_path: Path) -> None:
    files = unpack_trial(ROOT, trial, tmp_path)
    assert files.tests == files.root / "packages" / "engine-fsdp" / "tests"
    assert files.sources["engine-fsdp"] == files.root / "packages" / "engine-fsdp"
    assert (files.root / "docs").is_dir()
    assert files.sources["engine-api"] == ROOT / "packages" / "engine-api"
    assert trial.name.startswith("engine-api with engine-fsdp 0.")


@pytest.fixture(scope="module")
def clone(trial: Trial, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records") / "clone"
    git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(folder))
    return folder


@pytest.mark.usefixtures("trial")
def test_trial_with_a_released_dependency_runs_the_tests_of_this_checkout(tmp_path: Path) -> None:
    (trial,) = (each for each in list_trials(ROOT, PAIR) if each.released.package == "engine-api")
    files = unpack_trial(ROOT, trial, tmp_path / "released")
    assert files.tests == ROOT / "packages" / "engine-fsdp" / "tests"
    assert files.sources["engine-api"].is_relative_to(tmp_path)
    assert set(files.sources) == {
        path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")
    }


def test_versions_that_pip_cannot_install_together_are_not_tried(trial: Trial) -> None:
    later = list_trials(ROOT, PAIR, declared={"engine-api": "0.99.0"})
    assert trial.name not in {each.name for each in later}


def test_missing_record_is_reported_with_the_command_to_run(clone: Path) -> None:
    record_passed(clone, PAIR, list_trials(clone, PAIR))
    start_trials(clone, PAIR)
    (sentence,) = _find_missing_trials_of_pair(clone)
    assert re.fullmatch(
        r"engine-api with engine-fsdp \S+ \(\w{12}\) "
        r"and engine-fsdp with engine-api \S+ \(\w{12}\): no passed run is recorded\. "
        r"Run nox -s \"compat\(pair='engine-api:engine-fsdp'\)\"",
        sentence,
    )


def test_record_is_valid_only_for_the_contents_it_names(clone: Path) -> None:
    assert record_passed(clone, PAIR, list_trials(clone, PAIR)).parent == clone / RECORDS
    assert _find_missing_trials_of_pair(clone) == []
    (clone / "packages/engine-fsdp/README.md").write_text("Other words.\n")
    assert _find_missing_trials_of_pair(clone) == []
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").touch()
    (sentence,) = _find_missing_trials_of_pair(clone)
    assert ": engine-fsdp changed since the run that passed at 20" in sentence
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").unlink()
    assert _find_missing_trials_of_pair(clone) == []


def test_both_directions_of_a_pair_must_pass(clone: Path) -> None:
    record_passed(clone, PAIR, list_trials(clone, PAIR)[:1])
    (sentence,) = _find_missing_trials_of_pair(clone)
    assert sentence.startswith("engine-fsdp with engine-api ")


def test_committed_record_is_shown_on_the_site(clone: Path) -> None:
    records_before = {record.pair: record for record in read_matrix(clone)}
    record_passed(clone, PAIR, list_trials(clone, PAIR))
    assert update_matrix(clone) == [PAIR]
    records = {record.pair: record for record in read_matrix(clone)}
    assert records == records_before | {PAIR: records[PAIR]}
    assert records[PAIR].commit.startswith(git(clone, "rev-parse", "HEAD").strip())
    (row,) = (
        line
        for line in build_compatibility_page(clone).splitlines()
        if line.startswith("| engine-api | engine-fsdp |")
    )
    assert all(trial.name in row for trial in list_trials(clone, PAIR))
    assert row.endswith(f"`{records[PAIR].commit[:7]}` |")


def test_site_lists_the_packages_changed_since_a_trial(clone: Path) -> None:
    record_passed(clone, PAIR, list_trials(clone, PAIR))
    update_matrix(clone)
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").touch()
    (row,) = (
        line
        for line in build_compatibility_page(clone).splitlines()
        if line.startswith("| engine-api | engine-fsdp |")
    )
    assert row.endswith("; since then changed: engine-fsdp |")
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").unlink()


def test_committed_record_is_valid_in_another_clone(clone: Path) -> None:
    record_passed(clone, PAIR, list_trials(clone, PAIR)).rename(clone / "elsewhere.json")
    (clone / MATRIX).write_text(f"[{(clone / 'elsewhere.json').read_text()}]")
    assert _find_missing_trials_of_pair(clone) == []
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").touch()
    (sentence,) = _find_missing_trials_of_pair(clone)
    assert ": engine-fsdp changed since the run that passed at 20" in sentence
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").unlink()


def test_failed_repetition_invalidates_a_committed_record(
    clone: Path,
) -> None:
    record_passed(clone, PAIR, list_trials(clone, PAIR))
    update_matrix(clone)
    start_trials(clone, PAIR)  # like nox before it runs the tests
    (sentence,) = _find_missing_trials_of_pair(clone)
    assert "no passed run is recorded" in sentence
    assert update_matrix(clone) == []


def test_edit_during_a_trial_prevents_a_record(clone: Path) -> None:
    start_trials(clone, PAIR)
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").touch()
    with pytest.raises(
        ReleaseError, match="engine-fsdp changed while the trials of engine-api:engine-fsdp ran"
    ):
        record_passed(clone, PAIR, list_trials(clone, PAIR))
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").unlink()
    (sentence,) = _find_missing_trials_of_pair(clone)
    assert "no passed run is recorded" in sentence
    record_passed(clone, PAIR, list_trials(clone, PAIR))
    assert _find_missing_trials_of_pair(clone) == []


def test_malformed_record_is_refused(clone: Path) -> None:
    record_passed(clone, PAIR, list_trials(clone, PAIR)).write_text(
        '{"pair": "engine-api:engine-fsdp", "green": true}'
    )
    with pytest.raises(
        ReleaseError, match=r"engine-api\+engine-fsdp\.json was not written by nox -s compat"
    ):
        find_missing_trials(clone, "engine-api", "0.1.9")


def _find_missing_trials_of_pair(root: Path) -> list[str]:
    """Return the untried trials of `PAIR` before the next patch release of engine-api."""
    return [
        sentence
        for sentence in find_missing_trials(root, "engine-api", "0.1.9")
        if PAIR in sentence
    ]
