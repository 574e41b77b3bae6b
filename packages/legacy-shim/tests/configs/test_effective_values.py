"""Values that translations once got wrong: what the old run did, and what the new one does.

Each test names the old effective value, with the place in verl that decides it, and the new value.
docs/records/migration_faults.md lists them.
"""

import json
from pathlib import Path

import pytest

from temper_legacy_shim.configs import Outcome, Translation, translate
from temper_legacy_shim.configs.mapping.builder import trainer_defaults
from temper_legacy_shim.configs.reading.config_values import Plain

from .conftest import BASE, rules_found, translated, values

FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_main"
ONE_STEP_OFF = "verl.experimental.one_step_off_policy.main_ppo"
CORRECTION = "algorithm.rollout_correction"
NEWEST = ("v0.7.1", "v0.8.0", "v0.9.0", "main", "v0.9.1")


def asynchronous(version: str, *overrides: str) -> Translation:
    entry = FULLY_ASYNC if version in NEWEST else "recipe.fully_async_policy.fully_async_main"
    run = (
        "data.train_batch_size=0",
        "rollout.total_rollout_steps=51200",
        "data.val_files=/data/val.parquet",
    )
    return translated(version, *run, *overrides, entry=entry)


def effective(translation: Translation, key: str) -> Plain:
    return values(translation).get(key, trainer_defaults().get(key))


def correction(translation: Translation) -> dict[str, Plain]:
    return {
        key.removeprefix(f"{CORRECTION}."): value
        for key, value in values(translation).items()
        if key.startswith(CORRECTION)
    }


@pytest.mark.parametrize("version", ["v0.6.1", "v0.7.0", *NEWEST])
def test_asynchronous_run_samples_as_many_completions_as_the_samplers_block_says(
    version: str,
) -> None:
    # detach_utils.py repeats a prompt actor_rollout_ref.rollout.n times. The configuration of the
    # program also has rollout.n, 4 by default, which nothing reads.
    run = asynchronous(version, "actor_rollout_ref.rollout.n=16", "rollout.n=8")
    assert effective(run, "algorithm.group_size") == 16
    assert run.tokens[-1].disposition == "ignored"


@pytest.mark.parametrize(("version", "epochs"), [("v0.7.0", 2), ("v0.9.1", 3)])
def test_asynchronous_run_may_have_ended_with_its_epochs(version: str, epochs: int) -> None:
    # fully_async_rollouter.py takes the smaller of rollout.total_rollout_steps and the rows of all
    # epochs, and until v0.7.0 went over the data rollout.total_epochs times.
    run = asynchronous(version, "trainer.total_epochs=3", "+rollout.total_epochs=2")
    (note,) = [each.message for each in run.findings if each.rule == "total-steps"]
    assert f"800 steps or {epochs} epochs, whichever came first" in note


@pytest.mark.parametrize("version", NEWEST)
def test_asynchronous_run_keeps_the_samplers_log_probs_as_denominator(version: str) -> None:
    # fully_async_ppo_trainer.yaml ends with bypass_mode: True.
    assert correction(asynchronous(version)) == {"name": "rollout_ratio"}
    decoupled = asynchronous(version, f"{CORRECTION}.bypass_mode=False")
    assert correction(decoupled) == {}


@pytest.mark.parametrize("version", ["v0.6.1", "v0.7.0"])
def test_first_asynchronous_trainers_took_the_samplers_log_probs_by_a_switch(version: str) -> None:
    # recipe/fully_async_policy/ray_trainer.py:370 reads async_training.use_rollout_log_probs, True
    # by default.
    assert correction(asynchronous(version)) == {"name": "rollout_ratio"}
    reported = asynchronous(version, "async_training.use_rollout_log_probs=True")
    assert reported.tokens[-1].disposition == "mapped"
    assert correction(asynchronous(version, "async_training.compute_prox_log_prob=True")) == {}
    own = asynchronous(version, "async_training.use_rollout_log_probs=False")
    assert correction(own) == {}
    assert "async-proximal" in rules_found(own, "hazard")


