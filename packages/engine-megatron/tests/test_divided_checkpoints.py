"""Test that ranks write and read only their tensors, and read checkpoints of release 0.1."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from temper_engine_api.conformance.harness.measurements import (
    collect_state,
    load_and_train,
    train,
    train_and_save,
)
from temper_engine_api.conformance.harness.rank import ADAMW
from temper_engine_api.conformance.harness.tolerances import assert_same_state
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, QWEN2_UNTIED
from temper_engine_api.layout import Layout
from temper_engine_api.registry import load_conformance_layouts
from temper_engine_megatron.checkpoint import checkpoint_files
from temper_engine_megatron.weights.parameter_info import assign_writers

ALONE = Layout(name="alone", world_size=1)
LAYOUTS = {layout.name: layout for layout in load_conformance_layouts("megatron")}


def test_shares_are_equal_to_the_largest_tensor_and_given_to_those_that_hold_it():
    # Rank 0 gets 9, rank 1 gets 7 and 6, rank 0 gets 5, rank 1 gets 4: 9 + 5 = 14, 7 + 6 + 4 = 17.
    assert assign_writers([4, 9, 6, 5, 7], holders=[(0, 1)] * 5) == [1, 0, 1, 0, 1]
    # Those that one rank alone holds come first, and what both hold fills the gap.
    assert assign_writers([5, 3, 2], holders=[(0, 1), (0,), (0,)]) == [1, 0, 0]


def own_part(rank, *, setup, batch, folder):
    """Return this rank's bytes and weight names after an update, and the largest state."""
    engine = rank.temporary_engine(setup)
    train(engine, [batch])
    own = [
        path.removeprefix("state/")
        for path in (r.path for r in engine.write_part(str(folder)).files)
        if path.startswith("state/")
    ]
    largest = max(12 * entry.master.numel() for entry in engine.export_state())
    num_bytes, names = 0, []
    for path in (folder / "state" / name for name in own):
        num_bytes += path.stat().st_size
        with safe_open(path, framework="pt") as file:
            tensors = file.keys()  # a safetensors file cannot be iterated itself
            names += [
                each.removeprefix("master.") for each in tensors if each.startswith("master.")
            ]
    return num_bytes, names, largest


HEADERS = 20_000
"""Bytes that safetensors may take for names and places."""


@pytest.mark.parametrize("layout", ["tp2", "dp2-distopt", "cp2", "pp2"])
def test_every_rank_writes_about_as_much(rank_pool, oracle, tmp_path, layout):
    arguments = {
        "setup": oracle.make_setup(QWEN2_UNTIED, optimizer=ADAMW),
        "batch": oracle.get_batch(),
        "folder": tmp_path,
    }
    check_shares(
        rank_pool.run(own_part, engine="megatron", layout=LAYOUTS[layout], arguments=arguments)
    )


@pytest.mark.parametrize("layout", ["ep2", "tp2-sp-ep2"])
def test_experts_are_written_by_the_ranks_that_hold_them(rank_pool, oracle, tmp_path, layout):
    moe_oracle = oracle.with_experts()
    fields = {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "expert_parallel": 2,
        "expert_tensor_parallel": 1,
    }
    layouts = {**LAYOUTS, "tp2-sp-ep2": Layout(name="tp2-sp-ep2", world_size=2, fields=fields)}
    arguments = {
        "setup": moe_oracle.make_setup(QWEN2_UNTIED, optimizer=ADAMW),
        "batch": moe_oracle.get_batch(),
        "folder": tmp_path,
    }
    found = rank_pool.run(own_part, engine="megatron", layout=layouts[layout], arguments=arguments)
    check_shares(found)
    for half, (_, names, _) in enumerate(found):
        numbers = {
            int(name.partition(".experts.")[2].partition(".")[0])
            for name in names
            if ".experts." in name
        }
        assert numbers == {2 * half, 2 * half + 1}


