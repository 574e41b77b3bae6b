"""Batch arithmetic, recomputed by hand."""

import pytest

from temper_legacy_shim.configs import Cluster, Outcome, Translation
from temper_legacy_shim.configs.translation import Setting

from .conftest import rules_found, translated, values

GLOBAL = "actor_rollout_ref.actor.ppo_micro_batch_size"


def test_a_global_micro_batch_is_divided_by_the_data_parallel_ranks() -> None:
    sizes = (
        "data.max_prompt_length=100",
        "data.max_response_length=156",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
    )
    result = values(translated("v0.3.0.post1", *sizes, f"{GLOBAL}=32"))
    assert result["batching.max_tokens"] == 4 * 256  # 32 over 8 ranks, 256 tokens each
    shared = values(
        translated(
            "v0.3.0.post1",
            *sizes,
            f"{GLOBAL}=32",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        )
    )
    assert shared["batching.max_tokens"] == 8 * 256  # 8 ranks in pairs are 4


def test_megatron_divides_by_tensor_pipeline_and_context_ranks_too() -> None:
    layout = ("tensor_model_parallel_size=2", "pipeline_model_parallel_size=2")
    overrides = [f"actor_rollout_ref.actor.megatron.{item}" for item in layout]
    sizes = (
        "data.max_prompt_length=100",
        "data.max_response_length=156",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
    )
    result = values(
        translated(
            "v0.5.0", *overrides, *sizes, f"{GLOBAL}=8", config_name="ppo_megatron_trainer.yaml"
        )
    )
    assert result["batching.max_tokens"] == 4 * 256  # 8 ranks / (2 x 2) = 2, 8 / 2 = 4 sequences
    assert result["model_engine"] == "megatron"