@pytest.mark.parametrize(
    ("version", "is_bypassed"),
    [("v0.5.0", False), ("v0.6.1", False), *((each, True) for each in ("v0.7.0", *NEWEST))],
)
def test_one_step_off_run_keeps_the_denominator_of_its_release(
    version: str, is_bypassed: bool
) -> None:
    entry = ONE_STEP_OFF if version in NEWEST else "recipe.one_step_off_policy.main_ppo"
    expected = {"name": "rollout_ratio"} if is_bypassed else {}
    assert correction(translated(version, entry=entry)) == expected


@pytest.mark.parametrize("version", ["v0.6.1", "v0.7.0", *NEWEST])
def test_warmup_of_an_asynchronous_run_counts_calls_of_the_trainer(version: str) -> None:
    # Four calls between two weight syncs, each one a step of the schedule and, with one mini-batch,
    # one update.
    warm = asynchronous(version, "actor_rollout_ref.actor.optim.lr_warmup_steps=10")
    assert effective(warm, "batching.num_mini_batches") == 4
    assert effective(warm, "actor.engine.schedule.advance") == "update"
    assert effective(warm, "actor.engine.schedule.warmup_steps") == 10
    wide = asynchronous(
        version,
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
        "async_training.require_batches=2",
    )
    assert effective(wide, "actor.engine.schedule.warmup_steps") == 20  # two updates a call
    assert "schedule-advance" in rules_found(wide, "note")


def test_cosine_of_an_asynchronous_run_is_as_long_as_its_weight_syncs() -> None:
    # The trainer fills in 51200 / (4 x 16) = 800 weight syncs, and the schedule counts its calls.
    cosine = asynchronous("v0.9.0", "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine")
    assert (
        effective(cosine, "run.total_steps"),
        effective(cosine, "actor.engine.schedule.total_steps"),
    ) == (800, 800)
    old = asynchronous("v0.7.0", "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine")
    assert "schedule-length" in rules_found(old, "person")


@pytest.mark.parametrize("version", ["v0.4.1", "v0.9.1"])
def test_other_aggregation_of_the_critic_than_the_mean_over_tokens_is_a_hazard(
    version: str,
) -> None:
    # The critic's loss reads critic.loss_agg_mode, which follows the actor's by default.
    gae, mode = "algorithm.adv_estimator=gae", "loss_agg_mode=seq-mean-token-mean"
    actor = f"actor_rollout_ref.actor.{mode}"
    for overrides in ((gae, f"critic.{mode}"), (gae, actor), (gae, actor, f"critic.{mode}")):
        assert "critic-aggregation" in rules_found(translated(version, *overrides), "hazard")
    for overrides in ((f"critic.{mode}",), (gae, actor, "critic.loss_agg_mode=token-mean")):
        assert "critic-aggregation" not in rules_found(translated(version, *overrides), "hazard")
    run = translated("v0.9.1", gae, "critic.loss_scale_factor=4096", f"critic.{mode}")
    assert [token.disposition for token in run.tokens[-2:]] == ["dropped"] * 2


@pytest.mark.parametrize("target", [(), ("algorithm.kl_ctrl.target_kl=0.05",)])
@pytest.mark.parametrize("version", ["v0.4.1", "v0.9.1"])
def test_target_of_the_adaptive_controller_is_a_question(
    version: str, target: tuple[str, ...]
) -> None:
    # apply_kl_penalty means over the tokens of a completion, and the new controller's target is
    # the sum over them.
    in_reward = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.horizon=5000")
    run = translated(version, *in_reward, "algorithm.kl_ctrl.type=adaptive", *target)
    (question,) = [each.message for each in run.findings if each.rule == "kl-controller"]
    assert f"target_kl is {'0.05' if target else '0.1'}" in question
    assert "algorithm.kl_controller.target" not in values(run)
    assert values(run)["algorithm.kl_controller.horizon_completions"] == 5000
    assert run.tokens[-1].disposition == "needs a person"
    fixed = translated(version, *in_reward, "algorithm.kl_ctrl.type=fixed")
    assert "kl-controller" not in rules_found(fixed, "person")


def test_default_horizon_of_a_controller_does_not_take_the_text_of_its_type() -> None:
    adaptive = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive")
    key = "algorithm.kl_controller.horizon_completions"
    (setting,) = [each for each in translated("v0.7.0", *adaptive).settings if each.key == key]
    # A script would have written horizon_completions=adaptive.
    assert (setting.value, setting.is_verbatim) == (10000, False)


