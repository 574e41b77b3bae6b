"""The script that runs the commands of the page of GPU recipes reads them as they are there."""

from tools.gpu.page_commands import MODELS, PAGE, read_commands


def test_every_command_of_the_page_is_found_with_all_its_words() -> None:
    commands = read_commands()
    assert len(commands) == PAGE.read_text().count("\ntemper-train ")
    assert commands["one-gpu"][0] == "algorithm=grpo"
    assert commands["one-gpu"][-1] == "runtime.rollout_python=rollout-env/bin/python"
    for words in commands.values():
        assert all("=" in word for word in words)


def test_every_model_that_the_commands_name_has_a_shape() -> None:
    named = {
        word.partition("=")[2]
        for words in read_commands().values()
        for word in words
        if word.startswith("actor.engine.model.path=")
    }
    assert named == set(MODELS)
