"""Warnings about settings that changed since the last start of a run."""

from collections.abc import Collection, Mapping

import pytest

from temper_trainer.config.resume_changes import describe_changes

LAYERS = "actor.engine.model.architecture.num_hidden_layers"


def list_warned_keys(*keys: str, has_checkpoint: bool, has_warm_start: bool) -> list[str]:
    before, after = dict.fromkeys(keys, 1), dict.fromkeys(keys, 2)
    parts = ("actor", "critic", "ref", "trainer") if has_checkpoint else ()
    return list_warnings(before, after, restored_parts=parts, has_warm_start=has_warm_start)


def list_warnings(
    before: Mapping[str, object],
    after: Mapping[str, object],
    *,
    restored_parts: Collection[str] = (),
    has_warm_start: bool = False,
    has_saved_tokenizer: bool = False,
) -> list[str]:
    lines = describe_changes(
        before,
        after,
        restored_parts=restored_parts,
        has_warm_start_model=has_warm_start,
        has_saved_tokenizer=has_saved_tokenizer,
    )
    return [line.split()[1] for line in lines if "has no effect on a resumed run" in line]


def test_architecture_has_no_effect_after_a_warm_start_with_or_without_a_checkpoint() -> None:
    for has_checkpoint in (False, True):
        assert list_warned_keys(LAYERS, has_checkpoint=has_checkpoint, has_warm_start=True) == [
            LAYERS
        ]


def test_architecture_has_an_effect_without_a_warm_start() -> None:
    # The engine builds the changed model, and refuses a checkpoint whose tensors do not fit.
    assert not list_warned_keys(LAYERS, has_checkpoint=True, has_warm_start=False)


def test_scale_of_new_weights_has_no_effect_with_a_checkpoint() -> None:
    key = "actor.engine.model.architecture.initializer_range"
    assert list_warned_keys(key, has_checkpoint=True, has_warm_start=False) == [key]
    assert not list_warned_keys(key, has_checkpoint=False, has_warm_start=False)


def test_initial_loss_scale_has_no_effect_with_a_checkpoint_that_has_one() -> None:
    key, compute = (f"actor.engine.precision.{n}" for n in ("initial_loss_scale", "compute"))
    before: dict[str, object] = {key: 1024.0, compute: "fp16"}
    after = before | {key: 64.0}
    parts = ("actor", "trainer")
    assert list_warnings(before, after, restored_parts=parts) == [key]
    assert not list_warnings(before, after)
    # A checkpoint of bf16 has no scale.
    assert not list_warnings({compute: "bf16"}, after, restored_parts=parts)


def test_finished_warm_start_is_not_repeated_even_without_a_checkpoint() -> None:
    keys = ("actor.engine.model.seed", "algorithm.entropy_coef", "warm_start.total_steps")
    assert list_warned_keys(*keys, has_checkpoint=False, has_warm_start=True) == [
        "actor.engine.model.seed",
        "warm_start.total_steps",
    ]
    assert not list_warned_keys(*keys, has_checkpoint=False, has_warm_start=False)


def test_seed_of_a_critic_has_an_effect_until_the_first_checkpoint() -> None:
    # The warm start's model has no value head: the critic draws one.
    key = "critic.engine.model.seed"
    assert not list_warned_keys(key, has_checkpoint=False, has_warm_start=True)
    assert list_warned_keys(key, has_checkpoint=True, has_warm_start=True) == [key]


def test_seed_of_a_new_adapter_has_an_effect_until_the_first_checkpoint() -> None:
    before: dict[str, object] = {"actor.engine.lora.rank": 8, "actor.engine.model.seed": 0}
    for has_checkpoint in (False, True):
        warnings = list_warnings(
            before,
            before | {"actor.engine.model.seed": 1},
            restored_parts=("actor", "trainer") if has_checkpoint else (),
            has_warm_start=True,
        )
        assert bool(warnings) == has_checkpoint


def test_architecture_of_a_removed_role_is_not_warned_about() -> None:
    before = {"critic.engine.model.architecture.num_hidden_layers": 4}
    assert not list_warnings(before, {"critic": None}, has_warm_start=True)


def test_each_key_is_warned_about_once() -> None:
    key = "actor.engine.model.seed"
    assert list_warned_keys(key, has_checkpoint=True, has_warm_start=True) == [key]


def test_path_of_a_model_that_the_checkpoint_lacks_has_an_effect() -> None:
    # Checkpoints of task dpo have the actor alone: the reference is loaded from its path again.
    keys = ("actor.engine.model.path", "ref.engine.model.path")
    before, after = dict.fromkeys(keys, "a"), dict.fromkeys(keys, "b")
    assert list_warnings(before, after, restored_parts=("actor", "trainer")) == [keys[0]]
    assert list_warnings(before, after, restored_parts=("actor", "ref", "trainer")) == list(keys)


def test_coefficient_has_an_effect_with_a_checkpoint_without_trainer_state() -> None:
    before, after = {"algorithm.entropy_coef": 0.0}, {"algorithm.entropy_coef": 0.1}
    assert not list_warnings(before, after, restored_parts=("actor",))
    assert list_warnings(before, after, restored_parts=("actor", "trainer"))


def test_path_has_no_effect_after_a_warm_start_for_copies_of_the_actors_model() -> None:
    keys = ("actor.engine.model.path", "ref.engine.model.path")
    before, after = dict.fromkeys(keys, "a"), dict.fromkeys(keys, "b")
    assert list_warnings(before, after, has_warm_start=True) == list(keys)
    other = before | {"ref.engine.model.path": "c"}
    assert list_warnings(before, other, has_warm_start=True) == []
    assert list_warnings(other, before, has_warm_start=True) == []


@pytest.mark.parametrize("key", ["data.tokenizer.vocab_size", "data.tokenizer.path"])
def test_settings_of_the_tokenizer_have_no_effect_once_weights_were_trained(key: str) -> None:
    assert list_warnings({key: 1}, {key: 2}) == []
    assert list_warnings({key: 1}, {key: 2}, has_saved_tokenizer=True) == [key]


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"task": "rl", "warm_start": None}, False),
        ({"task": "sft"}, True),
        ({"task": "rl", "warm_start.total_steps": 5}, True),
    ],
)
def test_streaming_changes_the_order_of_demonstrations_only(
    settings: dict[str, object], warns: bool
) -> None:
    lines = describe_changes(
        {**settings, "data.streaming": False},
        {**settings, "data.streaming": True},
        restored_parts=("actor", "trainer"),
        has_warm_start_model=False,
        has_saved_tokenizer=False,
    )
    assert any("the training data or their order changed" in line for line in lines) == warns
