"""Fuzzed small files around the weights.

a conversion, or our own error, and nothing written next to the output.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from old_files import write_fsdp
from typer.testing import CliRunner

from temper_legacy_shim.checkpoints import (
    Options,
    Sources,
    check_receipt,
    convert,
    plan_jobs,
    read_receipt,
)
from temper_legacy_shim.checkpoints.receipt import NAME
from temper_legacy_shim.cli import app
from temper_legacy_shim.errors import OutputError, ShimError, UsageError

EVERYDAY, NIGHTLY = 150, 3000
"""Mutated files."""
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "tie_word_embeddings": False,
    "_name_or_path": "base",
}
ADAPTER = {
    "r": 2,
    "lora_alpha": 4,
    "alpha_pattern": {"w": 8},
    "rank_pattern": {},
    "use_rslora": False,
    "target_modules": ["w"],
}
_INNER = "base_model.model.model"
_NUMBERS = (True, -1, 0, 0.5, 1e308, 10**400, float("nan"), float("inf"))
_ODD = st.sampled_from(
    [
        *_NUMBERS,
        None,
        "",
        "x" * 5000,
        "../../x",
        "a\0b",
        "\ud800",
        [],
        [1],
        [[]],
        {},
        {"a": 1},
        {"weight_map": {"w": "../x"}},
    ]
)


def _write_run(folder: Path) -> None:
    """Write a run of one step and two ranks with an adapter, and all files around it."""
    step = folder / "global_step_3"
    shapes = {
        "w.base_layer.weight": (4, 4),
        "w.lora_A.default.weight": (2, 4),
        "w.lora_B.default.weight": (4, 2),
    }
    write_fsdp(
        step / "actor", {f"{_INNER}.{name}": torch.ones(shape) for name, shape in shapes.items()}
    )
    files: dict[str, object] = {
        "actor/huggingface/config.json": CONFIG,
        "actor/huggingface/tokenizer.json": {"version": "1.0", "model": {"vocab": {"a": 0}}},
        "actor/huggingface/generation_config.json": {"eos_token_id": 1},
        "actor/lora_adapter/adapter_config.json": ADAPTER,
        "actor/fsdp_config.json": {"FSDP_version": 2, "world_size": 2},
        "lora_train_meta.json": {"r": 2, "lora_alpha": 4},
    }
    for name, content in files.items():
        (step / name).parent.mkdir(exist_ok=True)
        (step / name).write_text(json.dumps(content))
    (folder / "latest_checkpointed_iteration.txt").write_text("3")


def _positions(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys."""
    for key in (
        tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    ):
        yield tree, key
        yield from _positions(tree[key])


def _with(content: bytes, at: float, value: object) -> bytes:
    """Return a JSON text with an odd value somewhere, or in place of everything."""
    tree = json.loads(content)
    positions = [None, *_positions(tree)]
    position = positions[int(at * (len(positions) - 1))]
    if position is None:
        return json.dumps(value).encode()
    position[0][position[1]] = value
    return json.dumps(tree).encode()


def _cut(content: bytes, at: float, value: object) -> bytes:
    """Return the other bytes somewhere."""
    begin = int(at * len(content))
    return content[:begin] + repr(value).encode("utf-8", "replace")[:20] + content[begin + 3 :]


def _convert(folder: Path, out: Path, target: str) -> None:
    (job,) = plan_jobs(folder, out)
    convert(job, Options(target=target, checks_names=False), Sources())  # type: ignore[arg-type]
    check_receipt(out, read_receipt(out))


def _fuzz(root: Path, *, examples: int) -> None:
    """Mutate the input before an output exists, and the receipt after it."""
    run, out = root / "run", root / "out"
    _write_run(run)
    originals = {
        path: path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.suffix in (".json", ".txt")
    }
    assert len(originals) == 7
    before = sorted(root.rglob("*"))

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    @given(
        index=st.integers(0, len(originals)),
        at=st.floats(0, 1),
        value=_ODD,
        mutate=st.sampled_from([_with, _with, _cut]),
        target=st.sampled_from(["hf", "peft"]),
    )
    def _one(index: int, at: float, value: object, mutate: Any, target: str) -> None:
        path = [*originals, out / NAME][index]
        try:
            if path in originals:
                path.write_bytes(mutate(originals[path], at, value))
                _convert(run, out, target)
            else:
                _convert(run, out, target)
                path.write_bytes(mutate(path.read_bytes(), at, value))
                check_receipt(out, read_receipt(out))
        except ShimError:
            return
        finally:
            if path in originals:
                path.write_bytes(originals[path])
            shutil.rmtree(out, ignore_errors=True)
            assert sorted(root.rglob("*")) == before

    _one()


def test_mutated_companions_and_receipts_raise_our_own_error_or_none(tmp_path: Path) -> None:
    _fuzz(tmp_path, examples=EVERYDAY)


# Nightly: takes minutes. The test above draws fewer files every day.
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_thousands_of_mutated_companions_and_receipts_raise_our_own_error_or_none(
    tmp_path: Path,
) -> None:
    _fuzz(tmp_path, examples=NIGHTLY)


def test_a_model_type_that_is_no_text_binds_nothing(tmp_path: Path) -> None:
    _write_run(tmp_path / "run")
    actor = tmp_path / "run/global_step_3/actor"
    write_fsdp(
        actor, {"model.embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": torch.ones(4, 2)}
    )
    (actor / "huggingface/config.json").write_text(json.dumps({"model_type": [1]}))
    _convert(tmp_path / "run", tmp_path / "out", "hf")
    assert read_receipt(tmp_path / "out").num_tensors == 2


@pytest.mark.parametrize("alpha", [10**400, 1e308, 1e-300, True, [4], "4"])
def test_an_alpha_that_is_no_float_is_requested(tmp_path: Path, alpha: object) -> None:
    _write_run(tmp_path / "run")
    step = tmp_path / "run/global_step_3"
    (step / "actor/lora_adapter/adapter_config.json").write_text(
        json.dumps({**ADAPTER, "lora_alpha": alpha})
    )
    (step / "lora_train_meta.json").unlink()
    with pytest.raises(UsageError, match="give --lora-alpha"):
        _convert(tmp_path / "run", tmp_path / "out", "hf")


def test_a_name_that_no_disk_takes_is_an_error_of_the_shim(tmp_path: Path) -> None:
    _write_run(tmp_path / "run")
    long = tmp_path / ("x" * 300)
    with pytest.raises(OutputError, match="File name too long"):
        _convert(tmp_path / "run", long, "hf")
    for command in (["verify", str(long)], ["checkpoint", str(long), "--check"]):
        assert isinstance(CliRunner().invoke(app, command).exception, ShimError)
