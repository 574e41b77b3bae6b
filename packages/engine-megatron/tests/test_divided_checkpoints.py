"""Each rank writes its share of a checkpoint and reads what its layout holds; what one rank wrote alone (0.1) is read as well."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from temper_engine_api.conformance.harness.measurements import (
    load_and_train,
    state_of,
    train,
    train_and_save,
)
from temper_engine_api.conformance.harness.rank import TRAINS
from temper_engine_api.conformance.harness.tolerances import assert_same_state
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, QWEN2_UNTIED
from temper_engine_api.layout import Layout
from temper_engine_api.registry import conformance_layouts
from temper_engine_megatron.checkpoint import checkpoint_files
from temper_engine_megatron.weights.owners import assign_writers

ALONE = Layout(name="alone", world_size=1)
LAYOUTS = {layout.name: layout for layout in conformance_layouts("megatron")}


def test_shares_are_equal_to_the_largest_tensor_and_given_to_those_that_hold_it():
    # 9 goes to rank 0, 7 and 6 to rank 1, 5 and 4 to rank 0 and again 1: 9 + 5 = 14, 7 + 6 + 4 = 17.
    assert assign_writers([4, 9, 6, 5, 7], holders=[(0, 1)] * 5) == [1, 0, 1, 0, 1]
    # Those that one rank alone holds come first, and what both hold fills the gap.
    assert assign_writers([5, 3, 2], holders=[(0, 1), (0,), (0,)]) == [1, 0, 0]


def own_part(rank, *, recipe, batch, folder):
    """Bytes and names of weights in this rank's files after an update, and the bytes of the largest parameter with its moments."""
    engine = rank.engine(recipe)
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
def test_every_rank_writes_about_as_much(fleet, reference, tmp_path, layout):
    arguments = {
        "recipe": reference.recipe(QWEN2_UNTIED, optimizer=TRAINS),
        "batch": reference.batch(),
        "folder": tmp_path,
    }
    check_shares(
        fleet.run(own_part, engine="megatron", layout=LAYOUTS[layout], arguments=arguments)
    )


@pytest.mark.parametrize("layout", ["ep2", "tp2-sp-ep2"])
def test_experts_are_written_by_the_ranks_that_hold_them(fleet, reference, tmp_path, layout):
    mixtures = reference.with_experts()
    fields = {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "expert_parallel": 2,
        "expert_tensor_parallel": 1,
    }
    layouts = {**LAYOUTS, "tp2-sp-ep2": Layout(name="tp2-sp-ep2", world_size=2, fields=fields)}
    arguments = {
        "recipe": mixtures.recipe(QWEN2_UNTIED, optimizer=TRAINS),
        "batch": mixtures.batch(),
        "folder": tmp_path,
    }
    found = fleet.run(own_part, engine="megatron", layout=layouts[layout], arguments=arguments)
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


def names_read(rank, *, recipe, folder):
    """How often each name's weight was read from the files, and the state afterwards, whole on rank 0."""
    engine = rank.engine(recipe)
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
    return dict(times), state_of(engine)


def test_a_stage_reads_its_own_layers_alone(fleet, reference, tmp_path):
    recipe = reference.recipe(QWEN2_UNTIED, optimizer=TRAINS)
    saved = save(fleet, reference, recipe, "tp2", tmp_path)
    (first, state), (second, _) = fleet.run(
        names_read,
        engine="megatron",
        layout=LAYOUTS["pp2"],
        arguments={"recipe": recipe, "folder": tmp_path},
    )
    assert set(first.values()) == set(second.values()) == {1}
    assert first.keys() & second.keys() == set()
    assert first.keys() | second.keys() == state.keys()
    # Of four layers.
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "1"}
    assert_same_state(state, saved)


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_rank_reads_its_own_experts_alone(fleet, reference, tmp_path, engine):
    pytest.importorskip(
        "temper_engine_fsdp",
        reason="the other engine is not installed: pip install temper-engine-fsdp",
    )
    mixtures = reference.with_experts()
    recipe = mixtures.recipe(QWEN2_UNTIED, optimizer=TRAINS)
    arguments = {"recipe": recipe, "batches": [mixtures.batch()], "folder": tmp_path, "step": 1}
    fleet.run(train_and_save, engine=engine, layout=ALONE, arguments=arguments)
    found = fleet.run(
        names_read,
        engine="megatron",
        layout=LAYOUTS["ep2"],
        arguments={"recipe": recipe, "folder": tmp_path},
    )
    assert set(found[0][0].values()) == {1}
    if engine == "megatron":
        # Of four experts in each layer.
        for half, (times, _) in enumerate(found):
            assert {name.split(".")[5] for name in times if ".experts." in name} == {
                str(2 * half),
                str(2 * half + 1),
            }


