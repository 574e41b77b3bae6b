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

ONE_RANK = Layout(name="one-rank", world_size=1)
LAYOUTS = {layout.name: layout for layout in load_conformance_layouts("megatron")}


def test_writers_have_their_tensors_and_differ_by_at_most_the_largest():
    # Rank 0 gets 9, rank 1 gets 7 and 6, rank 0 gets 5, rank 1 gets 4: 9 + 5 = 14, 7 + 6 + 4 = 17.
    assert assign_writers([4, 9, 6, 5, 7], holders=[(0, 1)] * 5) == [1, 0, 1, 0, 1]
    # Tensors of a single rank are assigned first; the tensor of both ranks then fills the gap.
    assert assign_writers([5, 3, 2], holders=[(0, 1), (0,), (0,)]) == [1, 0, 0]


def save_local_part(rank, *, setup, batch, folder):
    """Train and save; return this rank's bytes and weight names, and the largest state's bytes."""
    engine = rank.temporary_engine(setup)
    train(engine, [batch])
    local_files = [
        path.removeprefix("state/")
        for path in (r.path for r in engine.write_part(str(folder)).files)
        if path.startswith("state/")
    ]
    largest = max(12 * entry.master.numel() for entry in engine.export_state())
    num_bytes, names = 0, []
    for path in (folder / "state" / name for name in local_files):
        num_bytes += path.stat().st_size
        with safe_open(path, framework="pt") as file:
            tensors = file.keys()  # a safetensors file cannot be iterated itself
            names += [
                each.removeprefix("master.") for each in tensors if each.startswith("master.")
            ]
    return num_bytes, names, largest


HEADER_BYTES = 20_000
"""Maximum number of bytes that the headers of safetensors files take."""


@pytest.mark.parametrize(
    # Nightly: context-parallel ranks divide the state like replicas, and stages like shards.
    "layout",
    [
        "tp2",
        "dp2-distopt",
        pytest.param("cp2", marks=pytest.mark.nightly),
        pytest.param("pp2", marks=pytest.mark.nightly),
    ],
)
def test_ranks_write_about_the_same_number_of_bytes(rank_pool, oracle, tmp_path, layout):
    arguments = {
        "setup": oracle.make_setup(QWEN2_UNTIED, optimizer=ADAMW),
        "batch": oracle.get_batch(),
        "folder": tmp_path,
    }
    check_balanced_and_disjoint(
        rank_pool.run(
            save_local_part, engine="megatron", layout=LAYOUTS[layout], arguments=arguments
        )
    )


@pytest.mark.parametrize("layout", ["ep2", "tp2-sp-ep2"])
def test_experts_are_written_by_the_ranks_that_have_them(rank_pool, oracle, tmp_path, layout):
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
    written = rank_pool.run(
        save_local_part, engine="megatron", layout=layouts[layout], arguments=arguments
    )
    check_balanced_and_disjoint(written)
    for half, (_, names, _) in enumerate(written):
        numbers = {
            int(name.partition(".experts.")[2].partition(".")[0])
            for name in names
            if ".experts." in name
        }
        assert numbers == {2 * half, 2 * half + 1}


def check_balanced_and_disjoint(written):
    """Check that both ranks wrote about the same number of bytes, and no tensor twice."""
    (first_bytes, first_names, largest), (second_bytes, second_names, _) = written
    assert abs(first_bytes - second_bytes) <= largest + HEADER_BYTES
    assert min(first_bytes, second_bytes) > 0
    assert not set(first_names) & set(second_names)


def load_and_count_reads(rank, *, setup, folder):
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


def test_stage_reads_only_its_own_layers(rank_pool, oracle, tmp_path):
    setup = oracle.make_setup(QWEN2_UNTIED, optimizer=ADAMW)
    saved = save(rank_pool, oracle, setup, "tp2", tmp_path)
    (first, state), (second, _) = rank_pool.run(
        load_and_count_reads,
        engine="megatron",
        layout=LAYOUTS["pp2"],
        arguments={"setup": setup, "folder": tmp_path},
    )
    assert set(first.values()) == set(second.values()) == {1}
    assert first.keys() & second.keys() == set()
    assert first.keys() | second.keys() == state.keys()
    # The model has four layers.
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "1"}
    assert_same_state(state, saved)


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_rank_reads_only_its_own_experts(rank_pool, oracle, tmp_path, engine):
    pytest.importorskip(
        "temper_engine_fsdp",
        reason="the other engine is not installed: pip install ./packages/engine-fsdp",
    )
    moe_oracle = oracle.with_experts()
    setup = moe_oracle.make_setup(QWEN2_UNTIED, optimizer=ADAMW)
    arguments = {"setup": setup, "batches": [moe_oracle.get_batch()], "folder": tmp_path, "step": 1}
    rank_pool.run(train_and_save, engine=engine, layout=ONE_RANK, arguments=arguments)
    rank_results = rank_pool.run(
        load_and_count_reads,
        engine="megatron",
        layout=LAYOUTS["ep2"],
        arguments={"setup": setup, "folder": tmp_path},
    )
    assert set(rank_results[0][0].values()) == {1}
    if engine == "megatron":
        # Each layer has four experts.
        for half, (times, _) in enumerate(rank_results):
            assert {name.split(".")[5] for name in times if ".experts." in name} == {
                str(2 * half),
                str(2 * half + 1),
            }