@pytest.mark.parametrize(
    ("version", "config_name", "is_twice"),
    [
        ("v0.3.0.post1", None, False),
        ("v0.4.0", None, True),
        ("v0.4.0", "ppo_megatron_trainer", True),
        ("v0.4.1", None, False),
    ],
)
def test_loss_of_the_critic_that_was_not_halved_is_a_hazard(
    version: str, config_name: str | None, *, is_twice: bool
) -> None:
    # compute_value_loss of v0.4.0 has no factor 0.5, which all other releases have.
    gae = ("algorithm.adv_estimator=gae", "critic.model.path=/models/q")
    run = translated(version, *gae, config_name=config_name)
    assert ("value-loss" in rules_found(run, "hazard")) == is_twice
    assert "value-loss" not in rules_found(translated(version, config_name=config_name), "hazard")


@pytest.mark.parametrize(
    ("version", "loss", "is_own"),
    [
        ("v0.6.0", "gspo", True),
        ("v0.9.0", "gspo", True),
        ("main", "gspo", True),
        ("v0.9.1", "gspo", False),
        ("v0.9.1", "sapo", True),
        ("v0.9.1", "geo_mean", True),
        ("v0.9.1", "cispo", False),
    ],
)
def test_losses_with_an_aggregation_of_their_own_keep_it(
    version: str, loss: str, is_own: bool
) -> None:
    # core_algos.py calls agg_loss with seq-mean-token-mean in them; geo_mean takes torch.mean.
    actor = "actor_rollout_ref.actor"
    given = f"{actor}.policy_loss.loss_mode={loss}"
    expected = "sequence_mean_token_mean" if is_own else "token_mean"
    for mode in ((), (f"{actor}.loss_agg_mode=token-mean",)):
        run = translated(version, given, *mode)
        assert effective(run, "algorithm.aggregation") == expected
        assert "aggregation" not in rules_found(run, "hazard")
    kl = translated(version, given, f"{actor}.use_kl_loss=True")
    assert ("aggregation" in rules_found(kl, "hazard")) == is_own


@pytest.mark.parametrize("version", ["v0.3.0.post1", "v0.7.1", "v0.9.1"])
def test_schedule_is_as_long_as_the_run(version: str) -> None:
    # ray_trainer.py and trainer_base.py replace optim.total_training_steps by the trainer's number.
    style = "warmup_style" if version == "v0.3.0.post1" else "lr_scheduler_type"
    optim = "actor_rollout_ref.actor.optim"
    run = translated(version, f"{optim}.{style}=cosine", f"{optim}.total_training_steps=200")
    assert effective(run, "actor.engine.schedule.total_steps") == 0
    assert run.tokens[-1].disposition == "dropped"
    assert "replaced it" in run.tokens[-1].reason


@pytest.mark.parametrize("version", NEWEST)
def test_asynchronous_run_is_not_reported_to_have_used_the_old_workers(version: str) -> None:
    # v0.7.1's configuration of the entry has use_legacy_worker_impl: disable.
    run = asynchronous(version)
    assert "micro-batch-normalization" not in rules_found(run, "hazard")
    assert "worker-switch" not in rules_found(run, "note")


@pytest.mark.parametrize("version", ["v0.6.1", "v0.7.0"])
def test_first_asynchronous_trainers_evaluated_by_a_key_of_the_sampler(version: str) -> None:
    # fully_async_rollouter.py: current_param_version % rollout.test_freq.
    assert effective(asynchronous(version, "rollout.test_freq=10"), "run.eval_every") == 10
    assert (
        effective(asynchronous(version, "trainer.test_freq=5"), "run.eval_every") == 1
    )  # its default


@pytest.mark.parametrize("version", NEWEST)
def test_later_asynchronous_trainers_evaluated_by_weight_syncs(version: str) -> None:
    assert effective(asynchronous(version, "trainer.test_freq=5"), "run.eval_every") == 5


def test_clip_is_kept_where_the_ratio_is_to_the_sampler() -> None:
    one_update = (
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
    )
    bypassed = translated("v0.8.0", *one_update, f"{CORRECTION}.bypass_mode=True")
    assert effective(bypassed, "algorithm.policy_loss.clip_high") == 0.28
    assert effective(bypassed, "algorithm.policy_loss.dual_clip") == 3.0
    assert (
        effective(translated("v0.8.0", *one_update), "algorithm.policy_loss.dual_clip") is None
    )  # the ratio is 1


