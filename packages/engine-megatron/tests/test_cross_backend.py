"""Test that each engine continues a checkpoint of the other.

Weights, moments, counts and schedule are equal bit for bit, the next loss up to rounding.
"""

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
)
from temper_engine_api.conformance.inputs.tiny_adapters import TinyAdapter
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, QWEN2_TIED, VALUE
from temper_engine_api.errors import CheckpointError
from temper_engine_api.layout import default_layout
from temper_engine_api.registry import load_conformance_layouts
from temper_engine_api.specs import LoraSpec, ScheduleSpec
from temper_engine_megatron.huggingface.weight_names import split_saved_experts

pytest.importorskip(
    "temper_engine_fsdp", reason="the other engine is not installed: pip install temper-engine-fsdp"
)

ALONE, TWO = default_layout(1), default_layout(2)
MEGATRON = {layout.name: layout for layout in load_conformance_layouts("megatron")}
SCHEDULE = ScheduleSpec(kind="cosine", warmup_steps=1, total_steps=6)
WAYS = [
    pytest.param("fsdp", TWO, "megatron", MEGATRON["pp2"], id="fsdp-to-pp2"),
    pytest.param("megatron", MEGATRON["tp2"], "fsdp", TWO, id="tp2-to-fsdp"),
    pytest.param("fsdp", ALONE, "megatron", MEGATRON["dp2-distopt"], id="fsdp-to-distopt"),
    pytest.param(
        "megatron",
        MEGATRON["pp2-vpp2"],
        "fsdp",
        ALONE,
        id="vpp2-to-fsdp",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "megatron", MEGATRON["cp2"], "fsdp", TWO, id="cp2-to-fsdp", marks=pytest.mark.nightly
    ),
]


def train_all(rank, *, setup, batches) -> list[Update]:
    """Without a stop."""
    return train(rank.temporary_engine(setup), batches)


def state_after_loading(rank, *, setup, folder):
    """As it was saved, and what the schedule counts."""
    engine = rank.temporary_engine(setup)
    engine.load_checkpoint(str(folder))
    return collect_state(engine), engine.num_schedule_steps, engine.current_lr


@pytest.mark.parametrize(("first", "before", "second", "after"), WAYS)
def test_a_run_goes_on_in_the_other_engine(
    rank_pool, oracle, tmp_path, first, before, second, after
):
    setup = oracle.make_setup(QWEN2_TIED, optimizer=ADAMW, schedule=SCHEDULE)
    check_goes_on(rank_pool, oracle, tmp_path, setup, (first, before), (second, after))


