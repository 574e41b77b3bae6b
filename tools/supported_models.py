"""Render the first table of docs/models.md: what each family of models can be used for.

`tools/family_table.py` writes the table, and `tools/docs.py` checks it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temper_engine_api.conformance.inputs.tiny_models import LANGUAGE_MODELS, QWEN3, with_experts
from temper_engine_megatron.bridge_compat.bridge_translation import TESTED_MODEL_TYPES

ROWS = Path("docs/records/supported_models.toml")
CATALOGUE = Path("docs/benchmarks/models.md")
ENGINE_NAMES = {"fsdp": "FSDP", "megatron": "Megatron"}
LORA_TEST = "test_family_adapter_matches_oracle"
EXPORT_TEST = "test_exported_family_loads_in_transformers"
KIT_TYPES = frozenset(
    str(model.architecture["model_type"]) for model in (*LANGUAGE_MODELS, with_experts(QWEN3))
)
"""Types of the models in the kit's other tests, which both engines pass in each release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table as `docs/records/supported_models.toml` has it."""

    name: str
    types: Sequence[str]
    fsdp: str = ""
    megatron: str = ""
    vllm: str = ""
    gpu: Sequence[str] = field(default_factory=tuple)
    gpu_page: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Results of the checks, by model type."""

    correct: Collection[str]
    """Types that FSDPEngine computes as transformers does."""
    passed: Mapping[str, Mapping[str, Collection[str]]]
    """Engines that passed a test of the kit without a failure, by test and type."""
    vllm: Mapping[str, Mapping[str, Any]]


def read_rows(root: Path) -> list[Row]:
    """Read the rows of the table."""
    return [Row(**fields) for fields in tomllib.loads((root / ROWS).read_text())["rows"]]


def read_correct_types(root: Path) -> frozenset[str]:
    """Read which of transformers' causal models FSDPEngine computes correctly.

    Raises:
        ValueError: If the page of the catalogue has no list of them.
    """
    text = (root / CATALOGUE).read_text()
    heading = re.search(r"^## Correct \((\d+)\)\n\n(.*?)\.\n", text, re.DOTALL | re.MULTILINE)
    types = frozenset(re.split(r",\s+", heading[2]) if heading else ())
    if heading is None or len(types) != int(heading[1]):
        raise ValueError(f"{CATALOGUE} needs a heading 'Correct (N)' and N types below it.")
    return types


def render_table(rows: Sequence[Row], records: Records) -> Iterator[str]:
    """Yield the lines of the table."""
    yield (
        "| family | `model_engine=fsdp` | `model_engine=megatron` | LoRA compared with PEFT "
        "| export loads in transformers | vLLM | ran on |"
    )
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        fsdp = _format_fsdp(row, records)
        cells = (
            row.name,
            fsdp,
            _format_megatron(row),
            _format_engines(_find_engines(row, records, test=LORA_TEST)),
            _format_engines(_find_engines(row, records, test=EXPORT_TEST)),
            _format_vllm(row, records, is_supported=fsdp.startswith("yes")),
            _format_devices(row, is_supported=fsdp.startswith("yes")),
        )
        yield f"| {' | '.join(cells)} |"


def _format_fsdp(row: Row, records: Records) -> str:
    tested = records.passed.get(EXPORT_TEST, {})
    correct = {*records.correct, *(name for name in tested if "fsdp" in tested[name])}
    verdicts = {name in correct for name in row.types} or {False}
    return _format_verdict(row, verdicts, note=row.fsdp)


def _format_megatron(row: Row) -> str:
    verdicts = {name in TESTED_MODEL_TYPES for name in row.types} or {False}
    if row.megatron and verdicts == {False}:
        return row.megatron
    return _format_verdict(row, verdicts, note=row.megatron)


def _format_verdict(row: Row, verdicts: Collection[bool], *, note: str) -> str:
    """Return yes or no with a note.

    Raises:
        ValueError: If it is different for the types of the row.
    """
    if len(verdicts) > 1:
        raise ValueError(f"{ROWS}: an engine supports some types of {row.name!r} only: divide it.")
    if True in verdicts:
        return f"yes, {note}" if note else "yes"
    return f"no: {note}" if note else "no"


def _find_engines(row: Row, records: Records, *, test: str) -> list[str]:
    """Return the engines that passed a test for all types of a row."""
    results = records.passed.get(test, {})
    return [
        engine
        for engine in ENGINE_NAMES
        if row.types
        and all(name in KIT_TYPES or engine in results.get(name, ()) for name in row.types)
    ]


def _format_engines(engines: Sequence[str]) -> str:
    if len(engines) == len(ENGINE_NAMES):
        return "both"
    return " and ".join(ENGINE_NAMES[engine] for engine in engines) or "-"


def _format_vllm(row: Row, records: Records, *, is_supported: bool) -> str:
    """Return what was tested with vLLM.

    Raises:
        ValueError: If vLLM does not load an export, and the row does not say so.
    """
    if not is_supported:
        return "-"
    if row.vllm:
        return row.vllm
    results = [records.vllm[name] for name in row.types if name in records.vllm]
    if any("difference" not in result for result in results):
        raise ValueError(f"{ROWS}: vLLM does not load a model of {row.name!r}: add vllm with that.")
    return "export" if len(results) == len(row.types) else "not tested"


def _format_devices(row: Row, *, is_supported: bool) -> str:
    if not is_supported:
        return "-"
    if not row.gpu:
        return "CPU"
    return f"CPU, GPU ([{_format_engines(row.gpu)}]({row.gpu_page}))"