def check_shares(found):
    """About the same bytes of each, and no tensor twice."""
    (first, here, largest), (second, there, _) = found
    assert abs(first - second) <= largest + HEADERS
    assert min(first, second) > 0
    assert not set(here) & set(there)


def names_read(rank, *, setup, folder):
    """Return how often each weight was read from the files, and the state afterwards."""
    engine = rank.temporary_engine(setup)
    times = defaultdict(int)
    open_saved_state = checkpoint_files.open_saved_state

    def open_and_count(directory):
        saved = open_saved_state(directory)

        def read(kind, name):
            times[name] += kind == "weight"
            return saved.read(kind, name)

        return replace(saved, read=read)

    checkpoint_files.open_saved_state = open_and_count
    try:
        engine.load_checkpoint(str(folder))
    finally:
        checkpoint_files.open_saved_state = open_saved_state
    return dict(times), collect_state(engine)


def test_a_stage_reads_its_own_layers_alone(rank_pool, oracle, tmp_path):
    setup = oracle.make_setup(QWEN2_UNTIED, optimizer=ADAMW)
    saved = save(rank_pool, oracle, setup, "tp2", tmp_path)
    (first, state), (second, _) = rank_pool.run(
        names_read,
        engine="megatron",
        layout=LAYOUTS["pp2"],
        arguments={"setup": setup, "folder": tmp_path},
    )
    assert set(first.values()) == set(second.values()) == {1}
    assert first.keys() & second.keys() == set()
    assert first.keys() | second.keys() == state.keys()
    # Of four layers.
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "1"}
    assert_same_state(state, saved)


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_rank_reads_its_own_experts_alone(rank_pool, oracle, tmp_path, engine):
    pytest.importorskip(
        "temper_engine_fsdp",
        reason="the other engine is not installed: pip install temper-engine-fsdp",
    )
    moe_oracle = oracle.with_experts()
    setup = moe_oracle.make_setup(QWEN2_UNTIED, optimizer=ADAMW)
    arguments = {"setup": setup, "batches": [moe_oracle.get_batch()], "folder": tmp_path, "step": 1}
    rank_pool.run(train_and_save, engine=engine, layout=ALONE, arguments=arguments)
    found = rank_pool.run(
        names_read,
        engine="megatron",
        layout=LAYOUTS["ep2"],
        arguments={"setup": setup, "folder": tmp_path},
    )
    assert set(found[0][0].values()) == {1}
    if engine == "megatron":
        # Of four experts in each layer.
        for half, (times, _) in enumerate(found):
            assert {name.split(".")[5] for name in times if ".experts." in name} == {
                str(2 * half),
                str(2 * half + 1),
            }


def save(rank_pool, oracle, setup, layout, folder):
    """The state that was saved after an update in a layout."""
    arguments = {"setup": setup, "batch": oracle.get_batch(), "folder": folder}
    return rank_pool.run(
        train_save_and_tell, engine="megatron", layout=LAYOUTS[layout], arguments=arguments
    )[0]


def train_save_and_tell(rank, *, setup, batch, folder):
    engine = rank.temporary_engine(setup)
    train(engine, [batch])
    engine.save_checkpoint(str(folder), global_step=1, in_background=True)
    engine.finish_saving()
    return collect_state(engine)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_checkpoint_that_one_rank_wrote_is_read(rank_pool, oracle, tmp_path, layout):
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    arguments = {
        "setup": setup,
        "batch": oracle.get_batch(),
        "divided": tmp_path / "divided",
        "alone": tmp_path / "alone",
    }
    for saved, loaded in rank_pool.run(
        part_and_back, engine="megatron", layout=LAYOUTS[layout], arguments=arguments
    ):
        assert_same_state(loaded, saved)


