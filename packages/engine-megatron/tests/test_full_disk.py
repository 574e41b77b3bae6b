"""Test a full disk while saving: the same error on every rank, and the last step stays."""

import resource
from contextlib import contextmanager

import pytest
import torch

from temper_engine_api.checkpoint import list_complete_steps
from temper_engine_api.conformance.harness.measurements import train
from temper_engine_api.conformance.harness.rank import ADAMW
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.errors import CheckpointError
from temper_engine_api.registry import load_conformance_layouts
from temper_engine_megatron.checkpoint import checkpoint_files

LAYOUTS = {layout.name: layout for layout in load_conformance_layouts("megatron")}


@contextmanager
def full_disk(*, at):
    """Limit the files of this process to this many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Smaller than the training state, and smaller than the RNG states.
@pytest.mark.parametrize("at", [10_000, 500])
def test_failed_save_keeps_the_previous_step_and_leaves_no_files(start, tmp_path, at):
    engine = start()
    engine.save_checkpoint(str(tmp_path), global_step=1)
    with (
        full_disk(at=at),
        pytest.raises(
            CheckpointError,
            match=r"step 2 could not be saved: .*could not write .*part-00000-00000.safetensors",
        ),
    ):
        engine.save_checkpoint(str(tmp_path), global_step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    engine.load_checkpoint(str(tmp_path))
    engine.save_checkpoint(str(tmp_path), global_step=2)


def test_error_names_the_file_that_could_not_be_written(tmp_path):
    tensors = {"one": torch.zeros(500)}
    with full_disk(at=500):
        with pytest.raises(CheckpointError, match=r"could not write .*adapter_model\.safetensors"):
            checkpoint_files.write_adapter({"r": 8}, tensors, directory=str(tmp_path))
        with pytest.raises(CheckpointError, match=r"could not write .*rank_0\.pt"):
            checkpoint_files.write_rng_states(tensors, directory=str(tmp_path), rank=0)
        with pytest.raises(CheckpointError, match=r"could not write .*config\.json"):
            checkpoint_files.write_model_config({"text": "x" * 1000}, directory=str(tmp_path))


# Nightly: the failure of rank 0, which writes the manifest, needs no message to be noticed.
@pytest.mark.parametrize("full", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_full_disk_of_one_rank_fails_the_save_on_both(rank_pool, oracle, tmp_path, full):
    # It fails in the middle of the state, while the other rank still sends its shards.
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    arguments = {"setup": setup, "batch": oracle.get_batch(), "folder": tmp_path, "full": full}
    messages = rank_pool.run(
        save_twice, engine="megatron", layout=LAYOUTS["tp2"], arguments=arguments
    )
    assert messages[0] == messages[1]
    assert f"step 2 could not be saved: rank {full}: could not write" in messages[0]
    assert list_complete_steps(tmp_path) == [1]


def save_twice(rank, *, setup, batch, folder, full):
    """Return the error message of the second save, which is divided into many files."""
    engine = rank.temporary_engine(setup)
    engine.save_checkpoint(str(folder), global_step=1)
    file_bytes, write = checkpoint_files.FILE_BYTES, engine._write_state

    # Only while files are written: the ranks agree on the failure through a store in a file.
    def write_to_full_disk(directory):
        with full_disk(at=500):
            return write(directory)

    checkpoint_files.FILE_BYTES = 1000
    if rank.index == full:
        engine._write_state = write_to_full_disk
    try:
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(str(folder), global_step=2)
    finally:
        checkpoint_files.FILE_BYTES, engine._write_state = file_bytes, write
    train(engine, [batch])
    return str(caught.value)
