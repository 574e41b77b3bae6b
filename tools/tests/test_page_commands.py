"""Test that a page's commands are parsed like bash, and errors have the page's line numbers."""

from pathlib import Path

import pytest

from tools.command_rules import list_options, list_sessions
from tools.docs import check_blocks
from tools.page_commands import (
    NOT_RUN,
    PAGE_MODULES,
    PAGES_WITH_CHECKPOINTS,
    Command,
    check_command,
    check_commands,
    check_settings,
    record_commands,
)
from tools.pages import split_page

ROOT = Path(__file__).resolve().parents[2]


def test_commands_are_parsed_by_bash(tmp_path: Path) -> None:
    program = (
        "\n\nSAME='a=1\n  b=2'\n"
        "X=1 temper-train $SAME 'c={d: 1}' \\\n   e=[f.jsonl] 2>&1 | tee log  # why\n"
        "python -m venv rollout-env\n"
    )
    assert record_commands(program, folder=tmp_path) == [
        Command(line=5, words=("temper-train", "a=1", "b=2", "c={d: 1}", "e=[f.jsonl]")),
        Command(line=6, words=("tee", "log")),
        Command(line=7, words=("python", "-m", "venv", "rollout-env")),
    ]


def test_open_quote_is_reported(tmp_path: Path) -> None:
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
            (
                "temper-train algorithm=grpo actor.engine.model.path=elsewhere "
                "data.train.paths=[train.jsonl]"
            ),
            "no Hugging Face model in that folder",
        ),
        ("python3 tools/dev.py train run.sead=1", "run.seed"),
        ("python3 tools/dev.py test --only trainers", "trainers: no such step"),
        ("temper-migrate script run_grpo.sh --tabel", "No such option: --tabel"),
        ("temper-migrate script missing.sh", "missing.sh"),
        ("temper-migrate checkpoint checkpoints/ --too hf", "No such option: --too"),
        ("python bench/bench_balance.py --jsn x", "--jsn: no such option"),
        (
            "python -m tools.gpu.engine_fdsp --out x",
            "this repository has no program tools/gpu/engine_fdsp",
        ),
        (
            "pytest --pyargs temper_engine_api.conformance --engine fdsp",
            "there is no engine 'fdsp'",
        ),
        (
            "pytest --pyargs temper_engine_api.conformance --engine fsdp --world-size 1",
            "--world-size: no such option",
        ),
        ("nox -s compatt", "noxfile.py has no session compatt"),
        ("pip install './packages/trainer[fdsp]'", "temper-trainer has no extra fdsp"),
        ("pip install 'temper-trainer[fsdp]'", "not on a package index: write ./packages/trainer"),
        ("pip install ./packages/engine", "is not a package of this repository"),
        ("pip wheel -w wheels ./packages/engine", "is not a package of this repository"),
        ("ray submit x", "add another one"),
        ("curl https://example.org", "no rule checks this command"),
    ],
)
def test_wrong_command_is_reported(command: str, fault: str, tmp_path: Path) -> None:
    (message,) = check_commands(f"\n{command}\n", page="docs/page.md", code="", folder=tmp_path)
    assert message.startswith("docs/page.md:2: `")
    assert fault in message


def test_translated_script_is_checked_too(tmp_path: Path) -> None:
    program = (
        "temper-migrate script run_grpo.sh --out new/run.sh\n"
        "bash new/run.sh --check\n"
        "bash new/run.sh algorithm.group_sise=4\n"
    )
    (message,) = check_commands(program, page="docs/page.md", code="", folder=tmp_path)
    assert message.startswith("docs/page.md:3: ")
    assert "did you mean algorithm.group_size?" in message


# Nightly: the step `docs` runs the commands of such a page every day.
@pytest.mark.nightly
def test_commands_about_checkpoints_run_on_a_real_one(tmp_path: Path) -> None:
    program = (
        "temper-migrate checkpoint checkpoints/ --check\n"
        "temper-migrate checkpoint checkpoints/ --to peft --out adapter/\n"
    )
    (message,) = check_commands(program, page=PAGES_WITH_CHECKPOINTS[0], code="", folder=tmp_path)
    assert message.startswith(f"{PAGES_WITH_CHECKPOINTS[0]}:2: ")
    assert "adapter" in message
    assert (
        tmp_path / "checkpoints" / "global_step_100" / "actor" / "optim_world_size_1_rank_0.pt"
    ).is_file()


def test_yaml_settings_are_composed(tmp_path: Path) -> None:
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
        ("```\nls\n```", "the block's language is missing"),
        ("```toml\na = \n```", "Invalid value"),
        ("```json\n{]\n```", "Expecting property name"),
    ],
)
def test_block_with_wrong_language_or_syntax_is_reported(
    block: str, fault: str, tmp_path: Path
) -> None:
    (message,) = check_blocks(
        tmp_path / "page.md", split_page(f"text\n\n{block}\n")[0], name="page.md", folder=tmp_path
    )
    assert message.startswith(f"{tmp_path}/page.md:3: ")
    assert fault in message


def test_tables_refer_to_existing_pages_and_options(tmp_path: Path) -> None:
    assert [
        page for page in (*PAGE_MODULES, *PAGES_WITH_CHECKPOINTS) if not (ROOT / page).is_file()
    ] == []
    assert all(check_command((*known.split(), "x"), folder=tmp_path) == "" for known in NOT_RUN)
    assert {"compat", "docs", "nightly", "megatron-0.19"} <= list_sessions()
    assert {"--untried", "--verify"} <= list_options(ROOT / "tools" / "release.py")