@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        pytest.param("megatron", MEGATRON["ep2"], "fsdp", TWO, id="ep2-to-fsdp"),
        pytest.param("fsdp", TWO, "megatron", MEGATRON["ep2"], id="fsdp-to-ep2"),
        pytest.param(
            "fsdp", ALONE, "megatron", MEGATRON["pp2"], id="fsdp-to-pp2", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_mixture_of_experts_goes_on_in_the_other_engine(
    rank_pool, oracle, tmp_path, first, before, second, after
):
    moe_oracle = oracle.with_experts()
    setup = moe_oracle.make_setup(QWEN2_TIED, optimizer=ADAMW, schedule=SCHEDULE)
    check_goes_on(rank_pool, moe_oracle, tmp_path, setup, (first, before), (second, after))


def test_joined_experts_of_a_checkpoint_are_read_once_and_come_apart_by_their_names_in_files():
    asked = []
    joined = {
        "gate_up_proj": torch.arange(24.0).view(2, 4, 3),
        "down_proj": torch.arange(12.0).view(2, 3, 2),
    }

    def read(kind, name):
        asked.append((kind, name))
        return (
            torch.tensor(7)
            if kind == COUNT
            else joined[name.rpartition(".")[2]] + (0.5 if kind == FIRST else 0)
        )

    shapes = {f"layer.mlp.experts.{kind}": tuple(tensor.shape) for kind, tensor in joined.items()}
    saved = split_saved_experts(
        SavedState(directory="here", weights=shapes, has_moments=True, read=read)
    )
    found = {state.name: state for state in saved.iterate_state()}
    assert [(name, tuple(state.master.shape)) for name, state in found.items()] == list(
        saved.weights.items()
    )
    # Expert 1 begins at 1 x 4 x 3 = 12, its up-projection two rows of 3 later.
    assert torch.equal(
        found["layer.mlp.experts.1.up_proj.weight"].first_moment,
        torch.arange(18.0, 24.0).view(2, 3) + 0.5,
    )
    assert torch.equal(found["layer.mlp.experts.1.down_proj.weight"].master, joined["down_proj"][1])
    assert {state.update_count for state in found.values()} == {7}
    read_whole = [question for question in asked if question[0] != COUNT]
    assert len(read_whole) == len(set(read_whole)) == 6


@pytest.mark.parametrize(("first", "before", "second", "after"), WAYS[:2])
def test_an_adapter_goes_on_in_the_other_engine(
    rank_pool, oracle, tmp_path, first, before, second, after
):
    adapter = TinyAdapter(
        name="crossing",
        model=QWEN2_TIED,
        fields={"use_dora": True, "use_rslora": True, "exclude_modules": ["lm_head"]},
    )
    setup = oracle.make_adapter_setup(adapter, optimizer=ADAMW, schedule=SCHEDULE)
    check_goes_on(rank_pool, oracle, tmp_path, setup, (first, before), (second, after))


@pytest.mark.skipif(
    "target_parameters" not in LoraSpec.__dataclass_fields__,
    reason="needs an engine-api with adapters inside experts",
)
@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        pytest.param("fsdp", TWO, "megatron", MEGATRON["ep2"], id="fsdp-to-ep2"),
        pytest.param(
            "megatron", MEGATRON["ep2"], "fsdp", ALONE, id="ep2-to-fsdp", marks=pytest.mark.nightly
        ),
    ],
)
def test_an_adapter_inside_experts_goes_on_in_the_other_engine(
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
    check_goes_on(rank_pool, moe_oracle, tmp_path, setup, (first, before), (second, after))


def check_goes_on(rank_pool, oracle, tmp_path, setup, one, other):
    """Three updates in one engine, and two followed by one in the other."""
    (first, before), (second, after) = one, other
    batches = [oracle.get_batch(seed=seed, model=QWEN2_TIED) for seed in range(3)]

    def run(job, engine, layout, **arguments):
        return rank_pool.run(
            job, engine=engine, layout=layout, arguments={"setup": setup, **arguments}
        )

    whole = run(train_all, first, before, batches=batches)
    run(train_and_save, first, before, batches=batches[:2], folder=tmp_path, step=2)
    state, steps, lr = run(state_after_loading, second, after, folder=tmp_path)[0]
    assert_same_state(state, whole[0][1].state)
    assert (steps, lr) == (2, whole[0][1].next_lr)
    resumed = run(load_and_train, second, after, batches=batches[2:], folder=tmp_path)
    assert_close(
        merge_update_metrics([rank[-1] for rank in resumed])["loss"],
        merge_update_metrics([rank[2] for rank in whole])["loss"],
        LOSS,
        quantity="loss",
        min_scale=LOSS_TERM_SCALE,
    )
    assert_close(resumed[0][-1].grad_norm, whole[0][2].grad_norm, UPDATE, quantity="gradient norm")
    assert_all_close(
        resumed[0][-1].masters,
        whole[0][2].masters,
        UPDATE,
        quantity="weights after the next update",
    )


@pytest.mark.parametrize(("first", "second"), [("fsdp", "megatron"), ("megatron", "fsdp")])
def test_a_frozen_model_takes_the_weights_alone(rank_pool, oracle, tmp_path, first, second):
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=None)
    exported = [
        rank_pool.run(
            weights_around_a_save,
            engine=engine,
            layout=ALONE,
            arguments={"setup": setup, "folder": tmp_path, "saves": engine == first},
        )
        for engine in (first, second)
    ]
    assert exported[0][0].keys() == exported[1][0].keys()
    assert all(torch.equal(exported[0][0][name], tensor) for name, tensor in exported[1][0].items())


def weights_around_a_save(rank, *, setup, folder, saves):
    """Weights that are no longer those on the disk of the model, saved; or as loaded."""
    engine = rank.temporary_engine(setup)
    if saves:
        with engine.export_weights() as stream:
            engine.load_weights([weight._replace(tensor=weight.tensor + 0.25) for weight in stream])
        engine.save_checkpoint(str(folder), global_step=1)
    else:
        engine.load_checkpoint(str(folder))
    with engine.export_weights() as stream:
        return dict(stream)


def test_another_model_is_refused_before_the_first_tensor_is_read(rank_pool, oracle, tmp_path):
    saved, other = (
        oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW),
        oracle.make_setup(VALUE, optimizer=ADAMW),
    )
    batches = [oracle.get_batch()]
    path = rank_pool.run(
        train_and_save,
        engine="fsdp",
        layout=ALONE,
        arguments={"setup": saved, "batches": batches, "folder": tmp_path, "step": 1},
    )[0]
    sentence = rank_pool.run(
        refusal, engine="megatron", layout=ALONE, arguments={"setup": other, "path": path}
    )[0]
    assert "is that of another model or optimizer" in sentence
    assert "score.weight" in sentence


def refusal(rank, *, setup, path):
    """What the engine says, whose weights are then what they were."""
    engine = rank.temporary_engine(setup)
    before = collect_state(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(path)
    assert_same_state(collect_state(engine), before)
    return str(caught.value)


def test_weights_without_moments_do_not_resume_a_training(start, tmp_path):
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