def test_a_token_budget_is_times_the_ranks_that_split_a_sequence() -> None:
    budget = (
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4000",
    )
    result = values(
        translated("v0.7.0", *budget, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    )
    assert result["batching.max_tokens"] == 8000


def test_a_budget_below_the_longest_sample_is_raised_and_reported() -> None:
    budget = (
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
    )
    result = translated("v0.7.0", *budget)
    assert values(result)["batching.max_tokens"] == 1024  # 512 + 512
    assert "token-budget" in rules_found(result, "hazard")


def test_what_the_ranks_do_not_divide_is_refused_as_it_was() -> None:
    result = translated("v0.7.0", cluster=Cluster(nodes=1, gpus_per_node=7))
    assert "batch-divides" in rules_found(result, "person")
    message = next(
        finding.message for finding in result.findings if finding.rule == "batch-divides"
    )
    assert "64 x 4 = 256, which 7 data-parallel ranks do not divide" in message


def test_copies_of_the_model_that_do_not_fill_the_ranks_ask_as_the_old_workers_failed() -> None:
    shared = translated(
        "v0.4.0",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
        "trainer.n_gpus_per_node=2",
    )
    assert "layout-divides" in rules_found(shared, "person")
    sizes = (
        "tensor_model_parallel_size=4",
        "expert_model_parallel_size=4",
        "expert_tensor_parallel_size=1",
    )
    for gpus, is_requested in ((4, False), (6, True)):
        overrides = [f"actor_rollout_ref.actor.megatron.{item}" for item in sizes]
        result = translated(
            "v0.6.1",
            *overrides,
            config_name="ppo_megatron_trainer.yaml",
            cluster=Cluster(nodes=1, gpus_per_node=gpus),
        )
        assert ("layout-divides" in rules_found(result, "person")) is is_requested
    experts = ("actor_rollout_ref.actor.megatron.expert_model_parallel_size=3",)
    assert "layout-divides" in rules_found(
        translated("v0.6.1", *experts, config_name="ppo_megatron_trainer.yaml"), "person"
    )
    unknown = translated(
        "v0.4.0",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
        "trainer.n_gpus_per_node=$N",
    )
    assert "layout-divides" not in rules_found(unknown, "person")


def test_a_model_that_is_sharded_over_more_ranks_than_there_are_is_sharded_over_all() -> None:
    key = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    assert values(translated("v0.5.0", f"{key}=4"))["actor.engine.fsdp_size"] == 4
    assert "actor.engine.fsdp_size" not in values(translated("v0.5.0", f"{key}=32"))
    assert "layout-divides" in rules_found(translated("v0.5.0", f"{key}=3"), "person")


def test_mini_batches_that_were_rounded_down_are_reported() -> None:
    result = translated(
        "v0.7.0", "actor_rollout_ref.actor.ppo_mini_batch_size=17", "data.train_batch_size=34"
    )
    assert "mini-batch-floor" in rules_found(
        result, "hazard"
    )  # 17 x 4 = 68 over 8 ranks is 8 each, 64 in all


def test_mini_batches_that_leave_a_rest_are_reported() -> None:
    result = translated("v0.7.0", "data.train_batch_size=40")
    assert values(result)["batching.num_mini_batches"] == 3  # 16, 16 and 8 prompts
    assert "made 3 updates, the last one of 8 prompts" in _messages(result, "mini-batches")


def test_a_critics_global_micro_batch_counts_although_the_other_key_followed_it() -> None:
    critic = (
        "algorithm.adv_estimator=gae",
        "critic.model.path=/models/q",
        "critic.ppo_micro_batch_size=8",
        "trainer.n_gpus_per_node=4",
    )
    result = translated("v0.7.1", *critic)
    assert result.outcome is not Outcome.PERSON
    assert "micro-batch-both" in rules_found(result, "refused")
    assert {token.disposition for token in result.tokens} & {"conflict", "needs a person"} == set()


def test_both_sizes_of_a_micro_batch_are_a_conflict() -> None:
    assert "micro-batch-both" in rules_found(translated("v0.5.0", f"{GLOBAL}=8"), "person")


def test_steps_between_two_weight_syncs_are_one_step_of_an_asynchronous_run() -> None:
    keys = (
        "async_training.require_batches=2",
        "async_training.trigger_parameter_sync_step=4",
        "rollout.total_rollout_steps=2560",
    )
    result = values(
        translated(
            "v0.7.0",
            *keys,
            "data.train_batch_size=0",
            entry="verl.experimental.fully_async_policy.fully_async_main",
        )
    )
    assert result["batching.prompts_per_step"] == 16 * 2 * 4
    assert result["batching.num_mini_batches"] == 8
    assert result["run.total_steps"] == 20  # 2560 / 128
    assert result["loop"] == "async"


def test_dapo_without_its_filter_takes_the_generated_batch_as_the_step() -> None:
    overrides = ("data.gen_batch_size=48", "algorithm.filter_groups.enable=False")
    assert (
        values(translated("v0.5.0", *overrides, entry="recipe.dapo.main_dapo"))[
            "batching.prompts_per_step"
        ]
        == 48
    )
    filtered = values(
        translated(
            "v0.5.0",
            "data.gen_batch_size=48",
            "algorithm.filter_groups.enable=True",
            entry="recipe.dapo.main_dapo",
        )
    )
    assert filtered["batching.prompts_per_step"] == 64
    assert filtered["algorithm.dynamic_sampling.prompts_per_round"] == 48


MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
GENERATED = "+data.gen_batch_size=128"


@pytest.mark.parametrize(
    ("version", "overrides", "entry", "prompts"),
    [
        ("v0.3.0.post1", [GENERATED], "verl.trainer.main_ppo", 64),
        ("v0.4.0", [GENERATED], "verl.trainer.main_ppo", 128),
        ("v0.8.0", [GENERATED], "verl.trainer.main_ppo", 128),
        (
            "v0.8.0",
            [GENERATED, "+algorithm.filter_groups.enable=True"],  # which this trainer did not read
            "verl.trainer.main_ppo",
            128,
        ),
        ("v0.7.0", [GENERATED], "recipe.one_step_off_policy.main_ppo", 128),
        ("v0.9.0", [GENERATED, "trainer.use_v1=False"], "verl.trainer.main_ppo", 128),
        ("v0.9.0", ["data.gen_batch_size=32"], "verl.trainer.main_ppo", 64),
    ],
)
def test_generated_batch_is_the_step_of_the_first_trainer_since_v0_4(
    version: str, overrides: list[str], entry: str, prompts: int
) -> None:
    result = values(translated(version, *overrides, entry=entry))
    assert result["batching.prompts_per_step"] == prompts
    assert result["batching.num_mini_batches"] == prompts // 16


def test_step_of_a_generated_batch_names_the_key_that_set_it() -> None:
    result = translated("v0.7.0", GENERATED, "data.train_batch_size=32", f"{MINI}=48")
    token = next(item for item in result.tokens if item.text == "data.train_batch_size=32")
    assert token.disposition == "dropped"
    assert token.reason == "The data loader of v0.7.0 took data.gen_batch_size prompts for a step."
    (remainder,) = (item for item in result.findings if item.rule == "mini-batches")
    assert remainder.old_keys == ("data.gen_batch_size", MINI)
    (note,) = (item for item in result.findings if item.rule == "prompts-per-step")
    assert note.message == (
        "the data loader of v0.7.0 took data.gen_batch_size=128 prompts for a step, not the 32 of "
        "data.train_batch_size. So does the translation."
    )


def test_generated_batch_that_the_ranks_do_not_divide_is_named() -> None:
    result = translated("v0.7.0", "data.gen_batch_size=3", "actor_rollout_ref.rollout.n=1")
    (message,) = (item.message for item in result.findings if item.rule == "batch-divides")
    assert message.startswith("data.gen_batch_size x rollout.n is 3 x 1 = 3")


def test_second_trainer_refused_a_generated_batch_that_does_not_divide_the_step() -> None:
    result = translated("v0.9.0", "data.gen_batch_size=48")
    (message,) = (item.message for item in result.findings if item.rule == "gen-batch")
    assert message.startswith("data.gen_batch_size is 48, which does not divide")
    divides = translated("v0.9.0", "data.gen_batch_size=16")
    assert "gen-batch" not in rules_found(divides, "refused")


def test_second_trainer_filled_filtered_batches_one_prompt_at_a_time() -> None:
    result = translated("v0.9.1", "data.gen_batch_size=48", "algorithm.filter_groups.enable=True")
    assert "algorithm.dynamic_sampling.prompts_per_round" not in values(result)
    (token,) = (item for item in result.tokens if "gen_batch_size" in item.text)
    assert token.reason == "With a filter, the second trainer of v0.9.1 always took 1."
    one = translated("v0.9.1", "data.gen_batch_size=1", "algorithm.filter_groups.enable=True")
    (token,) = (item for item in one.tokens if "gen_batch_size" in item.text)
    assert "always took 1" in token.reason


def test_epochs_that_dynamic_sampling_uses_up_are_reported() -> None:
    overrides = (
        "data.gen_batch_size=192",
        "algorithm.filter_groups.enable=True",
        "trainer.total_epochs=2",
    )
    dapo = "recipe.dapo.main_dapo"
    result = translated("v0.7.0", *overrides, entry=dapo)
    (message,) = (item.message for item in result.findings if item.rule == "total-epochs")
    assert "which has 2 x (rows // 64) steps" in message
    # A step took one or more rounds, so the number of rounds is only a bound.
    assert "made at most 2 x (rows // 192) steps, and fewer if" in message
    assert message.endswith("Its log has the number: set run.total_steps to it.")
    # The second trainer counted an epoch's steps by data.train_batch_size, as Temper does.
    newer = translated("v0.9.1", *overrides[1:])
    counted = translated("v0.7.0", *overrides, "trainer.total_training_steps=9", entry=dapo)
    for quiet in (newer, counted):
        assert "total-epochs" not in rules_found(quiet, "hazard")


def test_a_rate_that_a_schedule_falls_to_becomes_a_fraction_of_its_peak() -> None:
    optim = [
        f"actor_rollout_ref.actor.optim.{item}"
        for item in ("lr=1e-5", "min_lr=1e-6", "lr_decay_style=cosine", "lr_decay_steps=50")
    ]
    result = values(translated("v0.6.1", *optim, config_name="ppo_megatron_trainer"))
    assert result["actor.engine.schedule.kind"] == "cosine"
    assert abs(float(str(result["actor.engine.schedule.min_lr_ratio"])) - 0.1) < 1e-12
    assert result["actor.engine.schedule.total_steps"] == 50


def test_no_clipping_and_the_home_folder_are_reported_in_our_words() -> None:
    clip, files = (
        "actor_rollout_ref.actor.optim.clip_grad=0.0",
        "data.train_files=~/data/gsm8k/train.parquet",
    )
    result = values(translated("v0.6.1", clip, files, config_name="ppo_megatron_trainer"))
    assert result["actor.engine.optimizer.clip_grad_norm"] is None
    assert result["data.train.paths"] == ["${oc.env:HOME}/data/gsm8k/train.parquet"]


def test_recomputation_and_the_balance_of_experts_go_to_the_engine() -> None:
    block = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    requested = (
        f"{block}.recompute_granularity=full",
        f"{block}.recompute_method=uniform",
        f"{block}.moe_aux_loss_coeff=0.01",
    )
    experts = (
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4",
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1",
    )
    result = values(translated("v0.7.0", *requested, *experts, config_name="ppo_megatron_trainer"))
    assert result["actor.engine.recompute"] == "layers"
    assert result["actor.engine.router_aux_loss"] == 0.01
    assert (
        result["actor.engine.expert_parallel"],
        result["actor.engine.expert_tensor_parallel"],
    ) == (4, 1)


def test_a_server_keeps_its_gpus_if_those_of_a_host_are_a_multiple() -> None:
    size = "actor_rollout_ref.rollout.tensor_model_parallel_size=4"
    shared = translated("v0.7.0", size, "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    assert "rollout.vllm.tensor_parallel_size=4" in shared.overrides
    assert values(shared)["rollout.num_replicas"] == 4
    assert "rollout-tp" not in rules_found(shared, "hazard")
    uneven = translated("v0.7.0", size, "trainer.n_gpus_per_node=6", "trainer.nnodes=2")
    assert "rollout.vllm.tensor_parallel_size=1" in uneven.overrides
    assert values(uneven)["rollout.num_replicas"] == 12
    assert "rollout-tp" in rules_found(uneven, "hazard")
    apart = translated(
        "v0.7.0",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "rollout.nnodes=1",
        "rollout.n_gpus_per_node=8",
        entry="recipe.one_step_off_policy.main_ppo",
    )
    assert (
        values(apart)["rollout.vllm.tensor_parallel_size"],
        values(apart)["rollout.num_replicas"],
    ) == (4, 2)
    assert "rollout-tp" not in rules_found(apart, "hazard")


def _messages(result: Translation, rule: str) -> str:
    return next(finding.message for finding in result.findings if finding.rule == rule)


def _max_tokens(*overrides: str, **options: object) -> Setting:
    budget = (
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4000",
    )
    result = translated("v0.7.0", *budget, *overrides, **options)
    return next(setting for setting in result.settings if setting.key == "batching.max_tokens")


def test_sizes_that_divide_are_not_talked_about() -> None:
    # 64 prompts are 4 mini-batches of 16; 16 x 4 = 64 completions are 8 for each of 8 ranks, or 4
    # micro-batches of 2.
    result = translated("v0.7.0")
    reported = {"mini-batches", "mini-batch-floor", "batch-divides", "micro-batch-divides"}
    assert not reported & {finding.rule for finding in result.findings}


def test_only_a_mini_batch_above_the_step_was_refused() -> None:
    result = {
        mini: translated("v0.7.0", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}")
        for mini in (64, 65)
    }
    assert [values(each)["batching.num_mini_batches"] for each in result.values()] == [1, 1]
    assert ["mini-batches" in rules_found(each, "refused") for each in result.values()] == [
        False,
        True,
    ]


def test_rounding_is_reported_in_the_old_trainers_numbers() -> None:
    floor = translated(
        "v0.7.0", "actor_rollout_ref.actor.ppo_mini_batch_size=17", "data.train_batch_size=34"
    )
    # 68 // 8 = 8, and 8 x 8 = 64.
    assert (
        "is 17 x 4 = 68, which 8 data-parallel ranks do not divide: the old workers took 8 for "
        "each, 64 in all" in _messages(floor, "mini-batch-floor")
    )
    shared = translated(
        "v0.3.0.post1", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null", f"{GLOBAL}=30"
    )
    assert "the old workers took 3 for each" in _messages(shared, "micro-batch-global")  # 30 // 8


def test_an_asynchronous_run_has_no_ranks_that_a_step_must_fill() -> None:
    entry, keys = (
        "verl.experimental.fully_async_policy.fully_async_main",
        ("data.train_batch_size=0", "rollout.total_rollout_steps=2560"),
    )
    result = translated("v0.7.0", *keys, entry=entry, cluster=Cluster(nodes=1, gpus_per_node=7))
    assert "batch-divides" not in rules_found(result, "person")


def test_one_sequence_of_a_global_micro_batch_for_each_rank_is_one() -> None:
    sizes = (
        "data.max_prompt_length=100",
        "data.max_response_length=156",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
    )
    assert (
        values(translated("v0.3.0.post1", *sizes, f"{GLOBAL}=8"))["batching.max_tokens"] == 256
    )  # 8 over 8 ranks


def test_a_budget_of_one_rank_stands_where_it_stood_and_one_that_ranks_split_names_both_keys() -> (
    None
):
    key, sharing = (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    )
    single, shared = _max_tokens(), _max_tokens(f"{sharing}=2")
    assert (single.value, single.is_verbatim, single.old_keys) == (4000, True, (key,))
    assert (shared.value, shared.is_verbatim, shared.old_keys) == (8000, False, (key, sharing))


def test_micro_batches_of_one_sequence_hold_the_longest() -> None:
    result = translated("v0.7.0", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    assert values(result)["batching.max_tokens"] == 1024  # 512 + 512


def test_a_megatron_run_that_names_no_context_ranks_has_one() -> None:
    context = "actor_rollout_ref.actor.megatron.context_parallel_size"
    single, shared = (
        _max_tokens(f"{context}={ranks}", config_name="ppo_megatron_trainer")
        for ranks in ("null", 2)
    )
    assert (single.value, context in single.old_keys) == (4000, False)
    assert (shared.value, context in shared.old_keys) == (8000, True)


def test_a_budget_that_had_to_be_raised_is_not_the_text_that_stood_there() -> None:
    raised = _max_tokens("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100")
    assert (raised.value, raised.is_verbatim) == (1024, False)


def test_no_passes_were_one_and_the_text_does_not_stay() -> None:
    result = {}
    for epochs in (0, 1, 2):
        every = translated("v0.7.0", f"actor_rollout_ref.actor.ppo_epochs={epochs}").settings
        result[epochs] = next(
            (each.value, each.is_verbatim) for each in every if each.key == "batching.num_passes"
        )
    assert result == {0: (1, False), 1: (1, True), 2: (2, True)}


@pytest.mark.parametrize(
    ("version", "config_name", "passes"),
    [
        ("v0.2", None, 1),
        ("v0.2.0.post2", None, 1),
        ("v0.2", "ppo_megatron_trainer", 4),
        ("v0.3.0.post0", None, 4),
    ],
)
def test_first_workers_of_fsdp_made_one_pass(
    version: str, config_name: str | None, passes: int
) -> None:
    # dp_actor.py and dp_critic.py have a loop over ppo_epochs since v0.3.0.post0.
    overrides = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.ppo_epochs=4")
    result = translated(version, *overrides, config_name=config_name)
    assert values(result).get("batching.num_passes", 1) == passes
    assert (result.tokens[-1].disposition == "dropped") == (passes == 1)
    assert "critic-passes" not in rules_found(result, "person")


def test_a_mini_batch_of_one_prompt_is_a_mini_batch() -> None:
    result = translated("v0.7.0", "actor_rollout_ref.actor.ppo_mini_batch_size=1")
    assert values(result)["batching.num_mini_batches"] == 64
    assert "mini-batches" not in rules_found(result, "person")


def test_a_critic_with_as_many_passes_as_the_actor_is_a_question_no_more() -> None:
    gae = (
        "algorithm.adv_estimator=gae",
        "critic.model.path=/models/q",
        "actor_rollout_ref.actor.ppo_epochs=2",
    )
    result = {
        passes: translated("v0.7.0", *gae, f"critic.ppo_epochs={passes}") for passes in (1, 2)
    }
    assert ["critic-passes" in rules_found(each, "person") for each in result.values()] == [
        True,
        False,
    ]


def test_a_budget_of_just_the_longest_sample_is_not_raised() -> None:
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    result = translated(
        "v0.7.0", "actor_rollout_ref.actor.use_dynamic_bsz=True", f"{key}=1024"
    )  # 512 + 512
    assert "token-budget" not in rules_found(result, "hazard")
    assert _max_tokens(f"{key}=1024").is_verbatim


def test_a_key_of_the_reference_that_no_one_needs_says_why_there_is_none() -> None:
    sizes = "actor_rollout_ref.ref.fsdp_config.forward_prefetch=True"
    result = translated("v0.7.0", sizes)
    assert (
        result.tokens[-1].reason == "No KL coefficient is above 0, so there is no reference policy."
    )
    adapter = translated(
        "v0.7.0",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.actor.use_kl_loss=True",
        sizes,
    )
    assert adapter.tokens[-1].reason == "There is no reference model of its own."
