"""The traps: configurations that still composed and meant something else."""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

from temper_legacy_shim.configs import Outcome, translate
from temper_legacy_shim.configs.mapping.roles import model_checks as images

from .conftest import BASE, pinned, rules_found, translated, values

LORA = "actor_rollout_ref.model.lora"
NO_CLIP = {
    "algorithm.policy_loss.clip_low",
    "algorithm.policy_loss.clip_high",
    "algorithm.policy_loss.dual_clip",
}


def test_trap_a_the_reward_carried_kl_before_v0_4_unless_the_loss_did() -> None:
    old = values(translated("v0.3.0.post1", "algorithm.kl_ctrl.kl_coef=0.02"))
    assert (old["algorithm.kl_reward_coef"], old["algorithm.kl_estimator"], old["ref"]) == (
        0.02,
        "k1",
        "frozen",
    )
    in_loss = values(translated("v0.3.0.post1", "actor_rollout_ref.actor.use_kl_loss=True"))
    assert "algorithm.kl_reward_coef" not in in_loss
    assert "algorithm.kl_loss_coef" in in_loss
    new = values(translated("v0.4.0", "algorithm.kl_ctrl.kl_coef=0.02"))
    assert "algorithm.kl_reward_coef" not in new
    assert "ref" not in new


def test_trap_a_is_reported_where_no_one_names_the_release_and_the_keys_fit_both_kinds() -> None:
    overrides = (*BASE, "algorithm.kl_ctrl.kl_coef=0.02")
    inferred = translate(overrides, entry="verl.trainer.main_ppo")
    (message,) = (
        finding.message for finding in inferred.findings if finding.rule == "release-unsure"
    )
    assert inferred.source.version == "v0.9.1"
    assert message.startswith(
        "its keys fit v0.2 to v0.9.1, and v0.9.1 was taken; v0.2 to v0.3.0.post1 would have meant "
    )
    assert "algorithm.kl_reward_coef=0.02 (here 0.0)" in message
    assert "algorithm.policy_loss.dual_clip=null (here 3.0)" in message
    assert message.endswith(": say --from-version where you know it.")
    given = translate(overrides, entry="verl.trainer.main_ppo", version="v0.9.0")
    assert "release-unsure" not in rules_found(given, "hazard")


def test_unknown_key_excludes_a_release_before_an_added_key_that_exists() -> None:
    since_v0_6 = "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs"
    added = [f"+actor_rollout_ref.{role}.fsdp_config.model_dtype=bf16" for role in ("actor", "ref")]
    inferred = translate([*BASE, since_v0_6, *added], entry="verl.trainer.main_ppo")
    assert inferred.source.version == "v0.9.1"
    messages = [each.message for each in inferred.findings if each.level == "refused"]
    assert ["drop the +" in message for message in messages] == [True, True]


MAIN_ONLY = "ray_kwargs.ray_init.runtime_env.py_executable=python3"
"""A key that no release before the newest commit had."""
LEFT_FROM_V0_5 = "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=triton"


def test_new_key_tells_more_than_one_that_was_left_from_an_old_release() -> None:
    added = "+actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16"
    keys = [*BASE, MAIN_ONLY, LEFT_FROM_V0_5, added]
    inferred = translate(keys, entry="verl.trainer.main_ppo")
    assert inferred.source.version == "v0.9.1"


def test_new_key_of_a_fork_tells_nothing_of_its_release() -> None:
    keys = [
        *BASE,
        "actor_rollout_ref.actor.state_masking=True",  # of no release
        "algorithm.use_kl_in_reward=False",  # since v0.4.0
        "actor_rollout_ref.actor.fsdp_config.grad_offload=False",  # until v0.2.0.post2
        "+trainer.val_before_train=False",  # needs no + since v0.4.0
    ]
    assert translate(keys, entry="verl.trainer.main_ppo").source.version == "v0.2.0.post2"


def test_releases_that_fit_and_mean_the_same_are_not_mentioned() -> None:
    clip = [
        f"actor_rollout_ref.actor.clip_ratio_{bound}=0.2" for bound in ("low", "high")
    ]  # since v0.4.0
    assert "release-unsure" not in rules_found(
        translate([*BASE, *clip], entry="verl.trainer.main_ppo"), "hazard"
    )


def test_trap_b_clip_ratio_only_is_not_read_since_v0_4() -> None:
    old = values(translated("v0.3.0.post1", "actor_rollout_ref.actor.clip_ratio=0.3"))
    assert (old["algorithm.policy_loss.clip_low"], old["algorithm.policy_loss.clip_high"]) == (
        0.3,
        0.3,
    )
    new = translated("v0.5.0", "actor_rollout_ref.actor.clip_ratio=0.3")
    assert "algorithm.policy_loss.clip_low" not in values(new)  # 0.2 is our default
    assert "clip-ratio-ignored" in rules_found(new, "hazard")


def test_trap_c_dual_clip_is_on_since_v0_4_and_was_absent_before() -> None:
    assert "algorithm.policy_loss.dual_clip" not in values(translated("v0.3.0.post1"))
    assert values(translated("v0.4.0"))["algorithm.policy_loss.dual_clip"] == 3.0
    assert "algorithm.policy_loss.dual_clip" in pinned(translated("v0.4.0"))


def test_trap_d_the_critics_mini_batch_counted_completions_before_v0_4() -> None:
    gae = (
        "algorithm.adv_estimator=gae",
        "critic.model.path=/models/q",
        "critic.ppo_mini_batch_size=64",
    )
    # 64 completions are 16 prompts at 4 completions each: what the actor has.
    assert "critic-mini-batches" not in rules_found(translated("v0.3.0.post1", *gae), "person")
    assert "critic-mini-batches" in rules_found(translated("v0.4.0", *gae), "person")


@pytest.mark.parametrize(
    ("version", "tree", "flat", "alpha"),
    [("v0.7.0", "fsdp", True, 16.0), ("v0.7.0", "megatron", False, 32.0)],
)
def test_trap_e_alpha_is_that_of_the_family_that_the_engine_read(
    version: str, tree: str, flat: bool, alpha: float
) -> None:
    key = "actor_rollout_ref.model.lora_rank=8" if flat else "actor_rollout_ref.model.lora.rank=8"
    name = "ppo_megatron_trainer" if tree == "megatron" else None
    result = values(translated(version, key, config_name=name))
    assert (result["actor.engine.lora.rank"], result["actor.engine.lora.alpha"]) == (8, alpha)


def test_trap_e_the_other_family_was_silently_without_an_adapter() -> None:
    result = translated("v0.8.0", "actor_rollout_ref.model.lora.rank=8")
    assert "lora-family" in rules_found(result, "person")
    assert "actor.engine.lora.rank" not in values(result)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ["xavier, and B with zero"]),  # Megatron-Bridge's defaults
        ((f"{LORA}.lora_A_init_method=kaiming",), []),
        (
            (f"{LORA}.lora_A_init_method=kaiming", f"{LORA}.lora_B_init_method=normal"),
            ["kaiming, and B with normal"],
        ),
        ((f"{LORA}.adapter_path=/a/lora",), []),
    ],
)
def test_adapter_that_started_from_other_numbers_is_a_hazard(
    overrides: tuple[str, ...], expected: list[str]
) -> None:
    result = translated("v0.8.0", f"{LORA}.rank=8", *overrides, config_name="ppo_megatron_trainer")
    messages = [finding.message for finding in result.findings if finding.rule == "lora-init"]
    assert [message.partition(" A with ")[2].partition(";")[0] for message in messages] == expected
    flat = translated("v0.8.0", "actor_rollout_ref.model.lora_rank=8")
    assert "lora-init" not in rules_found(flat, "hazard")  # FSDP builds PEFT's