def save(rank_pool, oracle, setup, layout, folder):
    """Train and save in a layout; return the saved state."""
    arguments = {"setup": setup, "batch": oracle.get_batch(), "folder": folder}
    return rank_pool.run(
        train_save_and_collect_state, engine="megatron", layout=LAYOUTS[layout], arguments=arguments
    )[0]


def train_save_and_collect_state(rank, *, setup, batch, folder):
    engine = rank.temporary_engine(setup)
    train(engine, [batch])
    engine.save_checkpoint(str(folder), global_step=1, in_background=True)
    engine.finish_saving()
    return collect_state(engine)


# Nightly: test_golden.py reads checkpoints of one rank in stages.
@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.nightly)])
def test_checkpoint_that_one_rank_wrote_is_read(rank_pool, oracle, tmp_path, layout):
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    arguments = {
        "setup": setup,
        "batch": oracle.get_batch(),
        "divided": tmp_path / "divided",
        "single": tmp_path / "single",
    }
    for saved, loaded in rank_pool.run(
        write_and_read_back, engine="megatron", layout=LAYOUTS[layout], arguments=arguments
    ):
        assert_same_state(loaded, saved)


def write_and_read_back(rank, *, setup, batch, divided: Path, single: Path):
    """Return states before writing and after reading, with a single file as 0.1 wrote it."""
    engine = rank.temporary_engine(setup)
    train(engine, [batch])
    engine.write_part(str(divided))
    saved = collect_state(engine)
    train(engine, [batch])
    if rank.index == 0:
        (single / "state").mkdir(parents=True)
        (single / "progress.json").write_bytes((divided / "progress.json").read_bytes())
    torch.distributed.barrier()
    if rank.index == 0:
        joined = {
            name: tensor
            for path in (divided / "state").iterdir()
            for name, tensor in load_file(path).items()
        }
        save_file(joined, single / "state" / "part-00000.safetensors")
    torch.distributed.barrier()
    engine.read_part(str(single))
    return saved, collect_state(engine)


def test_state_in_many_files_resumes_bit_for_bit(rank_pool, oracle, tmp_path):
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed) for seed in range(2)]
    arguments = {"setup": setup, "batches": batches, "folder": tmp_path}
    uninterrupted = rank_pool.run(
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
    for updates, expected in zip(resumed, uninterrupted, strict=True):
        assert_same_state(updates[-1].state, expected.state)


def train_and_save_in_small_files(rank, *, setup, batches, folder):
    """Save after the first update, and return the second one."""
    engine = rank.temporary_engine(setup)
    train(engine, batches[:1])
    before, checkpoint_files.FILE_BYTES = checkpoint_files.FILE_BYTES, 100_000
    try:
        engine.save_checkpoint(str(folder), global_step=1)
    finally:
        checkpoint_files.FILE_BYTES = before
    return train(engine, batches[1:])[0]


FOUR_RANK_LAYOUTS = (
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


# Nightly: starts four processes. Two ranks do the same above, every day.
@pytest.mark.nightly
@pytest.mark.parametrize("layout", FOUR_RANK_LAYOUTS, ids=lambda layout: layout.name)
def test_four_ranks_write_every_tensor_once_and_read_it_back(
    four_rank_pool, oracle, tmp_path, layout
):
    cache = oracle.with_experts() if "expert_parallel" in layout.fields else oracle
    setup = cache.make_setup(QWEN2_UNTIED, optimizer=ADAMW)
    arguments = {"setup": setup, "batch": cache.get_batch(), "folder": tmp_path / "part"}
    written = four_rank_pool.run(
        save_local_part, engine="megatron", layout=layout, arguments=arguments
    )
    names = [name for _, rank_names, _ in written for name in rank_names]
    assert min(num_bytes for num_bytes, _, _ in written) > HEADER_BYTES
    arguments["folder"] = tmp_path / "steps"
    saved = four_rank_pool.run(
        train_save_and_collect_state, engine="megatron", layout=layout, arguments=arguments
    )[0]
    assert sorted(names) == sorted(saved)
    for other in (layout, ONE_RANK):
        arguments = {"setup": setup, "folder": tmp_path / "steps"}
        _, state = four_rank_pool.run(
            load_and_count_reads, engine="megatron", layout=other, arguments=arguments
        )[0]
        assert_same_state(state, saved)