@pytest.mark.parametrize("rejection", ["token_k1", "seq_sum_k1"])
def test_bounds_of_k1_are_mirrored_since_k1_is_sampler_over_trainer(rejection: str) -> None:
    # rollout_corr_helper.py: token_k1 = -log_ratio, kept within [log 0.5, log 1.6].
    level, rule = ("token", "ratio_token") if rejection == "token_k1" else ("sequence", "ratio_sum")
    keys = (
        f"{CORRECTION}.rollout_is={level}",
        f"{CORRECTION}.rollout_rs={rejection}",
        f"{CORRECTION}.rollout_rs_threshold=0.5_1.6",
    )
    weighed = correction(translated("v0.8.0", *keys))
    assert weighed == {
        "name": level,
        "truncate_at": 2.0,
        f"reject.{rule}.low": 0.625,
        f"reject.{rule}.high": 2.0,
    }
    symmetric = correction(
        translated("v0.8.0", *keys[:2], f"{CORRECTION}.rollout_rs_threshold=2.0")
    )
    assert (symmetric[f"reject.{rule}.low"], symmetric[f"reject.{rule}.high"]) == (0.5, 2.0)


def test_bounds_of_earlier_releases_were_of_trainer_over_sampler() -> None:
    keys = (
        f"{CORRECTION}.rollout_rs=token",
        f"{CORRECTION}.rollout_rs_threshold=1.6",
        f"{CORRECTION}.rollout_rs_threshold_lower=0.5",
    )
    rejected = correction(translated("v0.7.0", *keys))
    assert (rejected["reject.ratio_token.low"], rejected["reject.ratio_token.high"]) == (0.5, 1.6)


@pytest.mark.parametrize("rejection", ["token_k1", "seq_sum_k1"])
def test_rejection_without_weights_multiplies_by_no_ratio(rejection: str) -> None:
    run = translated(
        "v0.8.0",
        f"{CORRECTION}.rollout_rs={rejection}",
        f"{CORRECTION}.rollout_rs_threshold=0.5_1.6",
    )
    rule = "ratio_token" if rejection == "token_k1" else "ratio_sum"
    assert correction(run) == {
        "name": "mask",
        f"reject.{rule}.low": 0.625,
        f"reject.{rule}.high": 2.0,
    }
    assert "correction" in rules_found(
        run, "hazard"
    )  # rejected tokens keep their place in the denominator


def test_range_of_weights_is_icepop() -> None:
    run = translated(
        "v0.9.0", f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0"
    )
    bounds = {"reject.ratio_token.low": 0.5, "reject.ratio_token.high": 5.0}
    assert correction(run) == {"name": "token", "truncate_at": None, **bounds}
    assert "value-unknown" not in rules_found(run, "person")


FILTER = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=5")


@pytest.mark.parametrize(
    ("version", "metric"), [("v0.9.0", "acc"), ("main", "acc"), ("v0.9.1", "reward")]
)
def test_second_trainer_ignored_the_bound_of_rounds(version: str, metric: str) -> None:
    # trainer_base.py warns that max_num_gen_batches is ignored, and samples until the batch is
    # full.
    reported = ("algorithm.filter_groups.metric=acc",) if metric == "acc" else ()
    run = translated(version, *FILTER, *reported)
    assert effective(run, "algorithm.dynamic_sampling.max_rounds") == 1000
    assert effective(run, "algorithm.dynamic_sampling.on") == (
        "score" if metric == "acc" else "reward"
    )
    assert "ignored it with a warning" in run.tokens[len(BASE) + 1].reason


def test_second_trainer_refused_to_filter_without_a_metric() -> None:
    # v0.9.0's default is null; v0.9.1's is reward.
    assert "filter-groups" in rules_found(translated("v0.9.0", *FILTER), "person")
    assert "filter-groups" not in rules_found(translated("v0.9.1", *FILTER), "person")