def test_trap_f_dead_keys_are_honored() -> None:
    result = translated("v0.8.0", "actor_rollout_ref.actor.grad_clip=0.3")
    assert values(result)["actor.engine.optimizer.clip_grad_norm"] == 0.3
    assert "grad-clip" in rules_found(result, "hazard")
    same = translated("v0.8.0", "actor_rollout_ref.actor.grad_clip=1.0")  # as optim.clip_grad
    assert "grad-clip" not in rules_found(same, "hazard")
    gae = (
        "algorithm.adv_estimator=gae",
        "critic.model.path=/models/q",
        "critic.ulysses_sequence_parallel_size=2",
    )
    assert values(translated("v0.8.0", *gae))["critic.engine.sequence_parallel"] == 2


@pytest.mark.parametrize(
    ("version", "key", "config_name", "is_hazard"),
    [
        ("v0.4.1", "actor_rollout_ref.actor.grad_clip", None, True),
        ("v0.9.1", "actor_rollout_ref.actor.optim.clip_grad", None, True),
        ("v0.9.1", "actor_rollout_ref.actor.optim.clip_grad", "ppo_megatron_trainer", False),
    ],
)
def test_gradients_that_fsdp_clipped_to_nothing_are_a_hazard(
    version: str, key: str, config_name: str | None, *, is_hazard: bool
) -> None:
    # torch's clip_grad_norm_ multiplies by 0 / norm; Megatron clips only above 0.
    result = translated(version, f"{key}=0", config_name=config_name)
    assert values(result)["actor.engine.optimizer.clip_grad_norm"] is None
    messages = [each.message for each in result.findings if each.rule == "grad-clip"]
    assert [key in message and "multiplied" in message for message in messages] == [
        True
    ] * is_hazard


@pytest.mark.parametrize(
    ("version", "estimator", "how"),
    [
        ("v0.4.1", "gae", "as if the model had written"),
        ("v0.4.1", "reinforce_plus_plus", "as if the model had written"),
        ("v0.4.1", "grpo", None),  # compute_advantage gave it the loss mask
        ("v0.5.0", "gae", None),
        ("v0.8.0", "reinforce_plus_plus", "with a return of 0 for every completion but the last"),
        ("v0.8.0", "reinforce_plus_plus_baseline", None),
        ("v0.9.0", "reinforce_plus_plus", None),
    ],
)
def test_tokens_of_tools_had_a_part_in_advantages_of_old_releases(
    version: str, estimator: str, how: str | None
) -> None:
    # core_algos.py set running_return to 0 at masked tokens until v0.8.0, and compute_advantage
    # gave the estimators the attention mask until v0.4.1.
    turns = "actor_rollout_ref.rollout.multi_turn"
    given = [f"{turns}.enable=True", f"{turns}.tool_config_path=/t.yaml"]
    result = translated(version, f"algorithm.adv_estimator={estimator}", *given)
    messages = [each.message for each in result.findings if "the advantages of" in each.message]
    assert [str(how) in message for message in messages] == [True] * (how is not None)
    single = translated(version, f"algorithm.adv_estimator={estimator}")
    assert not any("the advantages of" in each.message for each in single.findings)


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (("trainer.total_epochs=0",), "total-epochs"),
        (("trainer.total_training_steps=0",), "total-steps"),
        (("trainer.total_training_steps=-1", "trainer.total_epochs=2"), "total-steps"),
    ],
)
def test_run_without_a_length_is_a_question(overrides: tuple[str, ...], rule: str) -> None:
    # fit() leaves after a step if global_steps >= total_training_steps.
    for entry in ("verl.trainer.main_ppo", "verl.trainer.sft_trainer"):
        base = ("data.train_files=/t.parquet",) if "sft" in entry else BASE
        result = translated("v0.9.1", *overrides, base=base, entry=entry)
        assert rule in rules_found(result, "person")
    assert rule not in rules_found(translated("v0.9.1", "trainer.total_epochs=2"), "person")


@pytest.mark.parametrize(
    ("version", "is_question"), [("v0.2", True), ("v0.6.1", True), ("v0.7.0", False)]
)
def test_added_parameter_of_requests_is_a_question_where_vllm_got_it(
    version: str, *, is_question: bool
) -> None:
    # vllm_rollout_spmd.py passes on each key of the block that SamplingParams has.
    result = translated(version, '+actor_rollout_ref.rollout.stop=["</s>"]')
    assert ("sampling-parameter" in rules_found(result, "person")) == is_question
    assert "unmapped" not in rules_found(result, "hazard")


@pytest.mark.parametrize(
    ("kind", "zero_indexed", "is_hazard"),
    [("cosine", True, True), ("cosine", False, False), ("constant", False, True)],
)
def test_cosine_that_counts_from_one_has_no_hazard_of_its_warmup(
    kind: str, *, zero_indexed: bool, is_hazard: bool
) -> None:
    # get_cosine_schedule_with_warmup of v0.7.1 adds 1 to the step.
    optim = "actor_rollout_ref.actor.optim"
    given = (f"{optim}.lr_scheduler_type={kind}", f"{optim}.zero_indexed_step={zero_indexed}")
    result = translated("v0.8.0", f"{optim}.lr_warmup_steps=10", *given)
    assert ("warmup" in rules_found(result, "hazard")) == is_hazard


@pytest.mark.parametrize(
    ("version", "kind", "floor", "is_from_floor"),
    [
        ("v0.4.0", "cosine", 0.1, True),
        ("v0.5.0", "cosine", 0.1, True),
        ("v0.5.0", "cosine", 0.0, False),
        ("v0.5.0", "constant", 0.1, False),
        ("v0.6.0", "cosine", 0.1, False),
    ],
)
def test_warmup_of_a_cosine_that_began_at_its_floor_is_reported_so(
    version: str, kind: str, floor: float, *, is_from_floor: bool
) -> None:
    # lr_lambda of v0.5.0 returns min_lr_ratio + (1 - min_lr_ratio) * step / steps.
    optim = "actor_rollout_ref.actor.optim"
    given = (f"{optim}.warmup_style={kind}", f"{optim}.min_lr_ratio={floor}")
    result = translated(version, f"{optim}.lr_warmup_steps=10", *given)
    text = next(finding.message for finding in result.findings if finding.rule == "warmup")
    assert ("began at 0.1 of the peak" in text) == is_from_floor
    assert ("began at 0," in text) != is_from_floor


@pytest.mark.parametrize(
    ("experts", "targets", "is_question"),
    [
        (4, (), True),
        (1, (), False),
        (4, (f"{LORA}.target_modules=[linear_qkv,linear_proj]",), False),
    ],
)
def test_adapter_of_divided_experts_is_a_question(
    experts: int, targets: tuple[str, ...], *, is_question: bool
) -> None:
    # For MegatronEngine, all-linear leaves out the experts.
    divided = f"actor_rollout_ref.actor.megatron.expert_model_parallel_size={experts}"
    result = translated(
        "v0.7.1", f"{LORA}.rank=8", divided, *targets, config_name="ppo_megatron_trainer"
    )
    assert ("lora-experts" in rules_found(result, "person")) == is_question