def save(fleet, reference, recipe, layout, folder):
    """The state that was saved after an update in a layout."""
    arguments = {"recipe": recipe, "batch": reference.batch(), "folder": folder}
    return fleet.run(
        train_save_and_tell, engine="megatron", layout=LAYOUTS[layout], arguments=arguments
    )[0]


def train_save_and_tell(rank, *, recipe, batch, folder):
    engine = rank.engine(recipe)
    train(engine, [batch])
    engine.save_checkpoint(str(folder), global_step=1, in_background=True)
    engine.finish_saving()
    return state_of(engine)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_checkpoint_that_one_rank_wrote_is_read(fleet, reference, tmp_path, layout):
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS)
    arguments = {
        "recipe": recipe,
        "batch": reference.batch(),
        "divided": tmp_path / "divided",
        "alone": tmp_path / "alone",
    }
    for saved, loaded in fleet.run(
        part_and_back, engine="megatron", layout=LAYOUTS[layout], arguments=arguments
    ):
        assert_same_state(loaded, saved)


def part_and_back(rank, *, recipe, batch, divided: Path, alone: Path):
    """States before a part was written, and after it was read in one file as 0.1 wrote it; whole on rank 0."""
    engine = rank.engine(recipe)
    train(engine, [batch])
    engine.write_part(str(divided))
    saved = state_of(engine)
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
    return saved, state_of(engine)


def test_files_are_cut_and_go_on_bitwise(fleet, reference, tmp_path):
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS)
    batches = [reference.batch(seed=seed) for seed in range(2)]
    arguments = {"recipe": recipe, "batches": batches, "folder": tmp_path}
    whole = fleet.run(
        train_and_save_in_small_files, engine="megatron", layout=LAYOUTS["tp2"], arguments=arguments
    )
    files = sorted(
        path.name for path in (tmp_path / "step_00000001" / "engine" / "state").iterdir()
    )
    assert [
        sum(name.startswith(f"part-0000{rank}-") for name in files) > 2 for rank in range(2)
    ] == [True, True]
    resumed = fleet.run(
        load_and_train,
        engine="megatron",
        layout=LAYOUTS["tp2"],
        arguments={**arguments, "batches": batches[1:]},
    )
    for update, want in zip(resumed, whole, strict=True):
        assert_same_state(update[-1].state, want.state)


def train_and_save_in_small_files(rank, *, recipe, batches, folder):
    """The second update, after the first one was saved."""
    engine = rank.engine(recipe)
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
    fleet_of_four, reference, tmp_path, layout
):
    kind = reference.with_experts() if "expert_parallel" in layout.fields else reference
    recipe = kind.recipe(QWEN2_UNTIED, optimizer=TRAINS)
    arguments = {"recipe": recipe, "batch": kind.batch(), "folder": tmp_path / "part"}
    shares = fleet_of_four.run(own_part, engine="megatron", layout=layout, arguments=arguments)
    names = [name for _, of_rank, _ in shares for name in of_rank]
    assert min(num_bytes for num_bytes, _, _ in shares) > HEADERS
    arguments["folder"] = tmp_path / "steps"
    saved = fleet_of_four.run(
        train_save_and_tell, engine="megatron", layout=layout, arguments=arguments
    )[0]
    assert sorted(names) == sorted(saved)
    for other in (layout, ALONE):
        arguments = {"recipe": recipe, "folder": tmp_path / "steps"}
        _, state = fleet_of_four.run(
            names_read, engine="megatron", layout=other, arguments=arguments
        )[0]
        assert_same_state(state, saved)
