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

from tools.api import complaints, write_lock
from tools.bounds import sibling_requirements
from tools.compat import (
    MATRIX,
    RECORDS,
    Trial,
    find_missing_trials,
    keep_records,
    pytest_arguments,
    read_matrix,
    record_passed,
    start_trials,
    trials,
    unpack_trial,
)
from tools.releases import ReleaseError, Source, git, has_object, published
from tools.site.compatibility import compatibility_page

ROOT = Path(__file__).resolve().parents[2]
PAIR = "engine-api:engine-fsdp"

METHOD = ("init_model", "build_model")
ARGUMENT = (
    "sample_ids: Sequence[int] | None = None,\n    group_ids",
    "sample_ids: Sequence[int],\n    group_ids",
)

SMALLEST = {
    "trainer": "batching/test_step_plan.py::test_denominators_are_counted_over_the_mini_batch_after_masking",
    "engine-fsdp": "test_engine.py::test_the_training_loop_of_the_rfc_lowers_the_loss",
}
"""The smallest test of each dependent package that calls the contract.

The engines' tests are nightly, because importing an engine takes ten seconds.
"""

SIBLINGS = ["trainer", pytest.param("engine-fsdp", marks=pytest.mark.nightly)]


def _trial(dependent: str) -> Trial:
    """Return a trial of this checkout's engine-api with the last release of a sibling."""
    try:
        found = [
            each
            for each in trials(ROOT, f"engine-api:{dependent}")
            if each.released.package == dependent
        ]
    except ReleaseError as trouble:
        pytest.skip(f"a clone with its whole history runs this: {trouble}")
    if not found:
        pytest.skip(
            f"the last release of {dependent} is for an earlier contract than the one that is here; the next one runs this"
        )
    return found[0]


