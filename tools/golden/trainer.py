"""Write the resolved configuration of every shipped experiment: `trainer.py FOLDER`."""

import sys
from pathlib import Path

import temper_trainer
from temper_trainer.config_loading import load, write_resolved

GIVEN_BY_USERS = {
    "gsm8k_sft": ("data.train.paths=[train.jsonl]",),
    "gsm8k_grpo": ("data.train.paths=[train.jsonl]", "data.eval.paths=[test.jsonl]"),
    "gsm8k_ppo": ("data.train.paths=[train.jsonl]", "data.eval.paths=[test.jsonl]"),
}
"""Overrides for settings that an experiment leaves to its user, such as data files."""


def main(folder: Path) -> None:
    """Write FOLDER/EXPERIMENT/config.yaml."""
    experiments = Path(temper_trainer.__path__[0]) / "conf" / "experiment"
    for name in sorted(path.stem for path in experiments.glob("*.yaml")):
        write_resolved(load([f"experiment={name}", *GIVEN_BY_USERS.get(name, ())]), folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
