"""Write a run that was killed before it saved its second step: `trainer_run.py FOLDER`."""

import json
import os
import shutil
import sys
from pathlib import Path

from temper_trainer.config_loading import load, write_resolved
from temper_trainer.loops import train

OVERRIDES = (
    "experiment=quickstart",
    "warm_start=null",
    "data.train.max_rows=16",
    "data.eval=null",
    "actor.engine.model.architecture.hidden_size=16",
    "actor.engine.model.architecture.intermediate_size=32",
    "actor.engine.model.architecture.num_hidden_layers=1",
    "batching.prompts_per_step=4",
    "algorithm.group_size=4",
    "run.total_steps=2",
    "run.save_every=1",
    "run.save_model=false",
    "run.table_every=0",
    "run.num_threads=1",
    "reward.function=temper_trainer_test_rewards:share_of_digits",
)
"""Overrides of the run; a later version resumes it with the same ones."""

REWARDS = Path(__file__).resolve().parents[2] / "packages" / "trainer" / "tests" / "loops"
"""Folder of a user-defined reward that gives even an untrained model different rewards."""

KEPT = ("checkpoints", "metrics.jsonl", "tokenizer")
"""Files that resuming reads."""


def main(folder: Path) -> None:
    """Write FOLDER/run and FOLDER/overrides.json."""
    sys.path.insert(0, str(REWARDS))
    folder.mkdir(parents=True)
    os.chdir(folder)  # keeps absolute paths of this host out of the files
    loaded = load([*OVERRIDES, "run.dir=run"])
    train(loaded.config, digest=loaded.digest, write_config=lambda run: write_resolved(loaded, run))
    Path("overrides.json").write_text(json.dumps(OVERRIDES, indent=1) + "\n")
    # Deleting the last checkpoint leaves the run as if it had been killed before saving it.
    shutil.rmtree("run/checkpoints/step_00000002")
    for path in Path("run").iterdir():
        if path.name not in KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
