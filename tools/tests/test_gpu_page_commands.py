"""The script that runs the commands of the page of GPU recipes reads them as they are there."""

from pathlib import Path

import pytest

from tools.gpu.gpu_page_commands import (
    MODELS,
    PAGE,
    ROOT,
    get_setting,
    read_commands,
    summarize_memory,
)

PAGES = (PAGE, "README.md")


def test_every_command_of_the_page_is_found_with_all_its_words() -> None:
    commands = read_commands()
    assert len(commands) == (ROOT / PAGE).read_text().count("\ntemper-train ")
    assert commands["one-gpu"][0] == "algorithm=grpo"
    assert commands["one-gpu"][-1] == "runtime.rollout_python=rollout-env/bin/python"


def test_commands_with_vllm_are_found_between_the_others_of_the_readme() -> None:
    commands = read_commands("README.md")
    assert list(commands) == ["one-gpu", "eight-gpus"]
    assert commands["one-gpu"][-1] == "rollout.vllm.gpu_memory_utilization=0.5"


@pytest.mark.parametrize("page", PAGES)
def test_commands_consist_of_settings_of_models_with_a_shape(page: str) -> None:
    for words in read_commands(page).values():
        assert all("=" in word for word in words)
        assert get_setting(words, "actor.engine.model.path").rpartition("/")[2] in MODELS


def test_first_and_largest_memory_is_found_for_each_gpu(tmp_path: Path) -> None:
    log = tmp_path / "gpus.csv"
    log.write_text("0, 510\n1, 4\n0, 90000\n1, 7\n0, 600\n0, 9")
    assert summarize_memory(log) == {"0": [510, 90000], "1": [4, 7]}