def test_trap_g_the_trainer_of_v0_9_needs_no_key_of_its_own() -> None:
    result = translated("v0.9.0", "trainer.use_v1=False")
    assert result.tokens[-1].disposition == "dropped"
    assert "#6823" in result.tokens[-1].prs


def test_trap_h_the_number_of_completions_is_one_key_before_and_after_v0_5() -> None:
    assert (
        values(translated("v0.4.1"))["algorithm.group_size"]
        == values(translated("v0.5.0"))["algorithm.group_size"]
        == 4
    )


def test_trap_i_the_two_generations_of_fine_tuning_have_their_own_defaults_written_out() -> None:
    base = ("data.train_files=/data/train.parquet",)
    first = values(
        translated(
            "v0.7.0",
            "model.partial_pretrain=/models/q",
            base=base,
            entry="verl.trainer.fsdp_sft_trainer",
        )
    )
    second = values(
        translated("v0.7.0", "model.path=/models/q", base=base, entry="verl.trainer.sft_trainer")
    )
    assert (first["actor.engine.optimizer.lr"], second["actor.engine.optimizer.lr"]) == (1e-5, 1e-3)
    assert first["actor.engine.optimizer.betas"] == [0.9, 0.95]
    assert "actor.engine.optimizer.betas" not in second  # 0.9, 0.999 is our default
    assert (first["actor.engine.schedule.kind"], first["actor.engine.schedule.warmup_ratio"]) == (
        "cosine",
        0.1,
    )
    assert "actor.engine.schedule.kind" not in second
    assert first["batching.max_tokens"] == 4 * 1024  # micro-batches of 4 at 1024 tokens
    assert second["batching.max_tokens"] == 8192  # a budget of tokens


def test_trap_j_reward_workers_are_the_shims_to_choose() -> None:
    result = translated("v0.7.0", "reward_model.num_workers=4")
    assert (result.tokens[-1].disposition, result.tokens[-1].rule) == ("dropped", "reward-workers")


def test_trap_k_one_engine_always_packs_whatever_the_two_keys_reported() -> None:
    keys = (
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.actor.megatron.use_remove_padding=True",
    )
    result = translated("v0.7.0", *keys, config_name="ppo_megatron_trainer")
    assert {report.rule for report in result.tokens[-2:]} == {"remove-padding"}


@pytest.mark.parametrize(
    ("version", "strategy"), [("v0.4.0", "fsdp1"), ("v0.4.1", "fsdp2"), ("v0.5.0", "fsdp1")]
)
def test_trap_l_the_critic_followed_the_actor_in_v0_4_1_only(version: str, strategy: str) -> None:
    gae = (
        "algorithm.adv_estimator=gae",
        "critic.model.path=/models/q",
        "actor_rollout_ref.actor.strategy=fsdp2",
    )
    assert values(translated(version, *gae))["critic.engine.strategy"] == strategy


def test_trap_m_an_unknown_added_key_was_ignored_and_is_reported() -> None:
    result = translated("v0.6.1", "+actor_rollout_ref.model.enable_activation_offloading=True")
    assert result.tokens[-1].disposition == "ignored"
    stranger = translated("v0.6.1", "+actor_rollout_ref.actor.my_bonus=0.1")
    assert stranger.tokens[-1].disposition == "unmapped"


def test_one_update_a_step_never_clips_so_nothing_is_written() -> None:
    result = translated(
        "v0.5.0",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
    )
    assert not NO_CLIP & values(result).keys()
    assert result.tokens[-1].disposition == "dropped"
    assert "always 1" in result.tokens[-1].reason


def test_every_default_that_the_shims_differs_from_is_pinned_with_its_release() -> None:
    result = translated("v0.3.0.post1")
    assert {
        "algorithm.entropy_coef",
        "rollout.vllm.enforce_eager",
        "rollout.max_concurrent",
    } <= pinned(result)
    comment = next(
        setting.comment for setting in result.settings if setting.key == "algorithm.entropy_coef"
    )
    assert comment == "default of v0.3.0.post1: actor_rollout_ref.actor.entropy_coeff [entropy]"


@pytest.mark.parametrize(
    ("version", "given", "meaning"),
    [
        ("v0.5.0", None, "critic's and the reward model's worker alone"),
        ("v0.7.0", None, "old workers for all roles"),
        ("v0.7.1", "enable", "old workers for all roles"),
    ],
)
def test_the_worker_switch_is_recorded_for_what_it_meant(
    version: str, given: str | None, meaning: str
) -> None:
    result = translated(version, *([f"trainer.use_legacy_worker_impl={given}"] if given else []))
    assert meaning in next(
        finding.message for finding in result.findings if finding.rule == "worker-switch"
    )


def test_the_old_workers_are_pinned_on_request_and_their_numerics_counted_otherwise() -> None:
    assert values(translated("v0.6.1", numerics="legacy"))["use_legacy_worker_impl"] == "enable"
    result = translated("v0.6.1")
    assert "use_legacy_worker_impl" not in values(result)
    message = next(
        finding.message
        for finding in result.findings
        if finding.rule == "micro-batch-normalization"
    )
    # 16 prompts x 4 completions on 8 ranks are 8 on each: 4 micro-batches of 2, 32 parts in all.
    assert "over 64 completions" in message
    assert "4 micro-batches of 2 completions on each of 8 ranks, 32 parts in all" in message


@pytest.mark.parametrize(
    ("version", "config_name", "sentence"),
    [
        (
            "v0.5.0",
            None,
            "were averaged over the 4 micro-batches of each update, and compare as they are",
        ),
        (
            "v0.6.0",
            None,
            (
                "were scaled by each micro-batch's share of the update and then averaged again: "
                "multiply them by 4"
            ),
        ),
        ("v0.6.1", None, "averaged again: multiply them by 4"),
        ("v0.7.0", None, "were summed over the 4 updates of a step: divide them by 4"),
        ("v0.7.1", "ppo_megatron_trainer", "were averaged over the 4 micro-batches of each update"),
    ],
)
def test_losses_in_the_log_are_compared_by_the_releases_own_way(
    version: str, config_name: str | None, sentence: str
) -> None:
    # 16 prompts x 4 completions on 8 ranks, 2 at a time: 4 micro-batches of an update, and 64
    # prompts are 4 updates.
    result = translated(version, config_name=config_name)
    message = next(
        finding.message for finding in result.findings if finding.rule == "summed-metrics"
    )
    assert sentence in message
    assert "by release" not in message


def test_the_divisor_is_the_one_that_applied() -> None:
    given = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"

    def message(version: str, *more: str) -> str:
        return next(
            finding.message
            for finding in translated(version, given, *more).findings
            if finding.rule == "divisors"
        )

    assert "which v0.6.1 padded to data.max_response_length, 512" in message("v0.6.1")
    assert "which v0.7.0 padded to data.max_response_length, 512" in message("v0.7.0")


SUM_NORM = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
FACTOR = "actor_rollout_ref.actor.loss_scale_factor=1000"


