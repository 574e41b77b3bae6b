"""Names and shapes that a config's model has, from transformers on the meta device.

No weight is made.

Runs in a process of its own next to a conversion, which itself needs neither torch's memory nor its
time to start: a config of another model is told in seconds, and not after all weights are written.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self

from temper_engine_api.process_folders import make_temporary_folder
from temper_legacy_shim.checkpoints.files.lazy import LazyTensor, Shape
from temper_legacy_shim.checkpoints.layouts import read_object
from temper_legacy_shim.errors import VerificationError

_TIME_LIMIT_S = 600
OWN_CODE = "the config needs code of its own (auto_map), which is never executed"
"""Reason why transformers builds no model."""
_EXPERTS = re.compile(r"(.+\.experts)\.(.+)")
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+\.")
_PROGRAM = """
import gc, json, sys, warnings
gc.disable()
warnings.simplefilter("ignore")
import torch, transformers
from transformers import AutoConfig
transformers.logging.set_verbosity_error()
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=False)
kind = {"value_model": "TokenClassification"}
kind |= dict.fromkeys(("language_model", "trl_value_model"), "CausalLM")
auto = getattr(transformers, "AutoModelFor" + kind.get(sys.argv[2], "SequenceClassification"))
with torch.device("meta"):
    model = auto.from_config(config, trust_remote_code=False, attn_implementation="eager")
kept = model.state_dict(keep_vars=True)
first = {}
for name, tensor in kept.items():
    first.setdefault(id(tensor), name)
kept = {name: kept[name] for name in first.values()}
names = [{name: list(tensor.shape) for name, tensor in kept.items()}]
try:
    from transformers.core_model_loading import revert_weight_conversion
    in_files = revert_weight_conversion(model, kept)
    names.append({name: list(tensor.shape) for name, tensor in in_files.items()})
except (ImportError, RuntimeError, ValueError, KeyError) as error:
    # The names in memory remain to compare with.
    print(type(error).__name__, error, file=sys.stderr)
print(json.dumps({"version": transformers.__version__, "names": names}))
gc.freeze()
"""
"""Program of the comparing process.

It collects no garbage, also at its exit: looking through a million imported objects takes two
fifths of its time.
"""

_NOT_COMPARED = "not verified: names were not compared with transformers' model"


class NamesCheck:
    """A comparison in a process, which starts on entry and ends on exit."""

    def __init__(self, config: str, tensors: Mapping[str, LazyTensor], *, head: str) -> None:
        """Store the arguments; the check starts on entry.

        Args:
            config: the text of ``config.json``.
            tensors: tensors of the output, by name.
            head: the kind of model, as `OldModel.head` has it.
        """
        self._config = config
        self._tensors = tensors
        self._head = head
        self._outcome: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def __enter__(self) -> Self:
        self._folder = directory = make_temporary_folder("migrate")
        (directory / "config.json").write_text(self._config)
        self._answer, self._errors = directory / "answer.json", directory / "errors.txt"
        self._process = _start(str(directory), self._head, answer=self._answer, errors=self._errors)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def watched(self, progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
        """Wrap `progress` to raise the comparison's error once its process has ended."""

        def report(what: str, done: int, total: int) -> None:
            if self._outcome is None and self._process.poll() is not None:
                self.outcome()
            progress(what, done, total)

        return report

    def outcome(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Wait for the comparison.

        Returns:
            Sentences for the receipt about the verified parts, and notes on why nothing could
            be.

        Raises:
            VerificationError: a weight is missing, unexpected or misshapen.
        """
        if self._outcome is None:
            self._outcome = self._compared()
        return self._outcome

    def _compared(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return sentences that were verified, and notes why nothing could be compared."""
        try:
            failed = self._process.wait(timeout=_TIME_LIMIT_S) != 0
        except subprocess.TimeoutExpired:
            return (), (f"{_NOT_COMPARED}: it was not built within {_TIME_LIMIT_S} s",)
        if failed and asks_for_code(self._answer.parent):
            return (), (
                f"{_NOT_COMPARED}: {OWN_CODE}; --no-verify-names leaves the comparison out",
            )
        if failed:
            reason = (self._errors.read_text().strip().splitlines() or ["no reason given"])[-1]
            return (), (f"{_NOT_COMPARED}, which this config does not give: {reason[:300]}",)
        answer = json.loads(self._answer.read_text().splitlines()[-1])
        have = {
            name: tensor.shape
            for name, tensor in self._tensors.items()
            if not name.startswith("v_head.")
        }
        _compare(answer["names"], have)
        return (
            (
                f"{len(have)} names and shapes equal those of transformers {answer['version']}'s "
                "model on the meta device"
            ),
        ), ()


def asks_for_code(directory: Path) -> bool:
    """Check if the config in a directory needs Python files that transformers would execute."""
    return "auto_map" in read_object(directory / "config.json")


def _start(*arguments: str, answer: Path, errors: Path) -> "subprocess.Popen[bytes]":
    """Start the program without prompts and downloads."""
    # -P keeps it from importing from the working directory, which may be a checkpoint.
    with open(answer, "wb") as out, open(errors, "wb") as err:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )


