"""Test disks that fail in a save or load: one message on every rank, and the step is intact."""

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from temper_engine_api.checkpoint import list_complete_steps
from temper_engine_api.checkpoint.saved_state import SafeDcpReader
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.errors import CheckpointError
from temper_engine_api.layout import Layout
from temper_engine_api.specs import OptimizerSpec
from temper_engine_fsdp.checkpoint import training_checkpoint
from temper_engine_fsdp.engine import FSDPEngine


@contextmanager
def full_disk(*, at: int) -> Iterator[None]:
    """Limit the size of files that this process writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("at", [10_000, 500])
def test_failed_save_keeps_the_previous_step_and_leaves_no_files(
    start: Callable[..., FSDPEngine], tmp_path: Path, at: int
) -> None:
    engine = start()
    engine.save_checkpoint(str(tmp_path), global_step=1)
    with (
        full_disk(at=at),
        pytest.raises(
            CheckpointError, match=r"step 2 could not be saved: .*could not write the checkpoint to"
        ),
    ):
        engine.save_checkpoint(str(tmp_path), global_step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    engine.load_checkpoint(str(tmp_path))
    engine.save_checkpoint(str(tmp_path), global_step=2)


def test_error_names_the_rng_file_that_could_not_be_written(tmp_path: Path) -> None:
    with full_disk(at=500), pytest.raises(CheckpointError, match=r"could not write .*rank_0\.pt"):
        training_checkpoint.write_rng_states(
            {"cpu": torch.get_rng_state()}, directory=str(tmp_path), rank=0
        )


# A frozen model is written by the first rank alone, while the other one sends its parts; its own
# share of the state is half as large and
# still fits. Each rank's share of moments does not.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("full", "optimizer", "sentence"),
    [
        (0, None, "rank 0: could not write the weights to"),
        (1, ADAMW, "could not write the checkpoint to"),
    ],
)
def test_full_disk_of_one_rank_fails_the_save_on_both(
    rank_pool: RankPool, tmp_path: Path, full: int, optimizer: OptimizerSpec | None, sentence: str
) -> None:
    setup = OracleCache(folder=tmp_path / "models").make_setup(QWEN2_GROUPED, optimizer=optimizer)
    layout = Layout(name="whole-model", world_size=2, fields={"save_huggingface_weights": True})
    arguments: dict[str, object] = {"setup": setup, "folder": tmp_path / "steps", "full": full}
    sentences = rank_pool.run(save_twice, engine="fsdp", layout=layout, arguments=arguments)
    assert sentences[0] == sentences[1]
    assert "step 2 could not be saved: " in sentences[0]
    assert sentence in sentences[0]
    assert list_complete_steps(tmp_path / "steps") == [1]


def save_twice(rank: Rank, *, setup: EngineSetup, folder: Path, full: int) -> str:
    """Save twice; the second time one disk is a byte too small. Return the error message."""
    engine = rank.temporary_engine(setup)
    first = Path(engine.save_checkpoint(str(folder), global_step=1))
    at = (first / "engine" / "huggingface" / "model.safetensors").stat().st_size - 1
    with (
        full_disk(at=at) if rank.index == full else nullcontext(),
        pytest.raises(CheckpointError) as caught,
    ):
        engine.save_checkpoint(str(folder), global_step=2)
    return str(caught.value)


def test_rank_that_cannot_read_the_list_of_tensors_fails_the_load_on_both(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    setup = OracleCache(folder=tmp_path / "models").make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    layout = Layout(name="two-ranks", world_size=2, fields={})
    arguments: dict[str, object] = {"setup": setup, "folder": tmp_path / "steps"}
    sentences = rank_pool.run(load_twice, engine="fsdp", layout=layout, arguments=arguments)
    assert sentences == ["OSError: [Errno 116] Stale file handle"] * 2


def load_twice(rank: Rank, *, setup: EngineSetup, folder: Path) -> str:
    """Load when rank 1 cannot read, and return the error message; then load again."""
    engine = rank.temporary_engine(setup)
    engine.save_checkpoint(str(folder), global_step=1)
    read = SafeDcpReader.read_metadata

    def fail(reader: SafeDcpReader) -> Metadata:
        raise OSError(errno.ESTALE, "Stale file handle")

    if rank.index == 1:
        SafeDcpReader.read_metadata = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(str(folder))
    finally:
        SafeDcpReader.read_metadata = read  # type: ignore[method-assign]
    engine.load_checkpoint(str(folder))
    return str(caught.value)