@pytest.mark.parametrize(
    ("version", "overrides", "horizon"),
    [
        ("v0.7.0", (), 512),
        ("v0.7.1", (), 512),
        ("v0.7.1", ("trainer.use_legacy_worker_impl=disable",), 1000),
        ("v0.8.0", (), 1000),
    ],
)
def test_old_workers_read_no_divisor(
    version: str, overrides: tuple[str, ...], horizon: int
) -> None:
    # Only workers/utils/losses.py, which engines call, gives the factor to agg_loss.
    result = translated(version, SUM_NORM, FACTOR, *overrides)
    assert values(result)["algorithm.horizon"] == horizon
    factor = next(token for token in result.tokens if token.text == FACTOR)
    assert factor.disposition == ("dropped" if horizon == 512 else "moved")


@pytest.mark.parametrize(
    ("version", "overrides", "sums"),
    [
        ("v0.4.0", (), "of each micro-batch"),
        ("v0.7.0", (), "of each micro-batch"),
        ("v0.7.0", ("actor_rollout_ref.actor.use_dynamic_bsz=True",), "of each micro-batch"),
        ("v0.7.0", ("trainer.use_legacy_worker_impl=disable",), "of each rank's mini-batch"),
        ("v0.7.1", (), ""),
        ("v0.9.1", (), ""),
    ],
)
def test_norm_of_sums_had_no_mean_over_completions_before_v0_7_1(
    version: str, overrides: tuple[str, ...], sums: str
) -> None:
    # core_algos.agg_loss: torch.sum(seq_losses) / width until v0.7.0, then a mean over sequences.
    result = translated(version, SUM_NORM, *overrides)
    messages = [each.message for each in result.findings if each.rule == "divisors"]
    assert [message for message in messages if "sum over the" in message and sums in message] == [
        message for message in messages if sums
    ]
    assert bool(sums) <= bool(messages)


def test_an_image_model_is_never_accepted() -> None:
    images = (
        ["actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct"],
        ["data.image_key=images"],
        ["--config-name=deepeyes_multiturn_grpo"],
    )
    for overrides in images:
        result = translated("v0.7.0", *overrides, base=BASE)
        assert result.settings == ()
        assert "images" in rules_found(result, "person")


SEE_OR_HEAR = (
    *(
        "google/gemma-3-4b-it",
        "google/gemma-4-12b-it",
        "microsoft/Phi-4-multimodal-instruct",
        "allenai/Molmo-7B-D-0924",
    ),
    *(
        "HuggingFaceM4/idefics2-8b",
        "ByteDance-Seed/UI-TARS-1.5-7B",
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    ),
    *(
        "mistralai/Ministral-3-8B-2512",
        "moonshotai/Kimi-K2.5",
        "Skywork/Skywork-R1V3-38B",
        "nvidia/Cosmos-Reason1-7B",
        "rhymes-ai/Aria",
    ),
    *(
        "nvidia/Eagle2-9B",
        "Salesforce/blip2-opt-2.7b",
        "stepfun-ai/step3",
        "tencent/POINTS-Reader",
        "zai-org/GLM-4.5V",
    ),
    *(
        "/models/Qwen2_5VL-7B",
        "/models/Qwen2-5VL-7B",
        "/models/qwen2vl_7b",
        "/models/Qwen25VL-3B",
        "Qwen/Qwen2.5-Omni-7B",
        "lmms-lab/LongLLaVA",
    ),
    *(
        "DAMO-NLP-SG/VideoLLaMA3-7B",
        "Efficient-Large-Model/VILA-8B",
        "nvidia/NVLM-D-72B",
        "Qwen/QVQ-72B-Preview",
        "google/medgemma-4b-it",
    ),
    *(
        "mistralai/Magistral-Small-2509",
        "moonshotai/Kimi-K2.6",
        "Qwen/Qwen3.6-35B-A3B",
        "mistralai/Mistral-Large-3-675B-Instruct-2512",
    ),
    *(
        "deepseek-ai/DeepSeek-OCR",
        "rednote-hilab/dots.ocr",
        "internlm/internlm-xcomposer2d5-7b",
        "mistralai/Voxtral-Mini-3B-2507",
    ),
    *(
        "vikhyatk/moondream2",
        "BAAI/Emu3-Chat",
        "ByteDance-Seed/BAGEL-7B-MoT",
        "facebook/chameleon-7b",
        "fixie-ai/ultravox-v0_5",
    ),
    *(
        "openai/whisper-large-v3",
        "OpenGVLab/VideoChat-R1_7B",
        "Salesforce/xgen-mm-phi3",
        "facebook/Perception-LM-8B",
        "OpenGVLab/InternVL3-8B",
    ),
    *(
        "openbmb/MiniCPM-o-2_6",
        "openbmb/MiniCPM-V-4_5",
        "zai-org/GLM-4.1V-9B-Thinking",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ),
)
READ_ONLY = (
    *(
        "google/gemma-3-1b-it",
        "google/gemma-2-9b-it",
        "Qwen/Qwen3-8B",
        "mistralai/Mistral-Small-24B-Instruct-2501",
        "zai-org/GLM-4.5",
    ),
    *(
        "mistralai/Ministral-8B-Instruct-2410",
        "microsoft/Phi-4-mini-instruct",
        "moonshotai/Kimi-K2-Instruct",
        "Skywork/Skywork-OR1-7B",
    ),
    *(
        "meta-llama/Llama-3.2-3B-Instruct",
        "deepseek-ai/deepseek-math-7b-instruct",
        "stepfun-ai/Step-2",
    ),
    *(
        "me/Qwen3-8B-VLarge",
        "me/reveal-7b",
        "me/evil-7b",
        "/vllm/Qwen3_8B",
        "me/qwen3_8b",
        "mistralai/Mistral-Large-Instruct-2411",
    ),
    *(
        "mistralai/Magistral-Small-2507",
        "mistralai/Ministral-3B-Instruct",
        "me/revision-2/Qwen2.5-7B",
        "me/mediocre-village-7b",
        "Qwen/Qwen3-0.6B",
    ),
    *(
        "deepseek-ai/DeepSeek-V3",
        "microsoft/phi-4",
        "me/Qwen3-8B-v2",
        "google/gemma-1.1-7b-it",
        "/images/Qwen3-4B",
        "Qwen/Qwen3-235B-A22B",
    ),
)