def _compare(answered: Iterable[Mapping[str, list[int]]], have: Mapping[str, Shape]) -> None:
    """Check a file's names against those of the transformers model, or that it saves."""
    # Mixtral saves other names than it has. If transformers could not determine the latter, experts
    # may have any names.
    all_expected = [{name: tuple(shape) for name, shape in names.items()} for names in answered]
    faults = min(
        (
            _faults(expected, have, compares_kinds=len(all_expected) > 1)
            for expected in all_expected
        ),
        key=len,
    )
    if faults:
        raise VerificationError(
            f"the weights do not match the model that the config describes: {'; '.join(faults[:5])}"
            + (f" and {len(faults) - 5} more" if len(faults) > 5 else "")
            + ". Is --hf-config the config of the model that was trained?"
        )


def _faults(
    expected: Mapping[str, Shape], have: Mapping[str, Shape], *, compares_kinds: bool
) -> list[str]:
    """Return the differences; joined and separate experts are compared by their elements."""
    kinds, kinds_there = _expert_kinds(expected), _expert_kinds(have)
    expected, expected_experts = _experts_apart(expected)
    have, have_experts = _experts_apart(have)
    faults = [f"missing {name}" for name in sorted(expected.keys() - have.keys())]
    faults += [f"unexpected {name}" for name in sorted(have.keys() - expected.keys())]
    faults += [
        f"{name}: shape {have[name]}, expected {expected[name]}"
        for name in sorted(expected.keys() & have.keys())
        if expected[name] != have[name]
    ]
    for name in sorted(expected_experts.keys() | have_experts.keys()):
        if expected_experts.get(name) != have_experts.get(name):
            faults.append(
                f"{name}: {have_experts.get(name, 0)} elements, expected "
                f"{expected_experts.get(name, 0)}"
            )
        elif compares_kinds and kinds.get(name) != kinds_there.get(name):
            faults.append(
                f"{name}: matrices {sorted(kinds_there.get(name, ()))}, expected "
                f"{sorted(kinds.get(name, ()))}"
            )
    return faults


def _expert_kinds(names: Iterable[str]) -> dict[str, set[str]]:
    """List expert matrices by name without numbers, for each expert module."""
    kinds: dict[str, set[str]] = {}
    for match in filter(None, map(_EXPERTS.fullmatch, names)):
        kinds.setdefault(match[1], set()).add(_NUMBER.sub("", match[2]))
    return kinds


def _experts_apart(shapes: Mapping[str, Shape]) -> tuple[dict[str, Shape], dict[str, int]]:
    plain: dict[str, Shape] = {}
    experts: dict[str, int] = {}
    for name, shape in shapes.items():
        match = _EXPERTS.fullmatch(name)
        if match:
            experts[match[1]] = experts.get(match[1], 0) + math.prod(shape)
        else:
            plain[name] = shape
    return plain, experts
