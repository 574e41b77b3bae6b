"""Test that a page's commands are parsed like bash, and errors have the page's line numbers."""

from pathlib import Path

import pytest

from tools.command_rules import options_in, sessions
from tools.docs import check_blocks
from tools.page_commands import (
    MODULES,
    NOT_RUN,
    WITH_CHECKPOINTS,
    Command,
    check_commands,
    check_settings,
    fault_of,
    record,
)
from tools.pages import split_page

ROOT = Path(__file__).resolve().parents[2]


def test_bash_itself_reads_the_commands(tmp_path: Path) -> None:
    program = "\n\nSAME='a=1\n  b=2'\nX=1 temper-train $SAME 'c={d: 1}' \\\n   e=[f.jsonl] 2>&1 | tee log  # why\npython -m venv rollout-env\n"
    assert record(program, folder=tmp_path) == [
        Command(line=5, words=("temper-train", "a=1", "b=2", "c={d: 1}", "e=[f.jsonl]")),
        Command(line=6, words=("tee", "log")),
        Command(line=7, words=("python", "-m", "venv", "rollout-env")),
    ]


def test_an_open_quote_is_told(tmp_path: Path) -> None:
    assert (
        "unexpected EOF"
        in check_commands("temper-train 'a=1\n", page="page.md", code="", folder=tmp_path)[0]
    )


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (
            "temper-train experiment=quickstart algorithm.group_sise=4",
            "did you mean algorithm.group_size?",
        ),
        ("temper-train experiment=quickstart --chekc", "unrecognized arguments: --chekc"),
        (
            "temper-train algorithm=grpo actor.engine.model.path=elsewhere data.train.paths=[train.jsonl]",
            "no Hugging Face model in that folder",
        ),
        ("python3 tools/dev.py train run.sead=1", "run.seed"),
        ("python3 tools/dev.py test --only trainers", "trainers: no step"),
        ("temper-migrate script run_grpo.sh --tabel", "No such option: --tabel"),
        ("temper-migrate script missing.sh", "missing.sh"),
        ("temper-migrate checkpoint checkpoints/ --too hf", "No such option: --too"),
        ("python bench/bench_balance.py --jsn x", "--jsn: no such option"),
        ("python -m tools.gpu.engine_fdsp --out x", "there is no program tools/gpu/engine_fdsp"),
        (
            "pytest --pyargs temper_engine_api.conformance --engine fdsp",
            "no engine goes by the name 'fdsp'",
        ),
        (
            "pytest --pyargs temper_engine_api.conformance --engine fsdp --world-size 1",
            "--world-size: no such option",
        ),
        ("nox -s compatt", "noxfile.py has no session compatt"),
        ("pip install 'temper-trainer[fdsp]'", "temper-trainer has no extra fdsp"),
        ("pip install ./packages/engine", "is no package of ours"),
        ("ray submit x", "give it a rule"),
        ("curl https://example.org", "nothing checks such a command"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(command: str, fault: str, tmp_path: Path) -> None:
    (found,) = check_commands(f"\n{command}\n", page="docs/page.md", code="", folder=tmp_path)
    assert found.startswith("docs/page.md:2: `")
    assert fault in found


def test_what_was_translated_is_read_in_its_turn(tmp_path: Path) -> None:
    program = "temper-migrate script run_grpo.sh --out new/run.sh\nbash new/run.sh --check\nbash new/run.sh algorithm.group_sise=4\n"
    (found,) = check_commands(program, page="docs/page.md", code="", folder=tmp_path)
    assert found.startswith("docs/page.md:3: ")
    assert "did you mean algorithm.group_size?" in found


def test_a_page_about_checkpoints_has_one_on_which_its_commands_run(tmp_path: Path) -> None:
    program = "temper-migrate checkpoint checkpoints/ --check\ntemper-migrate checkpoint checkpoints/ --to peft --out adapter/\n"
    (found,) = check_commands(program, page=WITH_CHECKPOINTS[0], code="", folder=tmp_path)
    assert found.startswith(f"{WITH_CHECKPOINTS[0]}:2: ")
    assert "adapter" in found
    assert (
        tmp_path / "checkpoints" / "global_step_100" / "actor" / "optim_world_size_1_rank_0.pt"
    ).is_file()


def test_settings_are_composed(tmp_path: Path) -> None:
    assert check_settings("algorithm: {group_size: 4}", folder=tmp_path) == ""
    assert "did you mean algorithm.group_size?" in check_settings(
        "algorithm: {group_sise: 4}", folder=tmp_path
    )
    assert "override algorithm: ppo" in check_settings(
        "defaults: [temper, {algorithm: ppo}, _self_]", folder=tmp_path
    )


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ("```\nls\n```", "a block of no language"),
        ("```toml\na = \n```", "Invalid value"),
        ("```json\n{]\n```", "Expecting property name"),
    ],
)
def test_a_block_says_what_it_is_and_is_that(block: str, fault: str, tmp_path: Path) -> None:
    (found,) = check_blocks(
        tmp_path / "page.md", split_page(f"text\n\n{block}\n")[0], name="page.md", folder=tmp_path
    )
    assert found.startswith(f"{tmp_path}/page.md:3: ")
    assert fault in found


def test_the_tables_name_what_is_there(tmp_path: Path) -> None:
    assert [page for page in (*MODULES, *WITH_CHECKPOINTS) if not (ROOT / page).is_file()] == []
    assert all(fault_of((*known.split(), "x"), folder=tmp_path) == "" for known in NOT_RUN)
    assert {"compat", "docs", "nightly", "megatron-0.19"} <= sessions()
    assert {"--untried", "--verify"} <= options_in(ROOT / "tools" / "release.py")