@pytest.mark.parametrize("model", [*SEE_OR_HEAR, *READ_ONLY])
def test_models_of_images_are_known_by_their_names_and_text_models_are_not_taken_for_them(
    model: str,
) -> None:
    result = translated("v0.7.0", f"actor_rollout_ref.model.path={model}", base=BASE)
    assert ("images" in rules_found(result, "person")) is (model in SEE_OR_HEAR)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        (
            {
                "architectures": ["Qwen2_5_VLForConditionalGeneration"],
                "model_type": "qwen2_5_vl",
                "vision_config": {"depth": 32},
            },
            "vision_config",
        ),
        ({"model_type": "qwen2_audio", "audio_config": {"d_model": 8}}, "audio_config"),
        ({"model_type": "qwen2_vl"}, "model_type qwen2_vl"),
        (
            {"architectures": ["XForConditionalGeneration"], "text_config": {"hidden_size": 8}},
            "XForConditionalGeneration",
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, ""),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "vision_config": None,
            },
            "",
        ),
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, ""),
    ],
)
def test_the_config_json_of_a_local_folder_says_whether_its_model_sees(
    tmp_path: Path, fields: dict[str, object], part: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    result = translated("v0.8.0", f"actor_rollout_ref.model.path={tmp_path}", base=BASE)
    assert [
        finding.message
        for finding in result.findings
        if finding.rule == "images" and f"config.json says {part})" in finding.message
    ] or not part
    assert (result.settings == ()) is bool(part)


def test_the_trainer_reads_a_config_json_as_the_translation_does() -> None:
    # Each package is installed without the other, so each has the rule; the two must not drift
    # apart.
    trainer = pytest.importorskip(
        "temper_trainer.config_loading.checks.model_folders", reason="needs temper-trainer"
    )
    trainer_names = {
        "_PARTS": "_MULTIMODAL_KEY_PATTERN",
        "_CLASSES": "_MULTIMODAL_CLASS_PATTERN",
        "_TYPES": "_MULTIMODAL_TYPE_PATTERN",
    }
    for name, trainer_name in trainer_names.items():
        assert getattr(trainer, trainer_name) == getattr(images, name), name
    translation = inspect.getsource(images._part)
    for name, trainer_name in {**trainer_names, "_part": "_find_multimodal_entry"}.items():
        translation = re.sub(rf"\b{name}\b", trainer_name, translation)
    same = inspect.getsource(trainer._find_multimodal_entry)
    assert ast.dump(ast.parse(same)) == ast.dump(ast.parse(translation))


def test_a_config_json_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        assert translated("v0.8.0", f"actor_rollout_ref.model.path={tmp_path}", base=BASE).settings


@pytest.mark.parametrize(
    ("setting", "sees"),
    [
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt.image=2", True),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt.image=0", False),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=4", True),
        (
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0",
            False,
        ),  # released runs of text models write it
        ("data.image_patch_size=16", True),
        ("data.return_multi_modal_inputs=False", True),
        ("actor_rollout_ref.actor.num_images_in_input=1", True),
        ("actor_rollout_ref.model.vla=openvla-oft", True),
    ],
)
def test_settings_that_only_a_run_of_images_writes(setting: str, sees: bool) -> None:
    result = translated("v0.9.0", setting, base=BASE)
    assert ("images" in rules_found(result, "person")) is sees


SEES = (*BASE, "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct")
FREEZE = "actor_rollout_ref.actor.freeze_vision_tower"
ADAPTER = "actor_rollout_ref.model.lora_rank=8"


@pytest.mark.parametrize(
    ("version", "overrides", "reason"),
    [
        ("v0.5.0", [], "v0.5.0 had no setting that froze it"),
        ("v0.7.0", [], f"{FREEZE} is false"),
        ("v0.7.0", [f"{FREEZE}=True"], ""),
        ("v0.8.0", [f"{FREEZE}=True"], f"v0.8.0 did not read {FREEZE}"),
        (
            "v0.7.1",
            [f"{FREEZE}=True", "trainer.use_legacy_worker_impl=disable"],
            f"the engines of v0.7.1 did not read {FREEZE}",
        ),
        (
            "v0.7.0",
            [f"{FREEZE}=True", "--config-name=ppo_megatron_trainer"],
            f"Megatron did not read {FREEZE}",
        ),
        ("v0.7.0", [ADAPTER], f"{FREEZE} is false"),
        ("v0.7.0", [ADAPTER, "actor_rollout_ref.model.exclude_modules=.*visual.*"], ""),
    ],
)
def test_encoder_that_the_old_run_trained_is_reported(
    version: str, overrides: list[str], reason: str
) -> None:
    result = translated(version, *overrides, base=SEES)
    messages = [item.message for item in result.findings if item.rule == "vision-tower"]
    assert [message.partition(",")[0] for message in messages] == ([reason] if reason else [])
    is_adapter = ADAPTER in overrides
    assert all(("an adapter" in message) is is_adapter for message in messages)


@pytest.mark.parametrize(
    ("model", "is_reported"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", True),
        ("Qwen/Qwen2-VL-2B", True),
        ("google/gemma-3-27b-it", True),
        ("google/gemma-4-31B-it", False),
        ("openvla/openvla-7b", False),
        ("Qwen/Qwen2-Audio-7B", False),
    ],
)
def test_encoder_is_mentioned_for_models_whose_text_part_is_trained(
    model: str, is_reported: bool
) -> None:
    result = translated("v0.7.0", f"actor_rollout_ref.model.path={model}", base=BASE)
    assert "images" in rules_found(result, "person")
    assert ("vision-tower" in rules_found(result, "hazard")) is is_reported


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("actor_rollout_ref.actor.ppo_epochs=1", "text-part"),
        ("data.image_key=images", "images"),
        ("data.train_files=/data/geo3k/train.parquet", "images"),
        ("critic.model.path=Qwen/Qwen2.5-VL-7B", "images"),
        ("model_engine=megatron", "images"),
    ],
)
def test_qwen3_5_is_translated_for_text_data_with_a_question(override: str, rule: str) -> None:
    model = "actor_rollout_ref.model.path=Qwen/Qwen3.5-35B-A3B"
    result = translated("v0.9.1", model, override, base=BASE)
    assert rules_found(result, "person") == {rule}
    assert ("actor.engine.model.path" in values(result)) is (rule == "text-part")
    assert "vision-tower" in rules_found(result, "hazard")


def test_types_whose_text_part_is_trained_are_those_of_the_engines() -> None:
    reference = pytest.importorskip(
        "temper_engine_api.vision_language", reason="the checkpoint extra"
    )
    assert reference.VISION_LANGUAGE_TYPES == images.TEXT_PART_TYPES


@pytest.mark.parametrize(
    ("model_type", "is_reported"), [("qwen3_vl_moe", True), ("gemma3", True), ("gemma4", False)]
)
def test_config_of_a_folder_tells_if_the_text_part_is_trained(
    tmp_path: Path, model_type: str, is_reported: bool
) -> None:
    fields = {"model_type": model_type, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    result = translated("v0.7.0", f"actor_rollout_ref.model.path={tmp_path}", base=BASE)
    assert ("vision-tower" in rules_found(result, "hazard")) is is_reported


@pytest.mark.parametrize(
    ("entry", "is_known"),
    [
        ("verl.trainer.main_ppo", True),
        ("/old/verl/verl/trainer/main_ppo.py", True),
        ("verl.trainer.main_ppo_sync", True),
        ("verl.trainer.main_ppo_v0", False),  # it runs nothing by itself
        ("verl.experimental.one_step_off_policy.main_ppo", True),
        ("recipe.dapo.main_dapo", True),
        ("recipe.transfer_queue.main_ppo", True),
        ("main_dapo.py", True),
        ("recipe.async_flow.grpo_main", False),
        ("/old/verl/recipe/partial_rollout/main_ppo.py", False),
        ("recipe.dapo.mine.main_dapo", False),
        ("tests/e2e/arithmetic_sequence/rl/main_trainer.py", False),
        ("train_mine.py", False),
        ("verl.mix_src.main_mix_ppo", False),
        ("verl.agent_trainer.main_ppo", False),
        ("verl.trainer.main_ppo_mine", False),
        ("rllm.trainer.verl.train_agent_ppo", False),
    ],
)
def test_program_of_no_release_is_reported(entry: str, is_known: bool) -> None:
    result = translated("v0.7.0", entry=entry)
    assert ("fork-program" in rules_found(result, "hazard")) is not is_known


@pytest.mark.parametrize(
    "entry",
    ["recipe.dance_grpo.main_dance", "recipe.atropos.main_atropos", "recipe.spo.spo_main_ppo"],
)
def test_trainer_with_data_or_losses_of_its_own_has_no_counterpart(entry: str) -> None:
    assert "foreign" in rules_found(translated("v0.9.1", entry=entry), "person")


def test_actor_of_megatron_that_is_placed_by_hand_chooses_its_engine() -> None:
    placed = "actor@actor_rollout_ref.actor=megatron_actor"
    result = translated("v0.9.1", placed)
    assert values(result)["model_engine"] == "megatron"
    assert "group-packages" not in rules_found(result, "person")


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("actor@actor_rollout_ref.actor=dp_actor", None),
        ("rollout@actor_rollout_ref.rollout=rollout", None),
        ("actor@actor_rollout_ref.actor=mlite_actor", "group-packages"),
        ("critic@critic=megatron_critic", "group-packages"),
        ("data@data=mine", "group-packages"),
        ("actor@actor_rollout_ref.actor=veomni_actor", "foreign"),
        ("model_engine=dp", None),
        ("model_engine=mlite", "foreign"),
    ],
)
def test_choice_of_a_group_that_no_release_had_is_a_question(
    override: str, rule: str | None
) -> None:
    questions = rules_found(translated("v0.9.1", override), "person")
    assert questions == ({rule} if rule else set())


