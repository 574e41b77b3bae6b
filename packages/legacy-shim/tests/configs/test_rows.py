"""The executable rows: faulty ones are refused, and each one acts in some translation."""

import re

import pytest

from temper_legacy_shim.configs.mapping import rows
from temper_legacy_shim.configs.mapping.builder import Draft, trainer_defaults
from temper_legacy_shim.configs.mapping.rows import Row, apply_rows, parse_rows, steps
from temper_legacy_shim.configs.mapping.rules import rules
from temper_legacy_shim.configs.reading.composition import old_config
from temper_legacy_shim.configs.reading.trees import known_keys

from .conftest import BASE, translated
from .examples import BASES, example_of

GOOD = "clip\tclip\talgorithm.x\tactor.y\tnumber\tsince v0.4.0, not set\twhy"


@pytest.mark.parametrize(
    ("part", "fault", "message"),
    [
        ("\twhy", "", "line 2: 6 columns, but 7 are expected"),
        ("number", "nubmer", "unknown converter 'nubmer'. Choose one of number, any"),
        ("number", "find no-such", "messages.tsv has no message 'no-such'"),
        ("number", "find gamma.undiscounted", "is of level dropped"),
        ("number", "drop value-loss", "is of level hazard"),
        ("number", "words a=b c", "and else=z, but not 'a=b c'"),
        ("number", "words a=b else=?no-such", "has no message 'no-such'"),
        ("since v0.4.0", "since v0.4", "v0.4 in 'since v0.4' is no release"),
        ("not set", "not sets?", "'not sets\\?' is no condition, and no name of a fact"),
        ("not set", "not > ", "is no condition"),
    ],
)
def test_a_faulty_row_is_refused_with_its_line(part: str, fault: str, message: str) -> None:
    assert parse_rows([GOOD.split("\t")])["clip"][0].sets
    with pytest.raises(ValueError, match=f"rows.tsv, line 2: .*{message.removeprefix('line 2: ')}"):
        parse_rows([GOOD.replace(part, fault).split("\t")])


def test_a_name_that_nothing_defines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = parse_rows([GOOD.replace("not set", "is_megatrom").split("\t")])
    monkeypatch.setattr(rows, "steps", lambda: table)
    old = old_config(version="v0.7.0", family="ppo_fsdp", entry="", defaults={})
    with pytest.raises(LookupError, match="'is_megatrom', which is no fact and was not passed"):
        apply_rows(Draft(old=old, numerics="temper", cluster=None), "clip")


def test_keys_that_rows_compare_are_old_or_new_but_not_both() -> None:
    compared = {each.key for row in table() for each in row.when if each.word == "is"}
    assert "algorithm.policy_loss.name" in compared
    assert compared & set(trainer_defaults()) & set(known_keys()) == set()


def table() -> list[Row]:
    return [row for rows_of_step in steps().values() for row in rows_of_step]