@pytest.mark.parametrize("run", [("v0.8.0",), ("v0.9.0", "trainer.use_v1=False")])
def test_first_trainer_read_no_filter(run: tuple[str, ...]) -> None:
    version, *more = run
    unfiltered = translated(version, *FILTER, *more)
    assert not [key for key in values(unfiltered) if key.startswith("algorithm.dynamic_sampling")]
    assert "filter-groups" in rules_found(unfiltered, "hazard")


@pytest.mark.parametrize("version", ["v0.4.0", "v0.7.0", "v0.8.0"])
def test_variant_of_dapo_keeps_its_bound_of_rounds(version: str) -> None:
    run = translated(version, *FILTER, entry="recipe.dapo.main_dapo")
    assert effective(run, "algorithm.dynamic_sampling.max_rounds") == 5


@pytest.mark.parametrize("path", ["$HOME/models/Qwen3-VL-8B-Instruct", "${ROOT}/Qwen2.5-VL-7B"])
def test_model_of_images_below_a_variable_is_a_question(path: str) -> None:
    run = translate(
        [*BASE, f"actor_rollout_ref.model.path={path}"],
        entry="verl.trainer.main_ppo",
        version="v0.9.0",
    )
    assert "images" in rules_found(run, "person")


@pytest.mark.parametrize("version", ["v0.6.1", "v0.7.1", "v0.9.0"])
@pytest.mark.parametrize(
    "argument", ["enable_thinking=False", "enable_thinking=True", "reasoning_effort=medium"]
)
def test_arguments_of_the_chat_template_are_a_question(version: str, argument: str) -> None:
    run = translated(version, f"+data.apply_chat_template_kwargs.{argument}")
    assert run.outcome is Outcome.PERSON
    assert run.tokens[-1].disposition == "needs a person"


def test_limit_of_positions_is_a_question_where_the_samples_exceed_the_models_own(
    tmp_path: Path,
) -> None:
    key = "+actor_rollout_ref.model.override_config.max_position_embeddings=32768"
    lengths = (
        "data.max_prompt_length=2048",
        "data.max_response_length=8192",
        f"actor_rollout_ref.model.path={tmp_path}",
    )
    for limit, is_requested in ((4096, True), (32768, False)):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": limit}))
        run = translated("v0.8.0", *lengths, key)
        assert ("override-positions" in rules_found(run, "person")) is is_requested
    assert "write them there" not in translated("v0.8.0", key).tokens[-1].reason


