"""Keys that were born, moved and died: at each stage what they mean here."""

import pytest

from temper_legacy_shim.configs import Outcome, Translation

from .conftest import pinned, rules_found, translated, values

MEGATRON = "ppo_megatron_trainer"


def last(translation: Translation) -> tuple[str, str]:
    """Return (disposition, rule) of the last token."""
    return translation.tokens[-1].disposition, translation.tokens[-1].rule


def drop_effect(version: str, *overrides: str, config_name: str | None = None) -> Translation:
    """Return the translation of settings that must not change the new configuration."""
    result = translated(version, *overrides, config_name=config_name)
    assert values(result) == values(translated(version, config_name=config_name))
    return result


@pytest.mark.parametrize("name", ["qkv_layer_name", "gate_proj_layer_name"])
def test_names_of_layers_are_dropped_while_a_megatron_tree_had_them(name: str) -> None:
    result = drop_effect(
        "v0.5.0", f"actor_rollout_ref.rollout.layer_name_map.{name}=other", config_name=MEGATRON
    )
    assert last(result) == ("dropped", "layer-name-map")
    assert "refused" not in rules_found(result, "refused")


@pytest.mark.parametrize(("version", "name"), [("v0.5.0", None), ("v0.8.0", MEGATRON)])
def test_names_of_layers_are_refused_where_the_tree_never_had_them_or_lost_them(
    version: str, name: str | None
) -> None:
    result = drop_effect(
        version, "actor_rollout_ref.rollout.layer_name_map.qkv_layer_name=qkv", config_name=name
    )
    assert last(result) == ("dropped", "layer-name-map")
    assert "refused" in rules_found(result, "refused")


def test_a_resource_pool_of_a_teacher_was_in_no_release_and_changes_nothing_that_is_learned() -> (
    None
):
    teacher = ("distillation.enabled=True", "+distillation.teacher_model.model_path=/models/t")
    result = translated("v0.8.0", *teacher, "+distillation.teacher_model.enable_resource_pool=True")
    assert last(result) == ("dropped", "resource-pool")
    assert result.tokens[-1].prs == "#5041 #6039"
    assert values(result) == values(translated("v0.8.0", *teacher))


def test_a_resource_pool_of_a_reward_model_is_its_old_placing() -> None:
    assert last(drop_effect("v0.6.0", "reward_model.enable_resource_pool=True")) == (
        "dropped",
        "reward-model-block",
    )
    assert last(drop_effect("v0.7.1", "reward.reward_model.enable_resource_pool=True")) == (
        "dropped",
        "reward-model-block",
    )


@pytest.mark.parametrize("version", ["v0.5.0", "v0.6.1", "v0.7.0", "v0.9.0"])
@pytest.mark.parametrize("uses", ["True", "False"])
def test_with_and_without_mbridge_the_same_weights_go_through_a_bridge(
    version: str, uses: str
) -> None:
    result = drop_effect(
        version, f"actor_rollout_ref.actor.megatron.use_mbridge={uses}", config_name=MEGATRON
    )
    assert last(result) == ("dropped", "mbridge")
    assert values(result)["model_engine"] == "megatron"


def test_which_bridge_it_was_makes_no_difference_and_before_v0_7_there_was_one() -> None:
    key = "actor_rollout_ref.actor.megatron.vanilla_mbridge=True"
    assert last(drop_effect("v0.8.0", key, config_name=MEGATRON)) == ("dropped", "mbridge")
    old = translated("v0.6.1", key, config_name=MEGATRON)
    assert last(old) == ("dropped", "mbridge")
    assert "refused" in rules_found(old, "refused")


def test_weights_that_were_converted_offline_are_read_from_the_models_folder() -> None:
    result = drop_effect(
        "v0.6.1",
        "actor_rollout_ref.actor.megatron.dist_checkpointing_path=/converted",
        config_name=MEGATRON,
    )
    assert "dist-weights" in rules_found(result, "hazard")


