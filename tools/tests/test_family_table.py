"""Test the table of families in docs/models.md, from the kit's results to the check of the page."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.tiny_models import has_experts
from temper_engine_api.conformance.results import ConformanceResult, ConformanceRun, Outcome
from temper_engine_api.vision_language import VISION_LANGUAGE_TYPES
from temper_engine_megatron.bridge_compat import TESTED_MODEL_TYPES
from tools.family_table import (
    COLUMNS,
    PAGE,
    RECORD,
    ROOT,
    VLLM_RECORD,
    FamilyRun,
    add_families,
    find_faults,
    read_record,
    summarize,
    update_page,
)
from tools.steps import HYBRID_FAMILIES
from tools.supported_models import (
    CATALOGUE,
    EXPORT_TEST,
    LORA_TEST,
    ROWS,
    Records,
    Row,
    read_rows,
    render_table,
)

OUTPUTS, GRADIENTS, *_ = COLUMNS
NOTHING_IN_VLLM: dict[str, Any] = {"versions": {}, "families": {}}


def make_run(*, num_waiting: int = 0, compute: str = "fp32") -> ConformanceRun:
    """Return a run on one rank: outputs passed for two families, and a gradient failed for one."""
    outcomes = {
        (OUTPUTS, "mixtral"): Outcome.PASSED,
        (OUTPUTS, "cohere"): Outcome.PASSED,
        (GRADIENTS, "mixtral"): Outcome.FAILED,
    }
    return ConformanceRun(
        engine="e",
        layouts=("1-rank",),
        versions={},
        compute=compute,
        num_waiting=num_waiting,
        results=[
            ConformanceResult(
                test=f"{test}[1-rank-{family}]", group="family", layout="1-rank", outcome=outcome
            )
            for (test, family), outcome in outcomes.items()
        ],
    )


def test_page_has_the_table_of_the_record() -> None:
    assert find_faults(ROOT) == []


def test_page_with_another_number_than_the_record_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / RECORD).parent.mkdir(parents=True)
    (tmp_path / CATALOGUE).parent.mkdir()
    for record in (RECORD, VLLM_RECORD, ROWS, CATALOGUE):
        (tmp_path / record).write_text((ROOT / record).read_text())
    page = (ROOT / PAGE).read_text()
    (tmp_path / PAGE).write_text(
        page.replace("| mixtral | fsdp, fp32 | ", "| mixtral | fsdp, fp32 | 1")
    )
    (fault,) = find_faults(tmp_path)
    assert "are not those of docs/records/families.json" in fault


def test_record_has_every_family_in_all_tests_in_float32() -> None:
    (run,) = (run for run in read_record(ROOT) if (run.engine, run.compute) == ("fsdp", "fp32"))
    assert not run.failed
    assert run.passed == {
        family: dict.fromkeys(COLUMNS, sum(is_run_in(layout, family) for layout in run.layouts))
        for family in sorted(FAMILIES)
    }


def is_run_in(layout: str, family: str) -> bool:
    """Return False for dense models if experts are divided, and for hybrids if sequences are."""
    is_hybrid = any(name in family for name in HYBRID_FAMILIES.split(" or "))
    return (has_experts(FAMILIES[family]) or not layout.startswith("ep")) and not (
        is_hybrid and "sp" in layout
    )


def test_table_shows_tolerances_and_failures() -> None:
    page = update_page((ROOT / PAGE).read_text(), [summarize(make_run())], NOTHING_IN_VLLM)
    assert "| mixtral | e, fp32 | 1 | 3e-6 | failed in 1-rank | - | - | - | - |\n" in page
    assert "| cohere | e, fp32 | 1 | 3e-6 | - | - | - | - | - |\n" in page
    assert "| gemma2 | e, fp32 |" not in page
    assert "--families mixtral,cohere --thorough" in page


def test_exports_in_vllm_show_the_difference_or_the_error() -> None:
    common = {"engines": ["fsdp", "megatron"], "dtype": "float32"}
    families = {
        "mixtral": {**common, "difference": 2.34e-6},
        "cohere": {**common, "error": "ValueError: no kernel"},
        "gpt_oss": {**common, "dtype": "bfloat16", "difference": 0.34, "rounding": 0.21},
    }
    record = {"versions": {"vllm": "0.27.1"}, "families": families}
    page = update_page((ROOT / PAGE).read_text(), [], record)
    assert "| mixtral | fsdp, megatron | float32 | 2e-6 |\n" in page
    assert "| cohere | fsdp, megatron | float32 | no: ValueError: no kernel |\n" in page
    rounding = "0.3; transformers in bfloat16: 0.2"
    assert f"| gpt_oss | fsdp, megatron | bfloat16 | {rounding} |\n" in page
    assert "| gemma2 | fsdp |" not in page


def test_test_that_always_runs_in_float32_does_not_count_as_bf16() -> None:
    page = update_page(
        (ROOT / PAGE).read_text(), [summarize(make_run(compute="bf16"))], NOTHING_IN_VLLM
    )
    assert "| mixtral | e, bf16 | 1 | 0.05 | - | - | - | - | - |\n" in page


def test_results_of_other_groups_have_no_column() -> None:
    run = make_run()
    other = ConformanceResult(
        test="test_adapter_in_family_experts_is_applied_and_merged[1-rank-mixtral]",
        group="expert_adapter",
        layout="1-rank",
        outcome=Outcome.PASSED,
    )
    assert summarize(replace(run, results=[*run.results, other])) == summarize(run)


def test_families_without_sequence_parallelism_are_those_whose_layers_have_a_state() -> None:
    with_state = {"linear_num_value_heads", "mamba_num_heads"}
    for family, model in FAMILIES.items():
        assert is_run_in("sp2.2", family) != bool(with_state & model.architecture.keys()), family


def test_stopped_run_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tests did not run"):
        summarize(make_run(num_waiting=2))


def make_family_run(*, families: Mapping[str, int], layouts: str = "a,b") -> FamilyRun:
    """Return a run in which the test of outputs passed; `families` gives numbers of layouts."""
    return FamilyRun(
        engine="e",
        compute="fp32",
        layouts=tuple(layouts.split(",")),
        versions={"torch": "2.13"},
        failed={},
        passed={family: {OUTPUTS: number} for family, number in families.items()},
    )


def test_families_that_a_new_run_lacks_are_kept() -> None:
    old = make_family_run(families={"mixtral": 1, "cohere": 2}, layouts="b,a")
    new = make_family_run(families={"mixtral": 2, "gpt_oss": 2})
    expected = make_family_run(families={"cohere": 2, "mixtral": 2, "gpt_oss": 2})
    assert add_families(old, new) == expected


def test_failure_of_a_new_run_replaces_the_family() -> None:
    old = make_family_run(families={"mixtral": 2})
    new = replace(make_family_run(families={}), failed={"mixtral": {OUTPUTS: ["a"]}})
    assert add_families(old, new) == new


def test_results_in_other_layouts_are_added() -> None:
    old = replace(
        make_family_run(families={"mixtral": 1, "cohere": 2}),
        failed={"mixtral": {OUTPUTS: ["b"]}},
    )
    new = replace(
        make_family_run(families={"mixtral": 1, "gpt_oss": 1}, layouts="c,d"),
        failed={"mixtral": {OUTPUTS: ["d"]}},
    )
    expected = replace(
        make_family_run(families={"mixtral": 2, "cohere": 2, "gpt_oss": 1}, layouts="a,b,c,d"),
        failed={"mixtral": {OUTPUTS: ["b", "d"]}},
    )
    assert add_families(old, new) == expected


@pytest.mark.parametrize("change", [{"layouts": ("a",)}, {"versions": {"torch": "2.12"}}])
def test_families_of_other_layouts_or_versions_are_dropped(change: dict[str, Any]) -> None:
    old = replace(make_family_run(families={"mixtral": 1, "cohere": 1}), **change)
    new = make_family_run(families={"mixtral": 2})
    assert add_families(old, new) == new


def test_page_without_its_comments_is_refused() -> None:
    with pytest.raises(ValueError, match="the page needs the lines"):
        update_page("# A page\n", [], NOTHING_IN_VLLM)


def test_first_table_has_one_row_for_each_tested_type() -> None:
    types = [name for row in read_rows(ROOT) for name in row.types]
    assert len(types) == len(set(types))
    assert {*FAMILIES, *TESTED_MODEL_TYPES, *VISION_LANGUAGE_TYPES} <= set(types)


def test_rows_of_families_whose_layers_have_a_state_exclude_sequence_parallelism() -> None:
    hybrids = HYBRID_FAMILIES.split(" or ")
    for row in read_rows(ROOT):
        if any(hybrid in name for hybrid in hybrids for name in row.types):
            assert row.fsdp == "without sequence parallelism"


RECORDS = Records(
    correct={"olmo", "cohere"},
    passed={LORA_TEST: {"mixtral": {"fsdp"}}, EXPORT_TEST: {"mixtral": {"fsdp", "megatron"}}},
    vllm={"mixtral": {"difference": 1e-6}, "cohere": {"error": "no kernel"}},
)


def test_first_table_shows_what_the_records_have() -> None:
    rows = [
        Row(name="A", types=["mixtral"], gpu=["fsdp"], gpu_page="p.md"),
        Row(name="B", types=["olmo"], fsdp="with two ranks", megatron="slowly"),
        Row(name="C", types=["jamba"], fsdp="sparse", gpu=["fsdp"], gpu_page="p.md"),
    ]
    assert list(render_table(rows, RECORDS))[2:] == [
        "| A | yes | yes | FSDP | both | export | CPU, GPU ([FSDP](p.md)) |",
        "| B | yes, with two ranks | slowly | - | - | not tested | CPU |",
        "| C | no: sparse | no | - | - | - | - |",
    ]


@pytest.mark.parametrize(
    ("types", "sentence"),
    [
        (["olmo", "jamba"], "supports some types of 'A' only"),
        (["cohere"], "vLLM does not load a model of 'A'"),
    ],
)
def test_row_that_the_records_do_not_support_is_refused(types: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        list(render_table([Row(name="A", types=types)], RECORDS))
