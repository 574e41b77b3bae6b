"""Write the numbers of a checkout, and compare those of two checkouts bit for bit.

    python -m tools.equal_numbers write ROOT FOLDER [-- KIT_OPTION ...]
    python -m tools.equal_numbers compare OLD NEW

`write` uses the sources below ROOT, in the Python environment that runs it. It runs the quickstart
with GRPO, and with PPO and a critic (inline, loop=sync, one thread, seed 1), and the conformance
kit on one rank of both engines. `compare` reads two such folders. It finds old names of metrics and
tests in docs/records/renames.md, and leaves out metrics of time, speed and memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

# torch has no public function that reads all tensors of a checkpoint without a model.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tools.environment import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
RENAMES = ROOT / "docs" / "records" / "renames.md"

OVERRIDES = (
    "experiment=quickstart",
    "run.total_steps=30",
    "run.seed=1",
    "run.num_threads=1",
    "loop=sync",
    "runtime.kind=inline",
    "data.eval=null",
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": ("algorithm=ppo", "algorithm.group_size=4"),
}
"""Overrides of each run in addition to `OVERRIDES`."""
ENGINES = ("fsdp", "megatron")
NOT_COMPARED = re.compile(r"(time|memory|speed)/.*|(.*/)?(time_s|tokens_per_s)")
"""Metrics that depend on the host."""


def write_numbers(root: Path, folder: Path, *, kit_options: Sequence[str]) -> None:
    """Run everything with the sources below `root`; what a folder has is not run again."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [str(root / "packages" / package / "src") for package in PACKAGES]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sources, str(root)]),
        "OMP_NUM_THREADS": "1",
    }
    for name, overrides in RUNS.items():
        run = folder / name
        if not (run / "huggingface").exists():
            command = ("temper_trainer", *OVERRIDES, *overrides, f"run.dir={run}")
            subprocess.run([sys.executable, "-m", *command], cwd=root, env=environment, check=True)
    for engine in ENGINES:
        outcomes = folder / f"{engine}.xml"
        if not outcomes.exists():
            kit = ("pytest", "-q", "-p", "no:cacheprovider", "--pyargs")
            subprocess.run(
                [
                    *(sys.executable, "-m", *kit, "temper_engine_api.conformance"),
                    *("--engine", engine, "--world-sizes", "1", "--junitxml", str(outcomes)),
                    *kit_options,
                ],
                cwd=root,
                env=environment,
                check=True,
            )


def read_renames(text: str) -> dict[str, str]:
    """Return new names by old names, from table rows with as many names on both sides."""
    renames: dict[str, str] = {}
    for line in text.splitlines():
        cells = [re.findall(r"`\"?([^`\"]+)\"?`", cell) for cell in line.strip("|").split("|")]
        for old_names, new_names in itertools.pairwise(cells):
            if len(old_names) == len(new_names):
                renames |= {
                    old: new for old, new in zip(old_names, new_names, strict=True) if old != new
                }
    return renames


def find_new_name(name: str, *, renames: Mapping[str, str], new_names: Container[str]) -> str:
    """Follow the renames of a name until it is one of the new names."""
    seen = {name}
    while name not in new_names and (following := renames.get(name)) and following not in seen:
        name = following
        seen.add(name)
    return name