def _lowest(dependent: str) -> Trial:
    """Return a trial of this checkout's sibling with the first engine-api within its bounds."""
    bounds = [
        each.specifier
        for each in sibling_requirements(ROOT / "packages" / dependent)
        if each.name == "temper-engine-api"
    ]
    records = published(ROOT, "engine-api")
    first = next(
        (each for each in records if all(each.version in each_bound for each_bound in bounds)), None
    )
    if first is None:
        pytest.skip(
            f"{dependent} asks for a later engine-api than the last release: the next one runs this"
        )
    if first == records[-1]:
        pytest.skip(
            f"{dependent} accepts no earlier engine-api than the last one, with which nox -s compat tries it"
        )
    if not has_object(ROOT, first.commit):
        pytest.skip("a clone with its whole history runs this")
    source = Source(
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
def test_the_last_release_of_a_sibling_runs_on_this_contract(
    dependent: str, tmp_path: Path
) -> None:
    done = _run(tmp_path, _trial(dependent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("dependent", SIBLINGS)
def test_this_checkout_runs_on_the_first_contract_that_its_bounds_let_in(
    dependent: str, tmp_path: Path
) -> None:
    trial = _lowest(dependent)
    done = _run(tmp_path, trial)
    assert done.returncode == 0, (
        f"{trial.name}: raise the bound in {dependent}/pyproject.toml, or mend\n{done.stdout}{done.stderr}"
    )
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_engines_of_this_checkout_can_be_imported_beside_the_released_contract(
    tmp_path: Path,
) -> None:
    try:
        found = [each for each in trials(ROOT, PAIR) if each.released.package == "engine-api"]
    except ReleaseError as trouble:
        pytest.skip(f"a clone with its whole history runs this: {trouble}")
    if not found:
        pytest.skip(
            "the engine asks for a later contract than the last release: the next one runs this"
        )
    files = unpack_trial(ROOT, found[0], tmp_path)
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
def test_an_argument_that_must_now_be_given_turns_compat_red(
    dependent: str, tmp_path: Path
) -> None:
    done = _run(tmp_path, _trial(dependent), engine_api=_broken_copy(tmp_path, ARGUMENT))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "from_sequences() missing 1 required keyword-only argument: 'sample_ids'" in done.stdout


@pytest.mark.nightly
def test_a_renamed_method_turns_compat_red(tmp_path: Path) -> None:
    done = _run(tmp_path, _trial("engine-fsdp"), engine_api=_broken_copy(tmp_path, METHOD))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "has no attribute 'init_model'" in done.stdout


def test_both_break_the_lock_on_public_names(tmp_path: Path) -> None:
    told = "\n".join(complaints(_broken_copy(tmp_path, METHOD, ARGUMENT)))
    assert "BaseEngine.init_model is gone" in told
    assert re.search(r"from_sequences\(sample_ids\) was '.*= None' and is '.*required'", told)


def test_the_next_contract_refuses_the_last_release_of_an_engine(tmp_path: Path) -> None:
    copy = _broken_copy(tmp_path)
    declared = (copy / "pyproject.toml").read_text()
    (copy / "pyproject.toml").write_text(
        re.sub(r'(?m)^version = ".*"$', 'version = "0.99.0"', declared)
    )
    released = unpack_trial(ROOT, _trial("engine-fsdp"), tmp_path / "released").sources[
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
    return _trial("engine-fsdp")


def test_a_trial_runs_the_tests_of_the_package_that_depends_on_the_other(
    trial: Trial, tmp_path: Path
) -> None:
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
def test_the_other_way_round_runs_the_tests_of_this_checkout(tmp_path: Path) -> None:
    (there,) = (each for each in trials(ROOT, PAIR) if each.released.package == "engine-api")
    files = unpack_trial(ROOT, there, tmp_path / "released")
    assert files.tests == ROOT / "packages" / "engine-fsdp" / "tests"
    assert files.sources["engine-api"].is_relative_to(tmp_path)
    assert set(files.sources) == {
        path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")
    }


def test_what_pip_would_never_install_together_is_not_tried(trial: Trial) -> None:
    later = trials(ROOT, PAIR, declared={"engine-api": "0.99.0"})
    assert trial.name not in {each.name for each in later}


def test_without_a_green_record_a_sentence_says_what_to_run(clone: Path) -> None:
    record_passed(clone, PAIR, trials(clone, PAIR))
    start_trials(clone, PAIR)
    (sentence,) = _about(clone)
    assert re.fullmatch(
        r"engine-api with engine-fsdp \S+ \(\w{12}\) and engine-fsdp with engine-api \S+ \(\w{12}\): no green run is recorded\. "
        r"Run nox -s \"compat\(pair='engine-api:engine-fsdp'\)\"",
        sentence,
    )


def test_a_green_record_holds_for_the_contents_that_it_names(clone: Path) -> None:
    assert record_passed(clone, PAIR, trials(clone, PAIR)).parent == clone / RECORDS
    assert _about(clone) == []
    (clone / "packages/engine-fsdp/README.md").write_text("Other words.\n")
    assert _about(clone) == []
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").touch()
    (sentence,) = _about(clone)
    assert ": engine-fsdp changed since the green run of 20" in sentence
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").unlink()
    assert _about(clone) == []


def test_one_way_round_is_not_both(clone: Path) -> None:
    record_passed(clone, PAIR, trials(clone, PAIR)[:1])
    (sentence,) = _about(clone)
    assert sentence.startswith("engine-fsdp with engine-api ")


def test_a_trial_that_is_kept_stands_in_the_table_of_the_site(clone: Path) -> None:
    others = {green.pair: green for green in read_matrix(clone)}
    record_passed(clone, PAIR, trials(clone, PAIR))
    assert keep_records(clone) == [PAIR]
    kept = {green.pair: green for green in read_matrix(clone)}
    assert kept == others | {PAIR: kept[PAIR]}
    assert kept[PAIR].commit.startswith(git(clone, "rev-parse", "HEAD").strip())
    (row,) = (
        line
        for line in compatibility_page(clone).splitlines()
        if line.startswith("| engine-api | engine-fsdp |")
    )
    assert all(trial.name in row for trial in trials(clone, PAIR))
    assert row.endswith(f"`{kept[PAIR].commit[:7]}` |")


def test_the_table_of_the_site_says_what_changed_since_a_trial(clone: Path) -> None:
    record_passed(clone, PAIR, trials(clone, PAIR))
    keep_records(clone)
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").touch()
    (row,) = (
        line
        for line in compatibility_page(clone).splitlines()
        if line.startswith("| engine-api | engine-fsdp |")
    )
    assert row.endswith("; since then changed: engine-fsdp |")
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").unlink()


def test_a_kept_trial_serves_a_clone_that_ran_none(clone: Path) -> None:
    record_passed(clone, PAIR, trials(clone, PAIR)).rename(clone / "elsewhere.json")
    (clone / MATRIX).write_text(f"[{(clone / 'elsewhere.json').read_text()}]")
    assert _about(clone) == []
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").touch()
    (sentence,) = _about(clone)
    assert ": engine-fsdp changed since the green run of 20" in sentence
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").unlink()


def test_a_trial_that_is_tried_again_and_fails_counts_no_more_although_it_was_kept(
    clone: Path,
) -> None:
    record_passed(clone, PAIR, trials(clone, PAIR))
    keep_records(clone)
    start_trials(clone, PAIR)  # like nox before it runs the tests
    (sentence,) = _about(clone)
    assert "no green run is recorded" in sentence
    assert keep_records(clone) == []


def test_an_edit_during_a_trial_leaves_no_green_record(clone: Path) -> None:
    start_trials(clone, PAIR)
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").touch()
    with pytest.raises(
        ReleaseError, match="engine-fsdp changed while engine-api:engine-fsdp was being tried"
    ):
        record_passed(clone, PAIR, trials(clone, PAIR))
    (clone / "packages/engine-fsdp/src/temper_engine_fsdp/more.py").unlink()
    (sentence,) = _about(clone)
    assert "no green run is recorded" in sentence
    record_passed(clone, PAIR, trials(clone, PAIR))
    assert _about(clone) == []


def test_a_record_that_somebody_wrote_by_hand_is_refused(clone: Path) -> None:
    record_passed(clone, PAIR, trials(clone, PAIR)).write_text(
        '{"pair": "engine-api:engine-fsdp", "green": true}'
    )
    with pytest.raises(
        ReleaseError, match=r"engine-api\+engine-fsdp\.json is no record of nox -s compat"
    ):
        find_missing_trials(clone, "engine-api", "0.1.9")


def _about(root: Path) -> list[str]:
    """Return the untried trials of `PAIR` before the next patch release of engine-api."""
    return [
        sentence
        for sentence in find_missing_trials(root, "engine-api", "0.1.9")
        if PAIR in sentence
    ]
