"""Helpers of the old scoring modules.

The expected values were written down from what verl 0.4.1 returns.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from temper_legacy_shim import old_paths, old_scores
from temper_legacy_shim.errors import UsageError
from temper_legacy_shim.imports.codemod import change_imports
from temper_legacy_shim.old_rewards import from_file


@pytest.fixture
def without_old_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in old_paths.MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    old_paths.uninstall()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{1} then \boxed{2}", r"\boxed{2}"),
        (r"\boxed 3$ end", r"\boxed 3"),
        (r"\fbox{4}", r"\fbox{4}"),
        (r"\boxed{5", None),
        ("6", None),
    ],
)
def test_last_box_is_found_with_its_braces(text: str, expected: str | None) -> None:
    assert old_scores.last_boxed_only_string(text) == expected


def test_box_is_removed() -> None:
    assert old_scores.remove_boxed(r"\boxed{\sqrt{2}}") == r"\sqrt{2}"
    assert old_scores.remove_boxed(r"\boxed 3") == "3"
    with pytest.raises(AssertionError):
        old_scores.remove_boxed(r"\fbox{4}")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"x = \dfrac12", r"\frac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (".25", "0.25"),
        ("3/4", r"\frac{3}{4}"),
        ("3/04", "3/04"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\sqrt2 + \sqrt{3}", r"\sqrt{2}+\sqrt{3}"),
        (r"12\text{ cm}", "12"),
        (r"50\%", "50"),
        (r"30^\circ", "30"),
    ],
)
def test_answers_are_stripped_for_the_comparison(answer: str, expected: str) -> None:
    assert old_scores.strip_string(answer) == expected


def test_completions_are_scored_by_box_and_by_mark() -> None:
    assert old_scores.math_score(r"\boxed{\tfrac{1}{2}}", "0.5") == 1.0
    assert old_scores.math_score("0.5", "0.5") == 0.0
    assert old_scores.gsm8k_score("#### 1,042", "1042") == 1.0
    assert old_scores.gsm8k_score("#### 7", "8", format_score=0.1) == 0.1
    assert old_scores.extract_solution("2 and 3.", "flexible") == "3."
    assert old_scores.default_compute_score("openai/gsm8k", "#### 8", "8", None) == 1.0
    with pytest.raises(UsageError, match="sandbox_fusion_url"):
        old_scores.default_compute_score(
            "codecontests", "", "", sandbox_fusion_url="http://sandbox"
        )


@pytest.mark.usefixtures("without_old_package")
def test_reward_file_with_old_helpers_scores_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "from verl.utils.reward_score import gsm8k, math\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    box = math.last_boxed_only_string(solution_str)\n"
        "    return 0.5 if box is None else float(math.is_equiv(math.remove_boxed(box), "
        "ground_truth))\n"
    )
    prompt = SimpleNamespace(text="", answer="1/2", extra={})
    assert from_file(prompt, r"\boxed{0.5}", path=str(path)) == 1.0
    assert from_file(prompt, "no box", path=str(path)) == 0.5


@pytest.mark.usefixtures("without_old_package")
@pytest.mark.parametrize("line", ["from verl.utils.reward_score.math_verify import compute_score"])
def test_reward_file_with_a_name_that_is_not_here_says_what_to_do(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / f"reward_{len(line)}.py"
    path.write_text(f"{line}\ndef compute_score(**_): return 0.0\n")
    with pytest.raises(
        UsageError, match=r"can't be imported \(No module named 'verl.utils.*'\): (use|copy|there)"
    ):
        from_file(SimpleNamespace(text="", answer="", extra={}), "", path=str(path))


def test_imports_of_helpers_are_changed_and_leave_nothing_to_do() -> None:
    text = (
        "from verl.utils.reward_score import default_compute_score, math\n"
        "from verl.utils.reward_score.gsm8k import compute_score\n"
        "a = math.remove_boxed(math.last_boxed_only_string(b)), compute_score(c, d), "
        "default_compute_score(e, f, g)\n"
    )
    changed = change_imports(text.encode(), keeps_legacy=False)
    assert not [remark for remark in changed.remarks if remark.what_to_do]
    assert b"verl" not in changed.content
    assert json.dumps(changed.content.decode()).count("temper_legacy_shim.old_scores") >= 1
    compile(changed.content, "reward.py", "exec")
