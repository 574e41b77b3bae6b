"""The command with ``--to temper``: refusals, messages, checks and output."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from old_files import write_fsdp
from portable_state import read_training_state
from typer.testing import CliRunner

from temper_engine_api.checkpoint import ENGINE_PART, find_step
from temper_legacy_shim.checkpoints import (
    Options,
    Receipt,
    Sources,
    check_receipt,
    convert,
    plan_jobs,
    read_receipt,
)
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.cli import app
from temper_legacy_shim.errors import (
    DamagedFileError,
    OutputError,
    UnsafeFileError,
    UsageError,
    VerificationError,
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 0,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "vocab_size": 6,
    "tie_word_embeddings": False,
}
WEIGHTS = {"model.embed_tokens.weight": (6, 4), "model.norm.weight": (4,), "lm_head.weight": (6, 4)}
Run = Callable[..., Receipt]


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """Return a role of two FSDP ranks: a model of no layer, with its optimizer."""
    folder = tmp_path / "global_step_3/actor"
    write_fsdp(folder, {name: torch.ones(shape) for name, shape in WEIGHTS.items()})
    write_optimizer(folder, value=0.5)
    (folder / "huggingface").mkdir()
    (folder / "huggingface/config.json").write_text(json.dumps(CONFIG))
    return folder


def write_optimizer(folder: Path, *, value: float) -> None:
    """Write flat moments of one unit in two shards of 26 elements."""
    state = {
        0: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full((26,), value),
            "exp_avg_sq": torch.ones(26),
        }
    }
    for rank in range(2):
        torch.save(
            {"state": state, "param_groups": [{"params": [0], "lr": 0.1}]},
            folder / f"optim_world_size_2_rank_{rank}.pt",
        )


@pytest.fixture
def run(actor: Path, tmp_path: Path) -> Run:
    def _run(out: str = "out", *, progress: object = None, **options: object) -> Receipt:
        (job,) = plan_jobs(actor, tmp_path / out)
        expected = Options(target="temper", **{"checks_names": False, **options})  # type: ignore[arg-type]
        return convert(job, expected, Sources(), progress=progress)  # type: ignore[arg-type]

    return _run


def test_a_step_directory_is_checked_by_its_receipt(run: Run, tmp_path: Path) -> None:
    made = run()
    assert (
        check_receipt(tmp_path / "out", read_receipt(tmp_path / "out")).num_tensors
        == made.num_tensors
        > 0
    )


def test_checkpoint_without_moments_resumes_with_a_fresh_optimizer(
    run: Run, actor: Path, tmp_path: Path
) -> None:
    for file in actor.glob("optim_*.pt"):
        file.unlink()
    made = run()
    assert "optimizer moments: the old checkpoint has none" in made.not_carried
    assert any(
        "moments of 0 and counts of 0 updates, so the optimizer starts" in note
        for note in made.notes
    )
    states = list(read_training_state(tmp_path / "out"))
    assert [state.name for state in states] == list(WEIGHTS)
    assert all(bool(state.master.eq(1).all()) and state.update_count == 0 for state in states)
    assert not any(
        bool(moment.any())
        for state in states
        for moment in (state.first_moment, state.second_moment)
    )


def test_moments_of_zero_have_their_bytes_once_for_each_shape(
    run: Run, actor: Path, tmp_path: Path
) -> None:
    for file in actor.glob("optim_*.pt"):
        file.unlink()
    run()
    dcp = DistCheckpoint(find_step(tmp_path / "out") / ENGINE_PART / "dcp")
    positions: dict[str, set[tuple[str, int, int]]] = {}
    for (name, _), position in dcp.positions.items():
        positions.setdefault(name.partition(".")[0], set()).add(position)
    shapes = {t.shape for name, t in dcp.tensors.items() if name.startswith("parameter.")}
    assert positions["first_moment"] == positions["second_moment"]
    assert len(positions["first_moment"]) == len(shapes)
    assert len(positions["parameter"]) == len(WEIGHTS)
    assert not positions["parameter"] & positions["first_moment"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_in_a_moment_is_reported_and_refused_when_strict(
    run: Run, actor: Path, tmp_path: Path, value: float
) -> None:
    write_optimizer(actor, value=value)
    assert any(
        "NaN or infinity in first_moment.model.embed_tokens.weight" in note for note in run().notes
    )
    with pytest.raises(
        VerificationError,
        match=r"first_moment\.model\.embed_tokens\.weight and 2 more tensors hold NaN or infinity",
    ):
        run("strict", is_strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", "out"]


def test_a_source_that_is_cut_off_meanwhile_is_an_error_of_the_shim(
    run: Run, actor: Path, tmp_path: Path
) -> None:
    def cut(what: str, done: int, total: int) -> None:
        with open(actor / "optim_world_size_2_rank_1.pt", "rb+") as file:
            file.truncate(1000)

    with pytest.raises(DamagedFileError, match=r"optim_world_size_2_rank_1\.pt .* truncated"):
        run(progress=cut)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_3"]


def test_a_full_disk_is_an_error_of_the_shim(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip(
            "mounts a disk of 8 kB: a machine where the tests run as root, with leave to mount, "
            "runs this"
        )
    try:
        monkeypatch.setattr(
            "shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**12})
        )  # it fills up after the first look
        with pytest.raises(
            OutputError, match=r"the disk of .* is full: free space and run the same command again"
        ):
            run("disk/out")
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_missing_config_is_reported_before_anything_is_written(run: Run, actor: Path) -> None:
    (actor / "huggingface/config.json").unlink()
    with pytest.raises(UsageError, match="--hf-config"):
        run(progress=lambda *_: pytest.fail("something was written"))


def test_names_are_compared_with_the_model_of_the_config(
    run: Run, actor: Path, tmp_path: Path
) -> None:
    assert any(
        "3 names and shapes equal those of transformers" in sentence
        for sentence in run(checks_names=True).verified
    )
    (actor / "huggingface/config.json").write_text(json.dumps({**CONFIG, "vocab_size": 7}))
    with pytest.raises(
        VerificationError, match=r"lm_head\.weight: shape \(6, 4\), expected \(7, 4\)"
    ):
        run("other", checks_names=True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--verify-logits", True), ("--max-shard-size", 10**9)]
)
@pytest.mark.parametrize("target", ["temper", "peft"])
def test_an_option_of_another_target_is_an_error(option: str, value: int, target: str) -> None:
    named = {"--verify-logits": "verifies_logits", "--max-shard-size": "max_shard_bytes"}[option]
    with pytest.raises(UsageError, match=f"{option} has no effect with --to {target}"):
        Options(target=target, **{named: value})  # type: ignore[arg-type]


def test_a_check_says_what_of_the_training_state_would_be_carried(actor: Path) -> None:
    command = ["checkpoint", str(actor), "--to", "temper", "--check", "--json"]
    (given,) = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert given["num_tensors"] == 4 * 3  # weight, two moments and a count of each
    assert "both moments and the update counts of 3 parameters" in given["carried"]
    (actor / "huggingface/config.json").unlink()
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 1
    assert "--hf-config" in json.loads(done.stdout)[0]["problem"]


def test_what_is_written_is_what_was_there(run: Run, tmp_path: Path) -> None:
    run()
    kept = {state.name: state for state in read_training_state(tmp_path / "out")}
    assert kept.keys() == WEIGHTS.keys()
    assert all(
        (state.first_moment == 0.5).all() and state.update_count == 3 for state in kept.values()
    )
    dcp = next((tmp_path / "out").glob("step_*/engine/dcp"))
    assert len(DistCheckpoint(dcp).tensors) == 12


def test_a_data_file_that_asks_for_a_command_is_refused_and_a_pickled_loader_is_not(
    run: Run, actor: Path, tmp_path: Path
) -> None:
    torch.save(torch.utils.data.DataLoader([1, 2]), actor.parent / "data.pt")
    assert any("data.pt is a pickled data loader" in sentence for sentence in run().not_carried)
    (actor.parent / "data.pt").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(UnsafeFileError, match=r"data\.pt asks for posix\.system"):
        run("hostile")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", "out"]
