"""Warnings about settings that changed since the last start of a run."""

from temper_trainer.config.resume_changes import describe_changes

LAYERS = "actor.engine.model.architecture.num_hidden_layers"


def list_warned_keys(*keys: str, has_checkpoint: bool, has_warm_start: bool) -> list[str]:
    lines = describe_changes(
        dict.fromkeys(keys, 1),
        dict.fromkeys(keys, 2),
        has_checkpoint=has_checkpoint,
        has_warm_start_model=has_warm_start,
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
        lines = describe_changes(
            before,
            before | {"actor.engine.model.seed": 1},
            has_checkpoint=has_checkpoint,
            has_warm_start_model=True,
        )
        assert any("has no effect" in line for line in lines) == has_checkpoint


def test_architecture_of_a_removed_role_is_not_warned_about() -> None:
    before = {"critic.engine.model.architecture.num_hidden_layers": 4}
    lines = describe_changes(
        before, {"critic": None}, has_checkpoint=False, has_warm_start_model=True
    )
    assert not any("has no effect" in line for line in lines)


def test_each_key_is_warned_about_once() -> None:
    key = "actor.engine.model.seed"
    assert list_warned_keys(key, has_checkpoint=True, has_warm_start=True) == [key]
