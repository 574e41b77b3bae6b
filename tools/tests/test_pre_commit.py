"""Test that the pre-commit hooks run the same commands as the steps `lint` and `layers`."""

from pathlib import Path

import yaml

from tools.steps import STEPS

ROOT = Path(__file__).resolve().parents[2]
HOOK_OF_COMMAND = {"-c from importlinter.cli import lint_imports_command as c; c()": "lint-imports"}


def _normalize(words: list[str]) -> str:
    """Return a command without its environment and without words that only one of the two needs."""
    kept = [word for word in words if word not in ("-m", ".", "--force-exclude")]
    return " ".join(kept).removeprefix(".temper/env/bin/").removeprefix("python ")


def test_every_command_of_lint_and_layers_is_a_hook() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {_normalize(hook["entry"].split()) for hook in repository["hooks"]}
    commands = [
        " ".join(command)
        for step in STEPS
        if step.name in ("lint", "layers")
        for command in step.commands
    ]
    assert {
        HOOK_OF_COMMAND.get(command) or _normalize(command.split()) for command in commands
    } == hooks