def compare_runs(old: Path, new: Path, *, renames: Mapping[str, str]) -> Iterator[str]:
    """Yield a line on the metrics, and one on each set of tensors, of a run."""
    old_rows, new_rows = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (old, new)
    )
    differing: list[str] = []
    missing: set[str] = set()
    num_equal = 0
    for old_row, new_row in zip(old_rows, new_rows, strict=True):
        for old_name, value in old_row.items():
            name = find_new_name(old_name, renames=renames, new_names=new_row)
            if NOT_COMPARED.fullmatch(old_name):
                continue
            if name not in new_row:
                missing.add(old_name)
            elif repr(new_row[name]) == repr(value):
                num_equal += 1
            else:
                differing.append(f"{name} at {old_row['phase']} step {old_row['step']}")
    yield (
        f"{new.name}: {num_equal} metric values of {len(new_rows)} rows equal, "
        f"{len(differing)} differ {differing[:5]}; without a new name: {sorted(missing)}"
    )
    for label in ("huggingface", "checkpoints"):
        tensors, expected = (read_tensors(run / label) for run in (new, old))
        differing = [
            name
            for name in tensors.keys() | expected.keys()
            if name not in tensors
            or name not in expected
            or not torch.equal(_get_bytes(tensors[name]), _get_bytes(expected[name]))
        ]
        yield (
            f"{new.name}: {len(expected) - len(differing)} of {len(expected)} tensors in {label} "
            f"equal {differing[:5]}"
        )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors in the safetensors files and distributed checkpoints below a folder."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        path = file.relative_to(folder)
        tensors |= {f"{path}: {name}": tensor for name, tensor in load_file(file).items()}
    for metadata in sorted(folder.rglob(".metadata")):
        path = metadata.parent.relative_to(folder)
        state: dict[str, Any] = _load_state_dict_from_keys(checkpoint_id=metadata.parent)
        tensors |= {f"{path}: {name}": tensor for name, tensor in _flatten(state)}
    return tensors


def _flatten(state: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, dict):
            yield from _flatten(value, prefix=f"{prefix}{name}.")


def _get_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def read_outcomes(junit_xml: Path) -> dict[str, str]:
    """Return passed, failure, error or skipped by the test's function and parameters."""
    return {
        case.attrib["name"]: case[0].tag
        if len(case) and case[0].tag in ("failure", "error", "skipped")
        else "passed"
        for case in ElementTree.parse(junit_xml).iter("testcase")
    }


def compare_kit(old: Path, new: Path, *, renames: Mapping[str, str]) -> str:
    """Return a line on the outcomes of the kit's tests that both files have."""
    expected, outcomes = read_outcomes(old), read_outcomes(new)
    functions = {test.partition("[")[0]: test for test in outcomes}
    unmatched, differing, num_equal = [], [], 0
    for test, outcome in expected.items():
        function, bracket, parameters = test.partition("[")
        function = find_new_name(function, renames=renames, new_names=functions)
        name = function + bracket + parameters
        if name not in outcomes:
            # The last parameter may have a new id, such as the name of an objective.
            others, dash, last = parameters.removesuffix("]").rpartition("-")
            name = f"{function}[{others}{dash}{renames.get(last, last)}]"
        if name not in outcomes:
            unmatched.append(test)
        elif outcomes[name] == outcome:
            num_equal += 1
        else:
            differing.append(name)
    num_passed = [list(each.values()).count("passed") for each in (expected, outcomes)]
    return (
        f"{new.stem}: {num_equal} of {len(expected)} tests have the same outcome, {len(differing)} "
        f"differ {differing[:5]}; passed before {num_passed[0]}, now {num_passed[1]} of "
        f"{len(outcomes)}; without a new name: {unmatched}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("root", type=Path)
    write.add_argument("folder", type=Path)
    write.add_argument(
        "--thorough", action="store_true", help="pass --thorough to the kit, if it knows it"
    )
    compare = commands.add_parser("compare")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.command == "write":
        write_numbers(
            chosen.root.resolve(),
            chosen.folder.resolve(),
            kit_options=["--thorough"] if chosen.thorough else [],
        )
        return
    renames = read_renames(RENAMES.read_text())
    for name in RUNS:
        for line in compare_runs(chosen.old / name, chosen.new / name, renames=renames):
            print(line)
    for engine in ENGINES:
        print(
            compare_kit(chosen.old / f"{engine}.xml", chosen.new / f"{engine}.xml", renames=renames)
        )


if __name__ == "__main__":
    main()
