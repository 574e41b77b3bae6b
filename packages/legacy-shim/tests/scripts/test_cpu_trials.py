"""Translate drawn third-party scripts with ``--cpu-trial``, and train what bash passes on."""

import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("temper_trainer", reason="needs temper-trainer and its engines")
pytest.importorskip("hydra", reason="needs Hydra, which temper-trainer brings")

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
from configs.checking import put_files, run
from corpus import drawn_scripts
from hydra.core.override_parser.overrides_parser import OverridesParser
from pyarrow import parquet
from test_drawn_scripts import launched_commands
from test_forks import outcome_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from temper_legacy_shim.configs.reading.config_values import Plain
from temper_legacy_shim.scripts.launch_translation import Options
from temper_legacy_shim.scripts.migrate import migrate_script
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.data.tokenizer import build_tokenizer

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model directory whose tokenizer knows the words of the placed data."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(
        TokenizerConfig(kind="word_level"),
        model_path=None,
        texts=["user assistant system 1 2 3 4 5 6 7 8 9 0"],
        directory=folder / "tokenizer",
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def put_project(argv: tuple[str, ...], folder: Path, model: Path) -> list[str]:
    """Put files that can be trained on where the arguments lead, and return further arguments."""
    values: dict[str, Plain] = {}
    for word in argv:
        override = OverridesParser.create().parse_override(word)
        values[override.key_or_group] = override.value()
    moved = put_files(values, folder)
    for text in moved:
        key, _, position = text.partition("=")
        if key.endswith(".model.path") or key == "data.tokenizer.path":
            shutil.copytree(model, folder / position.strip("'\""), dirs_exist_ok=True)
    # A check reads one row, but a step of a run takes several.
    for path in folder.rglob("*"):
        if path.is_file() and path.read_bytes()[:4] == b"PAR1":
            rows = parquet.read_table(path).to_pylist()
            parquet.write_table(pa.Table.from_pylist(rows * 16), path)
    return moved


def trial_commands() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the first launch of each repository that needs no answer, as bash passes it on."""
    done = set()
    for name, path in drawn_scripts():
        repository = name.split(" ")[0]
        text = path.read_text(errors="surrogateescape")
        migration = migrate_script(text, folder=path.parent, options=Options(cpu_trial=True))
        outcomes = {outcome_of(each.translation) for each in migration.launches}
        if repository in done or migration.script is None or outcomes != {"asks nobody"}:
            continue
        if migration.script.persons:
            continue
        for argv in launched_commands(text, migration.script.text)[:1]:
            done.add(repository)
            yield name, argv


# Nightly: trains once per drawn project. test_trained.py trains a CPU trial every day.
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_cpu_trials_of_drawn_scripts_train(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, trained = {}, []
    for number, (name, argv) in enumerate(trial_commands()):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        code, given = run([*argv, *put_project(argv, folder, model)])
        files = list(folder.rglob("metrics.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        steps = [row["step"] for row in rows if row.get("phase") in ("rl", "sft")]
        if code or steps != [1, 2]:
            failed[name] = f"{code} {steps} {given.strip()[-600:]}"
            logger.warning("%s: %s", name, failed[name])
        else:
            trained.append(name)
            logger.warning("%s: trained, gradient norm %s", name, rows[-1].get("actor/grad_norm"))
    logger.warning("%d trained, %d failed", len(trained), len(failed))
    assert failed == {}
    assert len(trained) >= 20