PROFILERS = [
    ("v0.4.1", "trainer.profile_steps=[1,2]"),
    ("v0.4.1", "trainer.worker_nsight_options.capture-range=cudaProfilerApi"),
    ("v0.4.1", "actor_rollout_ref.actor.profiler.discrete=True"),
    ("v0.4.1", "critic.profiler.ranks=[0]"),
    ("v0.5.0", "trainer.profile_steps=[1,2]"),
    ("v0.5.0", "actor_rollout_ref.profiler.all_ranks=True"),
    ("v0.5.0", "actor_rollout_ref.profiler.ranks=[0]"),
    ("v0.6.0", "global_profiler.steps=[1,2]"),
    ("v0.6.0", "global_profiler.tool=nsys"),
    ("v0.6.0", "actor_rollout_ref.actor.profiler.enable=True"),
    ("v0.6.0", "actor_rollout_ref.actor.profiler.tool_config.torch.step_start=0"),
    ("v0.7.0", "critic.profiler.tool_config.torch.step_end=2"),
    ("v0.9.0", "global_profiler.save_path=profiles"),
    ("v0.9.0", "actor_rollout_ref.ref.profiler.enable=True"),
]


@pytest.mark.parametrize(("version", "token"), PROFILERS)
def test_each_generation_of_the_profiler_is_dropped_where_it_lived(
    version: str, token: str
) -> None:
    result = drop_effect(version, token)
    assert last(result) == ("dropped", "profiler")
    assert "refused" not in rules_found(result, "refused")


@pytest.mark.parametrize(
    ("version", "token"),
    [
        ("v0.4.0", "trainer.profile_steps=[1]"),
        ("v0.6.0", "trainer.profile_steps=[1]"),
        ("v0.6.0", "actor_rollout_ref.profiler.discrete=True"),
        ("v0.5.0", "global_profiler.tool=nsys"),
        ("v0.7.1", "actor_rollout_ref.actor.profiler.tool_config.torch.step_start=0"),
    ],
)
def test_a_profiler_of_another_generation_is_refused_as_it_was_and_still_known(
    version: str, token: str
) -> None:
    result = drop_effect(version, token)
    assert last(result) == ("dropped", "profiler")
    assert "refused" in rules_found(result, "refused")


@pytest.mark.parametrize(
    ("version", "block"),
    [("v0.3.0.post1", "model.fsdp_config"), ("v0.7.1", "model.fsdp_config"), ("v0.8.0", "fsdp")],
)
def test_the_critics_block_moved_and_its_offload_is_carried_from_where_it_lay(
    version: str, block: str
) -> None:
    critic = ("algorithm.adv_estimator=gae", "critic.model.path=/models/q")
    result = translated(version, *critic, f"critic.{block}.param_offload=True")
    assert last(result) == ("moved", "param-offload")
    assert values(result)["critic.engine.offload.parameters"] is True
    assert "refused" not in rules_found(result, "refused")


@pytest.mark.parametrize("version", ["v0.7.1", "v0.8.0"])
@pytest.mark.parametrize("packs", ["True", "False"])
def test_padding_before_and_after_the_trees_were_united_gives_one_packed_engine(
    version: str, packs: str
) -> None:
    result = drop_effect(
        version, f"actor_rollout_ref.model.use_remove_padding={packs}", config_name=MEGATRON
    )
    assert last(result) == ("dropped", "remove-padding")


def test_turns_were_counted_as_one_in_v0_4_and_by_side_since() -> None:
    turns = "actor_rollout_ref.rollout.multi_turn"
    tools = (f"{turns}.enable=True", f"{turns}.format=hermes", f"{turns}.tool_config_path=t.yaml")
    one = translated("v0.4.0", *tools, f"{turns}.max_turns=4")
    two = translated("v0.5.0", *tools, f"{turns}.max_assistant_turns=4")
    assert values(one)["environment.max_turns"] == values(two)["environment.max_turns"] == 4