def test_settings_of_another_engine_are_not_called_refused() -> None:
    result = translated(
        "v0.9.1", "model_engine=veomni", "actor_rollout_ref.actor.veomni.fsdp_size=4"
    )
    assert "refused" not in {finding.level for finding in result.findings}


def test_sampler_of_another_kind_is_a_hazard() -> None:
    result = translated("v0.9.1", "actor_rollout_ref.rollout.name=dynamo")
    (message,) = [each.message for each in result.findings if each.rule == "other-sampler"]
    assert message.startswith("actor_rollout_ref.rollout.name is dynamo")


@pytest.mark.parametrize(("version", "failed"), [("v0.9.1", False), ("v0.9.0", True)])
def test_strategy_of_a_release_is_not_called_a_failure(version: str, failed: bool) -> None:
    result = translated(version, "actor_rollout_ref.actor.strategy=fsdp_turbo")
    (message,) = [each.message for each in result.findings if each.rule == "strategy"]
    assert ("would have failed" in message) is failed


def test_argument_of_a_server_is_no_quantized_sampler() -> None:
    argument = "+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4"
    result = translated("v0.9.1", argument, "actor_rollout_ref.rollout.quantization=fp8")
    hazards = {each.key: each.hazard for each in result.tokens if each.hazard}
    assert "quantized" in hazards["actor_rollout_ref.rollout.quantization"]
    assert "quantized" not in hazards[argument[1:].partition("=")[0]]


@pytest.mark.parametrize(
    ("version", "override", "taken"),
    [
        ("v0.5.0", "+actor_rollout_ref.ref.model.path=/models/r", False),
        ("v0.6.1", "+actor_rollout_ref.ref.model.path=/models/r", True),
        ("v0.7.1", "+actor_rollout_ref.ref.model.path=/models/r", True),
        ("v0.8.0", "+actor_rollout_ref.ref.model.path=/models/r", False),
    ],
)
def test_model_of_the_reference_is_kept_where_it_was_read(
    version: str, override: str, taken: bool
) -> None:
    result = translated(version, "actor_rollout_ref.actor.use_kl_loss=True", override)
    assert ("ref.engine.model.path" in values(result)) is taken


@pytest.mark.parametrize(
    ("setting", "is_hazard"),
    [
        ("exp_avg_dtype=bf16", True),
        ("exp_avg_sq_dtype=bf16", True),
        ("main_grads_dtype=bf16", True),
        ("exp_avg_dtype=fp32", False),
        ("override_optimizer_config.exp_avg_dtype=bf16", True),
        ("override_optimizer_config.store_param_remainders=True", False),
    ],
)
def test_states_of_the_optimizer_in_fewer_bits_are_a_hazard(setting: str, is_hazard: bool) -> None:
    key = f"++actor_rollout_ref.actor.optim.{setting}"
    result = translated("v0.9.1", "model_engine=megatron", key)
    assert ("optimizer-dtypes" in rules_found(result, "hazard")) is is_hazard


@pytest.mark.parametrize(
    ("version", "entry", "key"),
    [
        ("v0.2", "verl.trainer.main_ppo", "actor_rollout_ref.model.external_lib"),
        ("v0.9.1", "verl.trainer.main_ppo", "critic.model.external_lib"),
        ("v0.7.0", "verl.trainer.fsdp_sft_trainer", "model.external_lib"),
        ("v0.9.1", "verl.trainer.sft_trainer", "model.external_lib"),
        ("v0.7.0", "verl.trainer.main_generation", "model.external_lib"),
    ],
)
def test_library_that_the_workers_imported_is_a_question(
    version: str, entry: str, key: str
) -> None:
    for value, is_question in (("my.models", True), ("null", False)):
        result = translate([f"{key}={value}"], entry=entry, version=version)
        assert ("external-library" in rules_found(result, "person")) is is_question


def test_reference_to_the_actors_library_is_no_second_question() -> None:
    reference = {"critic": {"model": {"external_lib": "${actor_rollout_ref.model.external_lib}"}}}
    result = translate(BASE, entry="verl.trainer.main_ppo", version="v0.9.1", base=reference)
    assert "external-library" not in rules_found(result, "person")


def test_tokenizer_of_the_data_block_was_read_by_no_release() -> None:
    result = translated("v0.7.0", "data.tokenizer=/models/t")
    assert "No release read it" in result.tokens[-1].reason
    assert "data.tokenizer.path" not in values(result)


@pytest.mark.parametrize("entry", ["verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer"])
def test_argument_of_an_optimizer_in_fine_tuning_is_a_hazard(entry: str) -> None:
    argument = "+optim.override_optimizer_config.eps=1e-6"
    result = translate([argument], entry=entry, version="v0.7.0")
    assert "optimizer-arguments" in rules_found(result, "hazard")


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.fsdp_config.qat.enable",
        "actor_rollout_ref.actor.qat.enable",
        "actor_rollout_ref.actor.megatron.qat.enable",
        "critic.fsdp.qat.enable",
        "engine.qat.enable",
    ],
)
def test_quantization_aware_training_is_a_hazard(key: str) -> None:
    entry = "verl.trainer.sft_trainer" if key.startswith("engine") else "verl.trainer.main_ppo"
    base = ("data.train_files=/t.parquet",)
    run = translated(
        "v0.9.1", "algorithm.adv_estimator=gae", f"++{key}=True", base=base, entry=entry
    )
    assert "qat" in rules_found(run, "hazard")


@pytest.mark.parametrize("version", ["v0.7.1", "v0.9.1"])
@pytest.mark.parametrize("role", ["actor", "ref"])
def test_replay_of_experts_on_megatron_is_a_hazard(version: str, role: str) -> None:
    # engine_workers.py reads the key of the engine since v0.7.1.
    megatron = ("actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron")
    key = f"actor_rollout_ref.{role}.megatron.router_replay.mode"
    for mode, is_reported in (("R3", True), ("R2", True), ("disabled", False)):
        run = translated(version, *megatron, f"{key}={mode}")
        assert ("router-replay" in rules_found(run, "hazard")) is is_reported


def test_argument_that_equals_the_default_is_no_hazard() -> None:
    shape = "actor_rollout_ref.actor.optim.num_cycles="
    assert "schedule-shape" not in rules_found(translated("v0.9.0", f"{shape}0.5"), "hazard")
    assert "schedule-shape" in rules_found(translated("v0.9.0", f"{shape}1.5"), "hazard")


