"""Test that each engine continues a checkpoint of the other.

Weights, moments, counts and schedule are equal bit for bit, the next loss up to rounding.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from temper_engine_api.checkpoint.saved_state import COUNT, FIRST, SavedState
from temper_engine_api.conformance.harness.measurements import (
    Update,
    collect_state,
    load_and_train,
    merge_update_metrics,
    train,
    train_and_save,
)
from temper_engine_api.conformance.harness.rank import ADAMW
from temper_engine_api.conformance.harness.tolerances import (
    LOSS,
    LOSS_TERM_SCALE,
    UPDATE,
    assert_all_close,
    assert_close,
    assert_same_state,
    get_family_gradient,
)
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.tiny_adapters import TinyAdapter
from temper_engine_api.conformance.inputs.tiny_models import (
    QWEN2_GROUPED,
    QWEN2_TIED,
    VALUE,
    has_experts,
)
from temper_engine_api.errors import CheckpointError
from temper_engine_api.file_names import FileNames, FilePart
from temper_engine_api.layout import default_layout
from temper_engine_api.registry import load_conformance_layouts
from temper_engine_api.specs import ScheduleSpec
from temper_engine_megatron.bridge_compat import TESTED_MODEL_TYPES
from temper_engine_megatron.huggingface.weight_names import split_saved_experts

pytest.importorskip(
    "temper_engine_fsdp",
    reason="the other engine is not installed: pip install ./packages/engine-fsdp",
)

ONE_RANK, TWO_RANKS = default_layout(1), default_layout(2)
MEGATRON = {layout.name: layout for layout in load_conformance_layouts("megatron")}
SCHEDULE = ScheduleSpec(kind="cosine", warmup_steps=1, total_steps=6)
# Nightly, except the first: an adapter and a model with experts go from Megatron to FSDP every day,
# and test_traps.py loads state into a distributed optimizer.
DIRECTIONS = [
    pytest.param("fsdp", TWO_RANKS, "megatron", MEGATRON["pp2"], id="fsdp-to-pp2"),
    pytest.param(
        "megatron", MEGATRON["tp2"], "fsdp", TWO_RANKS, id="tp2-to-fsdp", marks=pytest.mark.nightly
    ),
    pytest.param(
        "fsdp",
        ONE_RANK,
        "megatron",
        MEGATRON["dp2-distopt"],
        id="fsdp-to-distopt",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "megatron",
        MEGATRON["pp2-vpp2"],
        "fsdp",
        ONE_RANK,
        id="vpp2-to-fsdp",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "megatron", MEGATRON["cp2"], "fsdp", TWO_RANKS, id="cp2-to-fsdp", marks=pytest.mark.nightly
    ),
]


def train_all(rank, *, setup, batches) -> list[Update]:
    """Train on all batches without an interruption."""
    return train(rank.temporary_engine(setup), batches)


def load_and_collect_state(rank, *, setup, folder):
    """Return the loaded state, the number of schedule steps and the learning rate."""
    engine = rank.temporary_engine(setup)
    engine.load_checkpoint(str(folder))
    return collect_state(engine), engine.num_schedule_steps, engine.current_lr


@pytest.mark.parametrize(("first", "before", "second", "after"), DIRECTIONS)
def test_run_continues_in_the_other_engine(
    rank_pool, oracle, tmp_path, first, before, second, after
):
    setup = oracle.make_setup(QWEN2_TIED, optimizer=ADAMW, schedule=SCHEDULE)
    check_continues(rank_pool, oracle, tmp_path, setup, (first, before), (second, after))


@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        # Nightly: a DeepSeek model with experts takes the first way every day, and an adapter of
        # experts the second one.
        pytest.param(
            "megatron",
            MEGATRON["ep2"],
            "fsdp",
            TWO_RANKS,
            id="ep2-to-fsdp",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "fsdp",
            TWO_RANKS,
            "megatron",
            MEGATRON["ep2"],
            id="fsdp-to-ep2",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "fsdp",
            ONE_RANK,
            "megatron",
            MEGATRON["pp2"],
            id="fsdp-to-pp2",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_mixture_of_experts_continues_in_the_other_engine(
    rank_pool, oracle, tmp_path, first, before, second, after
):
    moe_oracle = oracle.with_experts()
    setup = moe_oracle.make_setup(QWEN2_TIED, optimizer=ADAMW, schedule=SCHEDULE)
    check_continues(rank_pool, moe_oracle, tmp_path, setup, (first, before), (second, after))


def test_joined_experts_are_read_once_and_split_by_names_in_files():
    reads = []
    joined = {
        "gate_up_proj": torch.arange(24.0).view(2, 4, 3),
        "down_proj": torch.arange(12.0).view(2, 3, 2),
    }

    def read(kind, name):
        reads.append((kind, name))
        return (
            torch.tensor(7)
            if kind == COUNT
            else joined[name.rpartition(".")[2]] + (0.5 if kind == FIRST else 0)
        )

    shapes = {f"layer.mlp.experts.{kind}": tuple(tensor.shape) for kind, tensor in joined.items()}
    saved = split_saved_experts(
        SavedState(directory="here", weights=shapes, has_moments=True, read=read),
        FileNames(
            {
                "layer.mlp.experts.gate_up_proj": tuple(
                    FilePart(
                        name=f"layer.mlp.experts.{expert}.{matrix}.weight",
                        expert=expert,
                        chunk=chunk,
                        num_chunks=2,
                    )
                    for expert in range(2)
                    for chunk, matrix in enumerate(("gate_proj", "up_proj"))
                ),
                "layer.mlp.experts.down_proj": tuple(
                    FilePart(name=f"layer.mlp.experts.{expert}.down_proj.weight", expert=expert)
                    for expert in range(2)
                ),
            },
            model_type="qwen3_moe",
            unsupported=(),
        ),
    )
    states = {state.name: state for state in saved.iterate_state()}
    assert [(name, tuple(state.master.shape)) for name, state in states.items()] == list(
        saved.weights.items()
    )
    # Expert 1 begins at 1 x 4 x 3 = 12, its up-projection two rows of 3 later.
    assert torch.equal(
        states["layer.mlp.experts.1.up_proj.weight"].first_moment,
        torch.arange(18.0, 24.0).view(2, 3) + 0.5,
    )
    assert torch.equal(
        states["layer.mlp.experts.1.down_proj.weight"].master, joined["down_proj"][1]
    )
    assert {state.update_count for state in states.values()} == {7}
    tensor_reads = [read for read in reads if read[0] != COUNT]
    assert len(tensor_reads) == len(set(tensor_reads)) == 6


# Nightly: from FSDP to Megatron; an adapter of experts, below, takes that direction.
@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        pytest.param(*DIRECTIONS[0].values, id=DIRECTIONS[0].id, marks=pytest.mark.nightly),
        pytest.param(*DIRECTIONS[1].values, id=DIRECTIONS[1].id),
    ],
)
def test_adapter_continues_in_the_other_engine(
    rank_pool, oracle, tmp_path, first, before, second, after
):
    adapter = TinyAdapter(
        name="crossing",
        model=QWEN2_TIED,
        fields={"use_dora": True, "use_rslora": True, "exclude_modules": ["lm_head"]},
    )
    setup = oracle.make_adapter_setup(adapter, optimizer=ADAMW, schedule=SCHEDULE)
    check_continues(rank_pool, oracle, tmp_path, setup, (first, before), (second, after))


@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        pytest.param("fsdp", TWO_RANKS, "megatron", MEGATRON["ep2"], id="fsdp-to-ep2"),
        pytest.param(
            "megatron",
            MEGATRON["ep2"],
            "fsdp",
            ONE_RANK,
            id="ep2-to-fsdp",
            # Nightly: the experts of DeepSeek-V3, below, go from Megatron to FSDP every day.
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_adapter_of_experts_continues_in_the_other_engine(
    rank_pool, oracle, tmp_path, first, before, second, after
):
    moe_oracle = oracle.with_experts()
    inside = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = TinyAdapter(
        name="inside-crossing",
        model=QWEN2_TIED,
        fields={"target_modules": ["q_proj"], "target_parameters": inside},
    )
    setup = moe_oracle.make_adapter_setup(adapter, optimizer=ADAMW, schedule=SCHEDULE)
    check_continues(rank_pool, moe_oracle, tmp_path, setup, (first, before), (second, after))


def list_family_directions():
    """Yield each family that both engines support, in both directions; one of them in every run."""
    for family in FAMILIES:
        if family not in TESTED_MODEL_TYPES:
            continue
        divided = "tp2-sp-ep2" if has_experts(FAMILIES[family]) else "tp2-sp"
        for first, before, second, after in (
            ("fsdp", TWO_RANKS, "megatron", MEGATRON["pp2-vpp2"]),
            ("megatron", MEGATRON[divided], "fsdp", TWO_RANKS),
        ):
            name = f"{family}-to-{second}"
            # Nightly: one family with experts goes from Megatron to FSDP every day, and the kit
            # compares all families with the oracle.
            marks = () if name == "deepseek_v3-to-fsdp" else pytest.mark.nightly
            yield pytest.param(family, (first, before), (second, after), id=name, marks=marks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "one", "other"), list(list_family_directions()))
def test_family_continues_in_the_other_engine(rank_pool, oracle, tmp_path, family, one, other):
    # The kit trains its families with this rate, too: rounding grows faster with a larger one.
    setup = oracle.make_setup(
        FAMILIES[family], optimizer=replace(ADAMW, lr=1e-3), schedule=SCHEDULE
    )
    check_continues(rank_pool, oracle, tmp_path, setup, one, other, family=family)


def check_continues(rank_pool, oracle, tmp_path, setup, one, other, *, family=None):
    """Compare three updates in one engine with two updates and a third in the other."""
    (first, before), (second, after) = one, other
    model = QWEN2_TIED if family is None else FAMILIES[family]
    tolerance = UPDATE
    if family is not None:
        # As in the kit, not tighter than the gradients.
        tolerance = max(UPDATE, get_family_gradient(family), key=lambda t: t.relative)
    batches = [oracle.get_batch(seed=seed, model=model) for seed in range(3)]

    def run(job, engine, layout, **arguments):
        return rank_pool.run(
            job, engine=engine, layout=layout, arguments={"setup": setup, **arguments}
        )

    uninterrupted = run(train_all, first, before, batches=batches)
    run(train_and_save, first, before, batches=batches[:2], folder=tmp_path, step=2)
    state, steps, lr = run(load_and_collect_state, second, after, folder=tmp_path)[0]
    assert_same_state(state, uninterrupted[0][1].state)
    assert (steps, lr) == (2, uninterrupted[0][1].next_lr)
    resumed = run(load_and_train, second, after, batches=batches[2:], folder=tmp_path)
    assert_close(
        merge_update_metrics([rank[-1] for rank in resumed])["loss"],
        merge_update_metrics([rank[2] for rank in uninterrupted])["loss"],
        LOSS,
        quantity="loss",
        min_scale=LOSS_TERM_SCALE,
    )
    assert_close(
        resumed[0][-1].grad_norm, uninterrupted[0][2].grad_norm, tolerance, quantity="gradient norm"
    )
    assert_all_close(
        resumed[0][-1].masters,
        uninterrupted[0][2].masters,
        UPDATE,
        quantity="weights after the next update",
    )


@pytest.mark.parametrize(("first", "second"), [("fsdp", "megatron"), ("megatron", "fsdp")])
def test_engine_without_optimizer_loads_only_the_weights(
    rank_pool, oracle, tmp_path, first, second
):
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=None)
    exported = [
        rank_pool.run(
            save_or_load_and_export,
            engine=engine,
            layout=ONE_RANK,
            arguments={"setup": setup, "folder": tmp_path, "saves": engine == first},
        )
        for engine in (first, second)
    ]
    assert exported[0][0].keys() == exported[1][0].keys()
    assert all(torch.equal(exported[0][0][name], tensor) for name, tensor in exported[1][0].items())


@pytest.mark.parametrize("optimizer", [None, ADAMW], ids=["weights", "training-state"])
@pytest.mark.parametrize(("first", "second"), [("fsdp", "megatron"), ("megatron", "fsdp")])
def test_biases_of_routers_continue_in_the_other_engine(
    rank_pool, oracle, tmp_path, first, second, optimizer
):
    # Its files have other names than its parameters in memory.
    setup = oracle.make_setup(FAMILIES["nemotron_h"], optimizer=optimizer)
    saved, loaded = (
        rank_pool.run(
            save_or_load_and_export,
            engine=engine,
            layout=ONE_RANK,
            arguments={"setup": setup, "folder": tmp_path, "saves": engine == first},
        )[0]
        for engine in (first, second)
    )
    (bias,) = (name for name in saved if name.endswith("e_score_correction_bias"))
    assert saved[bias].mean() > 0.1
    assert torch.equal(loaded[bias], saved[bias])


def save_or_load_and_export(rank, *, setup, folder, saves):
    """Change and save the weights, or load them; return the exported weights."""
    engine = rank.temporary_engine(setup)
    if saves:
        with engine.export_weights() as stream:
            engine.load_weights([weight._replace(tensor=weight.tensor + 0.25) for weight in stream])
        engine.save_checkpoint(str(folder), global_step=1)
    else:
        engine.load_checkpoint(str(folder))
    with engine.export_weights() as stream:
        return dict(stream)


def test_checkpoint_of_another_model_is_refused_before_anything_is_loaded(
    rank_pool, oracle, tmp_path
):
    saved, other = (
        oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW),
        oracle.make_setup(VALUE, optimizer=ADAMW),
    )
    batches = [oracle.get_batch()]
    path = rank_pool.run(
        train_and_save,
        engine="fsdp",
        layout=ONE_RANK,
        arguments={"setup": saved, "batches": batches, "folder": tmp_path, "step": 1},
    )[0]
    message = rank_pool.run(
        load_and_return_error,
        engine="megatron",
        layout=ONE_RANK,
        arguments={"setup": other, "path": path},
    )[0]
    assert "is that of another model or optimizer" in message
    assert "score.weight" in message


def load_and_return_error(rank, *, setup, path):
    """Return the error of load_checkpoint, after checking that the state did not change."""
    engine = rank.temporary_engine(setup)
    before = collect_state(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(path)
    assert_same_state(collect_state(engine), before)
    return str(caught.value)


def test_checkpoint_without_moments_is_refused(start, tmp_path):
    engine = start()
    part = tmp_path / "part"
    engine.write_part(str(part))
    (file,) = (part / "state").glob("*.safetensors")
    save_file(
        {name: tensor for name, tensor in load_file(file).items() if name.startswith("master.")},
        file,
    )
    with pytest.raises(CheckpointError, match="has weights without AdamW moments"):
        engine.read_part(str(part))