def test_routing_replay_has_its_own_hazard() -> None:
    run = translated("v0.9.0", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True")
    (message,) = (finding.message for finding in run.findings if finding.rule == "routing-replay")
    assert "quantised" not in message
    assert "experts" in message


def test_prefix_grouper_was_read_by_a_release() -> None:
    run = translated("v0.7.1", "actor_rollout_ref.actor.use_prefix_grouper=True")
    assert run.tokens[-1].disposition == "dropped"
    assert "No release read it" not in run.tokens[-1].reason


def test_penalty_of_zero_on_long_completions_is_left_out() -> None:
    buffer = "reward_model.overlong_buffer"
    keys = (f"{buffer}.enable=True", f"{buffer}.len=512", f"{buffer}.penalty_factor=0.0")
    run = translated("v0.7.0", *keys, entry="recipe.dapo.main_dapo")
    assert not [key for key in values(run) if "overlong." in key]


def test_kl_cov_has_no_clip_to_keep() -> None:
    run = translated(
        "v0.7.0",
        "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
    )
    assert "algorithm.policy_loss.clip_high" not in values(run)


@pytest.mark.parametrize("word", ["float16", "half", "auto"])
def test_dtype_that_no_sampler_here_has_is_a_question(word: str) -> None:
    run = translated("v0.7.0", f"actor_rollout_ref.rollout.dtype={word}")
    assert "rollout-dtype" in rules_found(run, "person")
    assert "rollout.dtype" not in values(run)
    chosen = translated("v0.7.0", "actor_rollout_ref.rollout.dtype=float32")
    assert effective(chosen, "rollout.dtype") == "fp32"


MEGATRON = ("actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.use_kl_loss=True")
DTYPE = "actor_rollout_ref.{role}.{block}.dtype=float16"


@pytest.mark.parametrize(
    ("version", "block", "role", "expected"),
    [
        # megatron_workers.py:473 reads actor.megatron.dtype for both roles.
        ("v0.6.1", "megatron", "actor", ("fp16", "fp16")),
        ("v0.7.1", "megatron", "actor", ("fp16", "fp16")),
        # Each engine reads its own block since v0.8.0: engine/megatron/transformer_impl.py:172.
        ("v0.8.0", "megatron", "actor", ("fp16", "bf16")),
        ("v0.8.0", "megatron", "ref", ("bf16", "fp16")),
        # fsdp_workers.py:467; FSDP's engine has bf16 unless mixed_precision says otherwise.
        ("v0.7.0", "fsdp_config", "actor", ("fp16", "bf16")),
        ("v0.8.0", "fsdp_config", "actor", ("bf16", "bf16")),
    ],
)
def test_dtype_of_matmuls_is_that_of_the_release(
    version: str, block: str, role: str, expected: tuple[str, str]
) -> None:
    engine = MEGATRON if block == "megatron" else MEGATRON[1:]
    run = translated(version, *engine, DTYPE.format(role=role, block=block))
    roles = ("actor", "ref")
    assert tuple(effective(run, f"{each}.engine.precision.compute") for each in roles) == expected
    given = next(token for token in run.tokens if ".dtype=" in token.text)
    is_read = "fp16" in expected
    assert given.disposition == ("moved" if is_read else "dropped")
    assert is_read or "did not read it" in given.reason


def test_dtype_that_no_engine_has_is_a_question() -> None:
    run = translated("v0.8.0", *MEGATRON, "actor_rollout_ref.actor.megatron.dtype=$DTYPE")
    assert "compute-dtype" in rules_found(run, "person")


@pytest.mark.parametrize("version", ["v0.3.0.post1", "v0.6.1", "v0.7.0", "v0.9.0", "main"])
def test_length_of_completions_is_the_samplers_own(version: str) -> None:
    # vllm_rollout.py:123, vllm_rollout_spmd.py:258, single_turn_agent_loop.py: response_length.
    lengths = ("data.max_prompt_length=512", "data.max_response_length=1024")
    run = translated(
        version,
        *lengths,
        "data.val_files=/data/val.parquet",
        "actor_rollout_ref.rollout.response_length=2048",
    )
    assert effective(run, "sampling.max_tokens") == 2048
    assert effective(run, "run.eval_sampling.max_tokens") == 2048
    assert effective(run, "batching.max_tokens") == 2 * (512 + 2048)
    by_text = {token.text.partition("=")[0]: token.disposition for token in run.tokens}
    assert by_text["actor_rollout_ref.rollout.response_length"] == "moved"
    assert by_text["data.max_response_length"] == "dropped"
    same = translated(version, *lengths, "actor_rollout_ref.rollout.response_length=1024")
    assert effective(same, "sampling.max_tokens") == 1024


@pytest.mark.parametrize("version", ["v0.3.0.post1", "v0.7.0", "v0.9.0"])
def test_shorter_prompts_than_the_data_allow_is_a_question(version: str) -> None:
    key = "actor_rollout_ref.rollout.prompt_length"
    lengths = ("data.max_prompt_length=512", "data.max_response_length=1024")
    for limit, is_requested in ((256, True), (512, False), (768, False)):
        run = translated(version, *lengths, f"{key}={limit}")
        assert ("prompt-length-rollout" in rules_found(run, "person")) is is_requested


@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix"])
@pytest.mark.parametrize("version", ["v0.6.1", "v0.7.0", "v0.8.0"])
def test_betas_are_given_to_other_optimizers_of_that_family(version: str, name: str) -> None:
    # verl/workers/config/optimizer.py: build_optimizer.
    optim = "actor_rollout_ref.actor.optim"
    run = translated(
        version,
        f"{optim}.betas=[0.9,0.95]",
        f"{optim}.optimizer={name}",
        f"{optim}.optimizer_impl=bitsandbytes.optim",
        f"+{optim}.override_optimizer_config.eps=1e-6",
    )
    arguments = effective(run, "actor.engine.optimizer.arguments")
    assert arguments == {"betas": [0.9, 0.95], "eps": 1e-6}
    plain = translated(version, f"{optim}.optimizer=SGD", f"{optim}.betas=[0.9,0.95]")
    assert "actor.engine.optimizer.arguments" not in values(plain)