def test_logged_losses_of_a_single_update_are_not_mentioned() -> None:
    single = translated("v0.7.0", "data.train_batch_size=16")
    assert "summed-metrics" not in rules_found(single, "note")
    assert "summed-metrics" in rules_found(translated("v0.7.0"), "note")


def test_encoder_of_a_text_model_is_not_mentioned() -> None:
    assert "vision-tower" not in rules_found(translated("v0.7.0", base=BASE), "hazard")


def test_a_field_that_makes_another_model_is_a_persons_to_write() -> None:
    key = "actor_rollout_ref.model.override_config"
    result = translated("v0.7.0", f"+{key}.num_hidden_layers=4", base=BASE)
    assert "override-config" in rules_found(result, "person")
    assert any(
        "num_hidden_layers=4 changes the model itself" in finding.message
        for finding in result.findings
    )
    harmless = (
        f"+{key}.attention_dropout=0.",
        f"+{key}.max_position_embeddings=32768",
        f"+{key}.attn_implementation=eager",
    )
    assert "override-config" not in rules_found(
        translated("v0.7.0", *harmless, base=BASE), "person"
    )


def test_what_a_user_set_and_nothing_carries_on_is_reported() -> None:
    result = translated("v0.7.0", "actor_rollout_ref.actor.shuffle=True", base=BASE)
    assert "minibatch-shuffle" in rules_found(result, "hazard")
    assert "minibatch-shuffle" not in rules_found(
        translated("v0.7.0", "actor_rollout_ref.actor.shuffle=False", base=BASE), "hazard"
    )


def test_a_strategy_that_is_not_its_trees_is_no_guess() -> None:
    given = "actor_rollout_ref.actor.strategy=megatron"
    assert "strategy" in rules_found(translated("v0.7.0", given), "person")
    named = translated("v0.7.0", given, config_name="ppo_megatron_trainer")
    assert "strategy" not in rules_found(named, "person")
    assert (
        next(item.comment for item in named.settings if item.key == "model_engine")
        == "actor_rollout_ref.actor.strategy [model-engine]"
    )


TURNS = "actor_rollout_ref.rollout.multi_turn"


def test_tools_become_an_environment_that_calls_them() -> None:
    old = (
        f"{TURNS}.enable=True",
        f"{TURNS}.tool_config_path=tools.yaml",
        f"{TURNS}.max_assistant_turns=5",
        f"{TURNS}.max_user_turns=2",
    )
    translation = translated("v0.7.0", *old, "data.max_response_length=512")
    result = values(translation)
    assert result["environment.name"] == "temper_legacy_shim.old_tools:HermesTools"
    assert (result["data.tools_path"], result["environment.arguments.path"]) == (
        "tools.yaml",
        "tools.yaml",
    )
    # Two answers leave room for a third completion, and all of a rollout had to fit into one
    # response.
    assert (result["environment.max_turns"], result["environment.max_tokens"]) == (3, 512)
    assert (
        result["environment.arguments.max_characters"],
        result["environment.arguments.cut"],
    ) == (256, "middle")
    assert "multi-turn" in rules_found(translation, "hazard")
    assert translation.outcome is Outcome.PINNED
    assert {token.disposition for token in translation.tokens if token.key.startswith(TURNS)} <= {
        "mapped",
        "dropped",
    }


def test_turns_that_nothing_answers_are_one_completion() -> None:
    translation = translated("v0.7.0", f"{TURNS}.enable=True", f"{TURNS}.format=hermes")
    assert not any(key.startswith("environment") for key in values(translation))
    assert "multi-turn" in rules_found(translation, "note")
    assert translation.outcome is Outcome.PINNED


@pytest.mark.parametrize(
    "old",
    [
        (f"{TURNS}.interaction_config_path=i.yaml",),
        (f"{TURNS}.tool_config_path=t.yaml", f"{TURNS}.format=gpt-oss"),
    ],
)
def test_an_interaction_or_another_form_of_calls_is_a_question(old: tuple[str, ...]) -> None:
    translation = translated("v0.7.0", *old)
    assert "multi-turn" in rules_found(translation, "person")
    assert not any(key.startswith("environment") for key in values(translation))


def test_a_reward_model_scores_as_it_did() -> None:
    served = translated(
        "v0.7.1", "reward.reward_model.enable=True", "reward.reward_model.model_path=/models/rm"
    )
    result = values(served)
    assert result["reward.function"] == "temper_legacy_shim.old_reward_models:by_model"
    assert (result["reward.arguments.path"], result["reward.arguments.messages_key"]) == (
        "/models/rm",
        "prompt",
    )
    assert result["data.train.extra_keys"] == ["data_source", "extra_info", "prompt"]
    assert "reward-model" in rules_found(served, "hazard")
    assert served.outcome is Outcome.PINNED


def test_an_old_reward_worker_without_an_input_tokenizer_saw_the_policys_own_text() -> None:
    old = (
        "reward_model.enable=True",
        "reward_model.model.path=/models/rm",
        "reward_model.model.input_tokenizer=null",
    )
    result = values(translated("v0.4.1", *old))
    assert result["reward.arguments.messages_key"] is None
    assert result["data.train.extra_keys"] == ["data_source", "extra_info"]


def test_a_reward_model_that_a_function_asks_is_a_question() -> None:
    old = (
        "reward_model.enable=True",
        "reward_model.model.path=/models/rm",
        "custom_reward_function.path=mine.py",
    )
    translation = translated("v0.7.0", *old)
    assert "reward-model" in rules_found(translation, "person")
    assert values(translation)["reward.function"] == "temper_legacy_shim.old_rewards:from_file"


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_a_group_of_one_kept_its_bare_reward_and_keeps_it(name: str) -> None:
    result = translated(
        "v0.7.0", f"algorithm.adv_estimator={name}", "actor_rollout_ref.rollout.n=1"
    )
    assert (
        values(result)["algorithm.advantage.name"]
        == "temper_legacy_shim.old_algorithms:bare_reward"
    )
    assert values(result)["algorithm.group_size"] == 1
    assert "advantage" in rules_found(result, "hazard")


def test_an_estimator_that_did_something_else_with_a_group_of_one_is_a_question() -> None:
    result = translated(
        "v0.7.0",
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        "actor_rollout_ref.rollout.n=1",
    )
    assert "advantage" in rules_found(result, "person")


def test_losses_that_the_trainer_has_no_name_for_are_the_old_ones_by_import_path() -> None:
    mode = "actor_rollout_ref.actor.policy_loss.loss_mode"
    plain = values(translated("v0.7.0", f"{mode}=gpg"))
    assert plain["algorithm.policy_loss.name"] == "temper_legacy_shim.old_algorithms:PlainGradient"
    assert not NO_CLIP & plain.keys()


def test_the_bounds_of_dppo_are_those_of_the_clip_and_of_the_dual_clip() -> None:
    mode, bounds = (
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        ("clip_ratio_low=0.1", "clip_ratio_c=50.0"),
    )
    kept = translated(
        "v0.7.1", f"{mode}=dppo_tv", *(f"actor_rollout_ref.actor.{bound}" for bound in bounds)
    )
    block = "algorithm.policy_loss"
    result = values(kept)
    assert (result[f"{block}.name"], result[f"{block}.divergence"]) == ("dppo", "tv")
    assert (
        result[f"{block}.clip_low"],
        result[f"{block}.clip_high"],
        result[f"{block}.max_ratio"],
    ) == (0.1, 0.2, 50.0)
    assert f"{block}.dual_clip" not in result
    assert kept.outcome is Outcome.PINNED