def test_the_worker_switch_was_born_in_v0_5_and_gone_in_v0_8() -> None:
    key = "trainer.use_legacy_worker_impl=disable"
    assert "refused" in rules_found(translated("v0.4.1", key), "refused")
    for version in ("v0.5.0", "v0.6.1", "v0.7.0", "v0.7.1"):
        result = translated(version, key)
        assert last(result) == ("dropped", "worker-switch")  # engines are what runs without a word
        assert "refused" not in rules_found(result, "refused")
    pins = translated("v0.7.0", "trainer.use_legacy_worker_impl=enable", numerics="legacy")
    assert (last(pins), values(pins)["use_legacy_worker_impl"]) == (
        ("mapped", "worker-switch"),
        "enable",
    )
    assert "refused" in rules_found(translated("v0.8.0", key), "refused")


def test_nothing_of_these_lives_is_pinned_in_a_run_that_never_reported_it() -> None:
    keys = pinned(translated("v0.6.1", config_name=MEGATRON))
    assert not any(
        word in key
        for key in keys
        for word in ("profil", "bridge", "layer_name", "pool", "padding")
    )


@pytest.mark.parametrize(("word", "every"), [("False", 0), ("True", 1)])
def test_a_frequency_may_be_a_truth_value_as_in_python(word: str, every: int) -> None:
    result = translated(
        "v0.7.0",
        f"trainer.test_freq={word}",
        f"trainer.save_freq={word}",
        "data.val_files=/data/test.parquet",
    )
    assert result.outcome is Outcome.PINNED
    assert [values(result).get(key, 0) for key in ("run.eval_every", "run.save_every")] == [
        every,
        every,
    ]


@pytest.mark.parametrize("overrides", [[], ["trainer.save_freq=-1"], ["trainer.save_freq=20"]])
def test_a_translated_run_does_not_save_by_time(overrides: list[str]) -> None:
    assert values(translated("v0.7.0", *overrides))["run.save_interval_s"] is None


def test_loggers_that_are_trackers_here_are_kept_and_others_reported() -> None:
    result = translated("v0.7.0", "trainer.logger=[console,mlflow,swanlab,trackio]")
    assert values(result)["run.trackers"] == ["jsonl", "mlflow", "trackio"]
    (message,) = (finding.message for finding in result.findings if finding.rule == "trackers")
    assert message.startswith("trainer.logger names swanlab, which is no tracker here")


TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"
TURNS = "actor_rollout_ref.rollout.multi_turn.max_turns"


def test_the_limit_of_turns_counts_where_its_release_read_it() -> None:
    result = translated("v0.4.0", TOOLS, f"{TURNS}=5")
    assert values(result)["environment.max_turns"] == 5
    assert last(result) == ("mapped", "max-turns")


@pytest.mark.parametrize("version", ["v0.4.1", "v0.7.0", "v0.9.0"])
def test_a_limit_of_turns_that_went_is_ignored_and_reported(version: str) -> None:
    result = translated(version, TOOLS, f"+{TURNS}=5")
    assert values(result) == values(translated(version, TOOLS))
    assert last(result) == ("ignored", "max-turns")
    assert any(
        f"{TURNS}=5 limited nothing" in item.message
        for item in result.findings
        if item.rule == "max-turns"
    )


@pytest.mark.parametrize("version", ["v0.4.0", "v0.7.0", "v0.9.0"])
def test_offload_policy_is_fsdp2s_only(version: str) -> None:
    key, new = (
        "actor_rollout_ref.actor.fsdp_config.offload_policy",
        "actor.engine.offload.parameters",
    )
    result = translated(version, "actor_rollout_ref.actor.strategy=fsdp2", f"{key}=True")
    assert values(result)[new] is True
    ignored = drop_effect(version, f"{key}=True")
    assert new not in values(ignored)
    assert last(ignored) == ("ignored", "offload-policy")
    assert any(
        "FSDP1, which this role trains with, never read it" in item.message
        for item in ignored.findings
    )


