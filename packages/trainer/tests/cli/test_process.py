"""Test the command in its own process: its imports, its start and its interruption."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from temper_trainer.metrics.run_files import read_rows

TINY = [
    "experiment=quickstart",
    "warm_start.total_steps=2",
    "warm_start.batch_size=4",
    "warm_start.data.max_rows=8",
    "data.train.max_rows=16",
    "data.eval.max_rows=4",
    "batching.prompts_per_step=2",
    "algorithm.group_size=2",
    "actor.engine.model.architecture.num_hidden_layers=1",
]


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "temper_trainer", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(*arguments: str, cwd: Path) -> tuple[int | None, str, str]:
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


HEAVY = "torch transformers ray matplotlib datasets numpy pyarrow fsspec"


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        # This experiment reads no files, and trains a tokenizer on the rows that it generates.
        (["experiment=quickstart", "--check"], HEAVY),
        (["--help"], f"{HEAVY} tokenizers asyncio"),
        (["experiment=quickstart", "--print"], f"{HEAVY} tokenizers asyncio"),
    ],
    ids=["check", "help", "print"],
)
def test_command_imports_only_what_it_uses(arguments: list[str], unwanted: str) -> None:
    program = (
        "import sys\nfrom temper_trainer.__main__ import main\n"
        f"code = main({arguments!r})\nassert code == 0\n"
        f"imported = {set(unwanted.split())!r} & set(sys.modules)\nassert not imported, imported\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_parses_no_source_twice() -> None:
    program = (
        "import sys\nfrom temper_trainer.__main__ import main\nparsed = []\n"
        # ast.parse raises this audit event with its default file name.
        "sys.addaudithook(lambda event, details: event == 'compile' and "
        "details[1] == '<unknown>' and parsed.append(details[0]))\n"
        "main(['--help'])\nassert parsed and len(parsed) == len(set(parsed)), len(parsed)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_module_and_command_behave_equally(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("temper-train")
    done = subprocess.run(
        [command, "experiment=quickstart", "--check"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run("experiment=quickstart", "--check", cwd=tmp_path)[1] == done.stdout


def test_exited_reader_of_the_output_leaves_no_traceback(tmp_path: Path) -> None:
    process = start("experiment=quickstart", "--print", cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # as `| head` does once it has its lines
    with process.stderr:
        errors = process.stderr.read()
    assert (process.wait(timeout=60), errors) == (141, "")


def test_closed_standard_streams_are_opened_before_any_file_gets_their_numbers() -> None:
    program = (
        "import os, sys\nfrom temper_trainer.__main__ import main\n"
        "code = main(['--version'])\n"
        "names = {os.readlink(f'/proc/self/fd/{i}') for i in range(3)}\n"
        "os._exit(code or names != {'/dev/null'})\n"
    )
    shell = f"{shlex.join([sys.executable, '-c', program])} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], timeout=60, check=False).returncode == 0


def test_run_whose_output_has_no_reader_names_the_saved_step(tmp_path: Path) -> None:
    process = start(*TINY, "run.dir=out", cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        errors = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert errors.splitlines()[-2:] == [
        "the reader of the standard output has exited, and the run with it.",
        "No checkpoint of this run was saved yet: run.resume=auto would start at step 1.",
    ]
    assert not (tmp_path / "out" / "run.lock").exists()


def test_wrong_configuration_leaves_no_traceback(tmp_path: Path) -> None:
    code, out, err = run("task=dop", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("configuration error:\n")
    assert "task is 'dop', but must be rl, sft, distill," in err
    assert "Traceback" not in err


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A run that was interrupted by Ctrl-C, and then went on to its end."""

    folder: Path
    code: int
    last_error: str
    step: int
    out: str


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    # The resumed run writes the report.
    settings = ("run.total_steps=5000", "run.dir=out", "run.report=false")
    process = start(*TINY, *settings, cwd=folder)
    metrics, deadline = folder / "out" / "metrics.jsonl", time.monotonic() + 200
    while (
        '"phase": "rl"' not in (metrics.read_text() if metrics.exists() else "")
        and time.monotonic() < deadline
    ):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    # Launchers repeat SIGTERM while a process ends.
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    assert "WorkAbandoned" not in errors
    last_error = errors.splitlines()[-1]
    step = int(last_error.split("interrupted at step ")[1].split(",")[0])
    code, out, err = run(
        *TINY, f"run.total_steps={step + 1}", "run.dir=out", "run.resume=auto", cwd=folder
    )
    assert code == 0, err
    return Story(
        folder=folder / "out", code=process.returncode, last_error=last_error, step=step, out=out
    )