def test_a_kl_estimator_with_a_plus_failed_before_v0_8_and_works_here() -> None:
    plus = (
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl+",
    )
    before, since = translated("v0.7.1", *plus), translated("v0.8.0", *plus)
    assert (
        values(before)["algorithm.kl_estimator"] == values(since)["algorithm.kl_estimator"] == "k3+"
    )
    assert "kl-estimator" in rules_found(before, "refused")
    assert "kl-estimator" not in rules_found(since, "refused")


def test_k3_keeps_the_bound_that_it_always_had() -> None:
    result = translated("v0.7.0", "actor_rollout_ref.actor.use_kl_loss=True")
    assert values(result)["algorithm.kl_clamp"] == 10.0
    assert "algorithm.kl_clamp" in pinned(result)
    assert "algorithm.kl_clamp" not in values(translated("v0.7.0"))


def test_a_name_on_the_hub_is_passed_on_because_the_trainer_loads_it() -> None:
    model, tokenizer = (
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B",
        "actor_rollout_ref.model.tokenizer_path=Qwen/Qwen3-8B",
    )
    result = translated("v0.9.0", model, tokenizer)
    assert values(result)["actor.engine.model.path"] == "Qwen/Qwen2.5-0.5B"
    assert values(result)["data.tokenizer.path"] == "Qwen/Qwen3-8B"
    assert not [
        finding for finding in result.findings if finding.rule in ("model-path", "tokenizer-path")
    ]


def test_the_optimal_token_baseline_says_what_it_estimates() -> None:
    name = "algorithm.adv_estimator=optimal_token_baseline"
    weighted = translated("v0.9.0", name, "algorithm.rollout_correction.rollout_is=token")
    for result, count in ((translated("v0.9.0", name), 1), (weighted, 2)):
        assert (
            sum(
                "energies in" in finding.message or "gradient energy" in finding.message
                for finding in result.findings
            )
            == count
        )


def test_greedy_training_is_a_question_of_the_samplers_that_read_it() -> None:
    for version, given in (
        ("v0.7.0", ("temperature=0",)),
        ("v0.6.1", ("name=hf", "do_sample=False")),
    ):
        overrides = [f"actor_rollout_ref.rollout.{each}" for each in given]
        assert "greedy" in rules_found(translated(version, *overrides), "person")
    both = [f"actor_rollout_ref.rollout.{each}" for each in ("name=hf", "do_sample=False")]
    twice = translated("v0.6.1", *both, "actor_rollout_ref.rollout.temperature=0")
    assert [each.rule for each in twice.findings].count("greedy") == 1
    unread = translated("v0.6.1", "actor_rollout_ref.rollout.do_sample=False")
    assert "greedy" not in rules_found(unread, "person")
    assert "hf" in unread.tokens[-1].reason


@pytest.mark.parametrize(
    ("version", "mode", "expected"),
    [
        ("v0.9.1", "async", 0.6),
        ("v0.7.0", "async", 0.6),
        ("v0.6.1", "async", 0.6),
        ("v0.6.1", "sync", 0.0),
        ("v0.4.1", "async", 0.6),
        ("v0.4.0", "sync", 0.0),
    ],
)
def test_evaluation_by_servers_is_drawn_without_do_sample(
    version: str, mode: str, expected: float
) -> None:
    block, files = "actor_rollout_ref.rollout", "data.val_files=/data/test.parquet"
    given = (f"{block}.mode={mode}", f"{block}.val_kwargs.temperature=0.6")
    result = translated(version, files, *given)
    assert values(result).get("run.eval_sampling.temperature", 0.0) == expected


@pytest.mark.parametrize(
    ("version", "mode", "is_read"),
    [
        ("v0.4.1", "async", True),
        ("v0.6.1", "sync", True),
        ("v0.6.1", "async", False),
        ("v0.7.0", "async", False),
        ("v0.7.1", "async", True),
    ],
)
def test_top_k_that_servers_did_not_take_is_reported(
    version: str, mode: str, *, is_read: bool
) -> None:
    block, files = "actor_rollout_ref.rollout", "data.val_files=/data/test.parquet"
    drawn = (f"{block}.val_kwargs.do_sample=True", f"{block}.val_kwargs.temperature=0.6")
    given = (f"{block}.top_k=20", f"{block}.val_kwargs.top_k=30", f"{block}.mode={mode}")
    result = translated(version, files, *drawn, *given)
    new = values(result)
    expected = (20, 30) if is_read else (0, 0)
    assert (new.get("sampling.top_k", 0), new.get("run.eval_sampling.top_k", 0)) == expected
    assert [finding.rule for finding in result.findings].count("top-k") == (0 if is_read else 2)


@pytest.mark.parametrize(
    ("version", "mode", "is_drawn"),
    [
        ("v0.6.1", "sync", False),
        ("v0.6.1", "async", True),
        ("v0.7.1", "async", True),
        ("v0.8.0", "async", False),
    ],
)
def test_baseline_of_remax_that_agent_loops_drew_is_a_hazard(
    version: str, mode: str, *, is_drawn: bool
) -> None:
    overrides = ("algorithm.adv_estimator=remax", f"actor_rollout_ref.rollout.mode={mode}")
    messages = [finding.message for finding in translated(version, *overrides).findings]
    assert any("whose baseline" in message for message in messages) is is_drawn


def test_switch_that_removes_earlier_checkpoints_wins_over_their_number() -> None:
    given = ("trainer.max_actor_ckpt_to_keep=5", "+trainer.remove_previous_ckpt_in_save=True")
    assert values(translated("v0.4.1", *given))["run.max_ckpt_to_keep"] == 1


def test_run_that_only_evaluates_is_not_called_greedy_training() -> None:
    greedy = "actor_rollout_ref.rollout.temperature=0"
    questions = rules_found(translated("v0.7.0", greedy, "trainer.val_only=True"), "person")
    assert ("val-only" in questions, "greedy" in questions) == (True, False)


def test_evaluations_keep_their_number_of_completions() -> None:
    block = "actor_rollout_ref.rollout.val_kwargs"
    files = "data.val_files=/data/test.parquet"
    drawn = (files, f"{block}.do_sample=True", f"{block}.temperature=0.7")
    result = translated("v0.7.0", *drawn, f"{block}.n=30")
    assert values(result)["run.eval_num_completions"] == 30
    assert "eval-completions" not in rules_found(result, "hazard")
    assert "run.eval_num_completions" not in values(translated("v0.7.0", files, f"{block}.n=30"))


@pytest.mark.parametrize("number", ["trainer.nnodes=0", "trainer.n_gpus_per_node=-1"])
def test_cluster_of_no_machines_is_a_question(number: str) -> None:
    assert "cluster" in rules_found(translated("v0.7.0", number), "person")


def test_agent_loop_of_the_user_is_a_question() -> None:
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    own = translated("v0.8.0", f"{key}=my_agent")
    assert "multi-turn" in rules_found(own, "person")
    usual = translated("v0.8.0", f"{key}=single_turn_agent")
    assert usual.outcome is not Outcome.PERSON
    assert "one completion" in usual.tokens[-1].reason