SHORT = {
    "@ppo": "verl.trainer.main_ppo",
    "@megatron": "verl.trainer.main_ppo --config-name=ppo_megatron_trainer",
    "@actor": "actor_rollout_ref.actor",
    "@model": "actor_rollout_ref.model",
    "@loss": "actor_rollout_ref.actor.policy_loss",
    "@rollout": "actor_rollout_ref.rollout",
    "@turns": "actor_rollout_ref.rollout.multi_turn",
    "@distillation": "distillation.distillation_loss",
    "@correction": "algorithm.rollout_correction",
    "@first": "algorithm.rollout_is",
    "@buffer": "+reward_model.reward_kwargs.overlong_buffer_cfg",
}
RUNS = """
v0.7.0 @megatron actor_rollout_ref.model.trust_remote_code=True @actor.optim.clip_grad=0
v0.8.0 @megatron @actor.megatron.use_mbridge=False actor_rollout_ref.model.lora.rank=8 \
    actor_rollout_ref.model.lora.lora_A_init_method=kaiming \
    actor_rollout_ref.model.lora.lora_B_init_method=kaiming
v0.7.0 @ppo @actor.grad_clip=0 @actor.fsdp_config.dtype=float16 @rollout.prompt_length=100
v0.7.0 @ppo algorithm.adv_estimator=gpg @rollout.n=1
v0.9.0 @ppo algorithm.adv_estimator=grpo_passk
v0.9.0 @ppo algorithm.adv_estimator=optimal_token_baseline @turns.enable=True \
    algorithm.rollout_correction.rollout_is=token
v0.7.0 @ppo algorithm.adv_estimator=remax @rollout.top_k=5 @rollout.val_kwargs.top_k=5 \
    @rollout.val_kwargs.temperature=1
v0.7.1 @ppo @loss.loss_mode=dppo_kl @actor.loss_scale_factor=9
v0.7.0 @ppo @loss.loss_mode=kl_cov trainer.logger=[swanlab] @rollout.mode=sync
v0.7.0 @ppo @loss.loss_mode=gspo @actor.entropy_coeff=0.1
v0.7.0 @ppo @actor.clip_ratio_c=1 trainer.total_training_steps=0 trainer.total_epochs=0
v0.7.0 @ppo data.val_files=/v.parquet data.val_max_samples=9 data.filter_overlong_prompts=True
v0.6.1 @ppo @rollout.name=hf @rollout.do_sample=False +@actor.tis_imp_ratio_cap=2
v0.7.0 @ppo algorithm.filter_groups.enable=True algorithm.use_pf_ppo=True
v0.9.0 @ppo trainer.use_v1=True algorithm.filter_groups.enable=True data.gen_batch_size=4
v0.9.0 @ppo trainer.use_v1=True algorithm.filter_groups.enable=True \
    algorithm.filter_groups.metric=acc trainer.v1.trainer_mode=async
v0.4.1 @ppo algorithm.adv_estimator=gae algorithm.use_pf_ppo=True \
    algorithm.pf_ppo.reweight_method=max_min
v0.7.0 @ppo algorithm.adv_estimator=gae algorithm.use_pf_ppo=True \
    algorithm.pf_ppo.reweight_method=max_min
v0.7.0 @ppo algorithm.adv_estimator=gae algorithm.use_pf_ppo=True \
    algorithm.pf_ppo.reweight_method=max_random
v0.7.0 recipe.fully_async_policy.fully_async_main async_training.use_rollout_log_probs=False
v0.9.0 @ppo distillation.enabled=True @distillation.loss_mode=k1 \
    @distillation.use_task_rewards=False @distillation.loss_max_clamp=5 \
    +distillation.teacher_models.a.model_path=/a +distillation.teacher_models.a.key=a \
    +distillation.teacher_models.a.num_replicas=2 +distillation.teacher_models.b.model_path=/b
v0.9.0 @ppo distillation.enabled=True @distillation.loss_mode=k1 \
    @distillation.use_policy_gradient=True
v0.9.0 @ppo distillation.enabled=True @distillation.loss_mode=forward_kl_topk
v0.9.0 @ppo distillation.enabled=True @distillation.loss_mode=unheard
v0.6.1 @ppo reward_model.enable=True reward_model.model.path=null
v0.6.1 @ppo reward_model.enable=True custom_reward_function.path=/r.py
v0.7.1 @ppo custom_reward_function.path=/r.py +custom_reward_function.reward_kwargs.scale=2
v0.7.1 @ppo reward_model.enable=True custom_reward_function.path=/r.py
v0.6.1 @ppo reward_model.reward_manager=own
v0.6.1 @ppo +reward_model.overlong_buffer.enable=True
v0.6.1 @ppo reward_model.reward_manager=dapo @buffer.enable=True @buffer.len=9 \
    @buffer.penalty_factor=0
v0.6.1 @ppo reward_model.reward_manager=dapo @buffer.enable=True @buffer.len=9 \
    @buffer.penalty_factor=1 +reward_model.reward_kwargs.max_resp_len=99
v0.6.1 @ppo @turns.enable=True
v0.4.1 @ppo algorithm.adv_estimator=gae @turns.enable=True @turns.tool_config_path=/t.yaml
v0.6.1 @ppo algorithm.adv_estimator=reinforce_plus_plus @turns.interaction_config_path=/i.yaml
v0.7.0 verl.trainer.sft_trainer data.truncation=left data.val_files=/v.parquet \
    data.val_max_samples=9 data.custom_cls.path=/d.py data.tools_key=other
v0.7.0 @ppo data.train_files=[/a.parquet,/b.json]
v0.7.0 @ppo actor_rollout_ref.model.path=null trainer.use_legacy_worker_impl=other
v0.7.0 @ppo --numerics=legacy @actor.strategy=other
main @ppo @actor.strategy=fsdp_turbo @actor.grad_clip=0.5
v0.7.0 @megatron --numerics=legacy @actor.megatron.expert_model_parallel_size=2 \
    @actor.megatron.expert_tensor_parallel_size=1 @actor.optim.optimizer=sgd \
    +@actor.optim.override_optimizer_config.optimizer_cpu_offload=True
v0.9.0 @ppo @actor.optim.optimizer=AdamW8bit @actor.optim.lr_scheduler_type=cosine \
    @actor.optim.lr_warmup_steps=5 @actor.optim.zero_indexed_step=False @actor.loss_scale_factor=9
v0.7.1 @ppo @actor.loss_agg_mode=seq-mean-token-sum-norm
v0.5.0 @ppo @actor.optim.warmup_style=cosine @actor.optim.min_lr_ratio=0.1 \
    @actor.optim.lr_warmup_steps=5
v0.7.1 verl.experimental.fully_async_policy.fully_async_main \
    @actor.optim.lr_scheduler_type=cosine rollout.total_rollout_steps=640
v0.7.0 recipe.fully_async_policy.fully_async_main @actor.optim.lr_scheduler_type=cosine
v0.7.0 recipe.fully_async_policy.fully_async_main @actor.optim.lr_scheduler_type=cosine \
    @actor.optim.total_training_steps=9
v0.7.0 @ppo @actor.use_kl_loss=True @actor.kl_loss_type=other
v0.7.0 @ppo @actor.use_kl_loss=True @actor.kl_loss_type=k3+
v0.7.0 @ppo @actor.use_kl_loss=True @actor.kl_loss_type=k1
v0.7.0 @ppo algorithm.use_kl_in_reward=True algorithm.kl_penalty=other
v0.7.0 @ppo algorithm.use_kl_in_reward=True algorithm.kl_penalty=k2+
v0.7.0 @ppo algorithm.use_kl_in_reward=True algorithm.kl_penalty=k3 @actor.use_kl_loss=True
v0.7.0 @ppo algorithm.use_kl_in_reward=True algorithm.kl_penalty=k2 @actor.use_kl_loss=True
v0.7.0 @ppo algorithm.use_kl_in_reward=True algorithm.kl_penalty=k3 @actor.use_kl_loss=True \
    @actor.kl_loss_type=k2
v0.7.0 @ppo algorithm.use_kl_in_reward=True algorithm.kl_penalty=k3 @actor.use_kl_loss=True \
    @actor.kl_loss_type=k1+
v0.7.0 @ppo @correction.rollout_is=other @correction.rollout_token_veto_threshold=0.0001
v0.7.0 @ppo @correction.rollout_is=sequence @correction.rollout_is_batch_normalize=True
v0.7.1 @ppo @correction.rollout_is=token @correction.bypass_mode=True \
    @correction.rollout_rs=other
v0.7.1 @ppo @correction.bypass_mode=True @correction.loss_type=reinforce
v0.7.1 @ppo @correction.rollout_rs=token_k1 @correction.rollout_rs_threshold=0.5_2.0
v0.6.0 @ppo @first=True
v0.6.0 @ppo @first=True @first_threshold=2 @first_veto_threshold=0.0001 @first_level=geometric
v0.6.0 @ppo @first=True @first_threshold=2
v0.6.0 @ppo @first=True @first_threshold=2 @first_mode=mask
v0.7.0 verl.trainer.sft_trainer engine.offload_policy=True
v0.7.0 verl.trainer.sft_trainer engine=megatron engine.tensor_model_parallel_size=2
v0.7.0 verl.trainer.main_generation model.path=null data.path=null
v0.7.0 verl.trainer.sft_trainer data.train_files=null
v0.7.0 @ppo data.train_files=null @model.lora_rank=8 @model.lora.rank=8
v0.7.0 @ppo @model.lora_rank=8 @model.lora.rank=16
v0.7.0 verl.trainer.main_generation_server @rollout.temperature=0 @rollout.response_length=20000
"""
"""Runs for rows that no example of rules.tsv exercises: release, entry and overrides.

``--numerics=legacy`` may come after the entry.
"""


def test_every_row_acts_in_some_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    acted: set[int] = set()
    apply = rows._apply

    def record(draft: Draft, row: Row, keys: tuple[str, ...], names: rows._Names) -> bool:
        acted.add(id(row))
        return apply(draft, row, keys, names)

    monkeypatch.setattr(rows, "_apply", record)
    for rule in rules():
        example_of(rule).translated()
    for run in RUNS.strip().split("\n"):
        words = re.sub("|".join(SHORT), lambda match: SHORT[match[0]], run).split()
        version, entry, *overrides = words
        options = {"numerics": "legacy"} if "--numerics=legacy" in overrides else {}
        overrides = [word for word in overrides if not word.startswith("--numerics")]
        translated(version, *overrides, base=BASES.get(entry, BASE), entry=entry, **options)
    assert [(row.rule, row.new, row.argument) for row in table() if id(row) not in acted] == []