def part_and_back(rank, *, setup, batch, divided: Path, alone: Path):
    """Return states before writing and after reading, with a single file as 0.1 wrote it."""
    engine = rank.temporary_engine(setup)
    train(engine, [batch])
    engine.write_part(str(divided))
    saved = collect_state(engine)
    train(engine, [batch])
    if rank.index == 0:
        (alone / "state").mkdir(parents=True)
        (alone / "progress.json").write_bytes((divided / "progress.json").read_bytes())
    torch.distributed.barrier()
    if rank.index == 0:
        joined = {
            name: tensor
            for path in (divided / "state").iterdir()
            for name, tensor in load_file(path).items()
        }
        save_file(joined, alone / "state" / "part-00000.safetensors")
    torch.distributed.barrier()
    engine.read_part(str(alone))
    return saved, collect_state(engine)


def test_files_are_cut_and_go_on_bitwise(rank_pool, oracle, tmp_path):
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed) for seed in range(2)]
    arguments = {"setup": setup, "batches": batches, "folder": tmp_path}
    whole = rank_pool.run(
        train_and_save_in_small_files, engine="megatron", layout=LAYOUTS["tp2"], arguments=arguments
    )
    files = sorted(
        path.name for path in (tmp_path / "step_00000001" / "engine" / "state").iterdir()
    )
    assert [
        sum(name.startswith(f"part-0000{rank}-") for name in files) > 2 for rank in range(2)
    ] == [True, True]
    resumed = rank_pool.run(
        load_and_train,
        engine="megatron",
        layout=LAYOUTS["tp2"],
        arguments={**arguments, "batches": batches[1:]},
    )
    for update, want in zip(resumed, whole, strict=True):
        assert_same_state(update[-1].state, want.state)


def train_and_save_in_small_files(rank, *, setup, batches, folder):
    """The second update, after the first one was saved."""
    engine = rank.temporary_engine(setup)
    train(engine, batches[:1])
    before, checkpoint_files.FILE_BYTES = checkpoint_files.FILE_BYTES, 100_000
    try:
        engine.save_checkpoint(str(folder), global_step=1)
    finally:
        checkpoint_files.FILE_BYTES = before
    return train(engine, batches[1:])[0]


OF_FOUR = (
    LAYOUTS["tp2-pp2"],
    LAYOUTS["tp2-cp2"],
    LAYOUTS["pp2-dp2-distopt"],
    Layout(
        name="tp2-dp2-distopt",
        world_size=4,
        fields={"tensor_parallel": 2, "distributed_optimizer": True},
    ),
    Layout(
        name="dp2-ep2-distopt",
        world_size=4,
        fields={"expert_parallel": 2, "distributed_optimizer": True},
    ),
    Layout(
        name="tp2-sp-ep2-etp2",
        world_size=4,
        fields={"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    ),
)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", OF_FOUR, ids=lambda layout: layout.name)
def test_four_ranks_write_every_tensor_once_and_read_it_back(
    four_rank_pool, oracle, tmp_path, layout
):
    kind = oracle.with_experts() if "expert_parallel" in layout.fields else oracle
    setup = kind.make_setup(QWEN2_UNTIED, optimizer=ADAMW)
    arguments = {"setup": setup, "batch": kind.get_batch(), "folder": tmp_path / "part"}
    shares = four_rank_pool.run(own_part, engine="megatron", layout=layout, arguments=arguments)
    names = [name for _, of_rank, _ in shares for name in of_rank]
    assert min(num_bytes for num_bytes, _, _ in shares) > HEADERS
    arguments["folder"] = tmp_path / "steps"
    saved = four_rank_pool.run(
        train_save_and_tell, engine="megatron", layout=layout, arguments=arguments
    )[0]
    assert sorted(names) == sorted(saved)
    for other in (layout, ALONE):
        arguments = {"setup": setup, "folder": tmp_path / "steps"}
        _, state = four_rank_pool.run(
            names_read, engine="megatron", layout=other, arguments=arguments
        )[0]
        assert_same_state(state, saved)