@pytest.mark.slow
def test_interrupted_run_prints_the_resume_command(story: Story) -> None:
    command = " ".join(
        [
            "temper-train",
            *TINY,
            *("run.total_steps=5000", "run.dir=out", "run.report=false", "run.resume=auto"),
        ]
    )
    assert story.code == 130
    assert story.last_error == f"interrupted at step {story.step}, resume with: {command}"


@pytest.mark.slow
def test_resumed_run_continues_with_the_next_step(story: Story) -> None:
    total = story.step + 1
    assert [line.split()[1] for line in story.out.splitlines() if line.startswith("rl ")] == [
        f"{total}/{total}"
    ]
    steps = [row.step for row in read_rows(story.folder / "metrics.jsonl") if row.phase == "rl"]
    assert steps == list(range(1, total + 1))


@pytest.mark.slow
def test_run_writes_all_documented_results(story: Story) -> None:
    promised = {
        "config.yaml",
        "config_origins.yaml",
        "metrics.jsonl",
        "tensorboard",
        "samples.jsonl",
        "curves.png",
        "report.html",
        "checkpoints",
        "huggingface",
    }
    assert promised <= {path.name for path in story.folder.iterdir()}
    assert re.fullmatch(
        r"done in .* s \(.* since the first start\): .*; "
        r"report out/report.html; model out/huggingface",
        story.out.splitlines()[-1],
    )


@pytest.mark.slow
def test_every_metric_of_a_run_is_in_the_glossary(story: Story) -> None:
    glossary = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    names = {name for row in read_rows(story.folder / "metrics.jsonl") for name in row.values}
    assert {name for name in names if f"`{name}`" not in glossary} == set()


REWARD_THAT_QUOTES_ITS_KEY = """
import logging, sys, threading, warnings

class Client:
    def __init__(self, key):
        self.key = key
    def __del__(self):
        raise ValueError("finalizer " + self.key)

def score(prompt, completion, *, api_key):
    def fail():
        raise ValueError("thread " + api_key)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    Client(api_key)
    warnings.warn("warning " + api_key)
    library = logging.getLogger("library")
    library.propagate = False
    library.addHandler(logging.StreamHandler())
    library.warning("library %s", api_key)
    print("print", api_key)
    print("stderr", api_key, file=sys.stderr)
    return 0.0
"""


def test_what_a_reward_prints_hides_secrets_however_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", 'Zq7&pw"9/LmX+t3=Rr')
    (tmp_path / "quoting_reward.py").write_text(REWARD_THAT_QUOTES_ITS_KEY)
    code, out, err = run(
        *TINY,
        "reward.function=quoting_reward:score",
        "+reward.arguments.api_key='${oc.env:JUDGE_KEY}'",
        "--check",
        cwd=tmp_path,
    )
    assert code == 0, err
    assert "LmX" not in out + err
    assert "print <hidden>" in out
    for kind in ("thread", "finalizer", "warning", "library", "stderr"):
        assert f"{kind} <hidden>" in err


INTERRUPTED_IMPORT = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "temper_engine_api.errors":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
import temper_trainer.__main__
"""


def test_interrupt_during_the_imports_prints_a_line_and_no_traceback() -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stderr == "interrupted before the run was started\n"
    assert ended.returncode == -signal.SIGINT