def test_megatron_has_no_offload_policy() -> None:
    result = drop_effect(
        "v0.7.0", "+actor_rollout_ref.actor.megatron.offload_policy=True", config_name=MEGATRON
    )
    assert last(result) == ("ignored", "offload-policy")


def test_offload_policy_of_fine_tuning_is_fsdp2s_only() -> None:
    base = ("data.train_files=/data/train.parquet", "model.path=/models/q")
    options = {"base": base, "entry": "verl.trainer.sft_trainer"}
    new = "actor.engine.offload.parameters"
    assert (
        values(
            translated("v0.9.0", "engine.strategy=fsdp2", "engine.offload_policy=True", **options)
        )[new]
        is True
    )
    ignored = translated("v0.9.0", "engine.strategy=fsdp", "engine.offload_policy=True", **options)
    assert new not in values(ignored)
    assert "sft-offload" in rules_found(ignored, "hazard")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            [],
            (
                "trainer.use_v1=True (the default) ran the second trainer, with "
                "trainer.v1.trainer_mode=sync"
            ),
        ),
        (["trainer.use_v1=True"], "trainer.use_v1=True (written) ran the second trainer"),
        (
            ["trainer.use_v1=False"],
            (
                "trainer.use_v1=False (written) ran the trainer that main_ppo had before v0.9.0 "
                "(main_ppo_v0)"
            ),
        ),
    ],
)
def test_trap_g_the_original_trainer_is_recorded(overrides: list[str], sentence: str) -> None:
    result = drop_effect("v0.9.0", *overrides)
    message = next(item.message for item in result.findings if item.rule == "trainer-generation")
    assert message.startswith(sentence)
    assert "loop=sync here samples with the newest weights" in message


def test_trap_g_is_of_v0_9_and_of_its_own_program() -> None:
    assert "trainer-generation" not in rules_found(translated("v0.8.0"), "note")
    other = translated("v0.9.0", entry="verl.experimental.one_step_off_policy.main_ppo")
    assert "trainer-generation" not in rules_found(other, "note")


def test_trap_g_a_mode_that_samples_ahead_is_a_persons_to_decide() -> None:
    result = drop_effect("v0.9.0", "trainer.v1.trainer_mode=separate_async")
    assert "trainer-generation" in rules_found(result, "person")
    without = translated("v0.9.0", "trainer.v1.trainer_mode=separate_async", "trainer.use_v1=False")
    assert "trainer-generation" not in rules_found(without, "person")


@pytest.mark.parametrize(
    ("version", "refuses"), [("v0.6.1", False), ("v0.7.0", True), ("v0.9.0", True)]
)
def test_synchronous_servers_were_refused_since_v0_7(version: str, refuses: bool) -> None:
    result = translated(version, "actor_rollout_ref.rollout.mode=sync")
    assert ("rollout-mode" in rules_found(result, "refused")) is refuses
    assert "rollout-mode" not in rules_found(
        translated(version, "actor_rollout_ref.rollout.mode=async"), "refused"
    )


@pytest.mark.parametrize(
    ("version", "word", "refuses"),
    [
        ("v0.6.1", None, False),
        ("v0.7.0", None, False),
        ("v0.7.0", "disable", True),
        ("v0.7.1", "enable", False),
        ("v0.8.0", None, True),
    ],
)
def test_megatrons_engine_refused_to_go_without_a_bridge(
    version: str, word: str | None, refuses: bool
) -> None:
    switch = [f"trainer.use_legacy_worker_impl={word}"] if word else []
    off = "actor_rollout_ref.actor.megatron.use_mbridge=False"
    result = translated(version, *switch, off, config_name=MEGATRON)
    assert ("mbridge" in rules_found(result, "refused")) is refuses
    assert "mbridge" not in rules_found(
        translated(version, *switch, config_name=MEGATRON), "refused"
    )
