"""Old names and their successors.

A successor is Temper's, or a deprecated class of this package for the transition.
"""

from dataclasses import dataclass

from temper_legacy_shim.old_paths import MODULES, PACKAGE

_TRAINER = "temper_trainer"
_ALGORITHMS = f"{_TRAINER}.algorithms"
_CORE = f"{PACKAGE}.trainer.ppo.core_algos"
_WORKER = f"{_TRAINER}.runtime.worker_group:TrainingWorker"
_CRITIC = f"{_TRAINER}.runtime.worker_group:CriticWorker"
_FSDP, _MEGATRON = (
    "temper_engine_fsdp.engine:FSDPEngine",
    "temper_engine_megatron.engine:MegatronEngine",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """Replacement of an old name."""

    target: str
    """``module:name``."""
    how: str
    """Instruction for other changes at its uses; empty if it takes the same arguments."""


_SYNC_LOOP: dict[str, Successor] = {}


def _row(names: tuple[str, ...], target: str, how: str) -> None:
    _SYNC_LOOP.update(dict.fromkeys(names, Successor(target=target, how=how)))


def _in(modules: tuple[str, ...], *names: str) -> tuple[str, ...]:
    return tuple(f"{PACKAGE}.{module}.{name}" for module in modules for name in names)


_OBJECTIVE = (
    "give it a PolicyObjective with set_loss_fn(), and call forward_backward_batch() and "
    "optimizer_step()"
)
_VALUES = (
    "configure it with model_type value_model, give it a ValueObjective with set_loss_fn(), and "
    "call forward_backward_batch()"
)
_ROLES = (
    "make one for each role; temper_trainer.rollout.hf_sampler.HfSampler samples, "
    "temper_trainer.weight_sync.publisher.Publisher moves weights"
)
_both = ("workers.fsdp_workers", "workers.megatron_workers")
_row(_in(_both, "ActorRolloutRefWorker", "AsyncActorRolloutRefWorker"), _WORKER, _ROLES)
_row(
    _in((*_both, "workers.engine_workers"), "CriticWorker"),
    _CRITIC,
    "configure it with model_type value_model",
)
_row(_in(("workers.engine_workers",), "ActorRolloutRefWorker", "TrainingWorker"), _WORKER, _ROLES)
_row(_in(("workers.actor", "workers.actor.dp_actor"), "DataParallelPPOActor"), _FSDP, _OBJECTIVE)
_row(
    _in(("workers.actor", "workers.actor.megatron_actor"), "MegatronPPOActor"),
    _MEGATRON,
    _OBJECTIVE,
)
_row(_in(("workers.critic", "workers.critic.dp_critic"), "DataParallelPPOCritic"), _FSDP, _VALUES)
_row(
    _in(("workers.critic", "workers.critic.megatron_critic"), "MegatronPPOCritic"),
    _MEGATRON,
    _VALUES,
)
_engine_modules = ("workers.engine", "workers.engine.base")
_row(
    _in(_engine_modules, "BaseEngine"),
    "temper_engine_api.engine:BaseEngine",
    "see docs/writing-an-engine.md for its methods",
)
_row(
    _in(
        ("workers.engine", "workers.engine.fsdp", "workers.engine.fsdp.transformer_impl"),
        "FSDPEngine",
        "FSDPEngineWithLMHead",
    ),
    _FSDP,
    "configure it with one FSDPConfig",
)
_row(
    _in(
        ("workers.engine", "workers.engine.megatron", "workers.engine.megatron.transformer_impl"),
        "MegatronEngine",
        "MegatronEngineWithLMHead",
    ),
    _MEGATRON,
    "configure it with one MegatronConfig",
)
_tool = "temper_legacy_shim.old_tools:HermesTools calls it in rollouts of several turns"
_row((f"{PACKAGE}.tools.base_tool.BaseTool",), "temper_legacy_shim.old_tools:BaseTool", _tool)
_row((f"{PACKAGE}.tools.schemas.ToolResponse",), "temper_legacy_shim.old_tools:ToolResponse", "")
_row(
    (f"{PACKAGE}.tools.schemas.OpenAIFunctionToolSchema",),
    "temper_legacy_shim.old_tools:ToolSchema",
    "",
)
_helpers = (
    "utils",
    *(
        f"utils.{_name}"
        for _name in (
            "dataset.rl_dataset",
            "fs",
            "hdfs_io",
            "model",
            "tokenizer",
            "torch_functional",
        )
    ),
)
_scores = (
    "utils.reward_score",
    *(f"utils.reward_score.{_name}" for _name in ("gsm8k", "math", "math_reward")),
)
for _module in (*_helpers, *_scores):
    for _name, _target in MODULES[f"{PACKAGE}.{_module}"].items():
        _row(_in((_module,), _name), _target, "")
_proto = (
    "sequences lie end to end in it; padded mappings are converted by temper_engine_api.padding"
)
_row(
    (f"{PACKAGE}.DataProto", f"{PACKAGE}.protocol.DataProto"),
    "temper_engine_api.batch:PackedBatch",
    _proto,
)
_row(
    (f"{_CORE}.agg_loss",),
    "temper_engine_api.reduction:reduce_loss",
    "its denominators are those of the whole mini-batch",
)
_row(
    (f"{_CORE}.kl_penalty",),
    f"{_ALGORITHMS}.kl:estimate_kl",
    "write kl, mse, low_var_kl as estimator k1, k2, k3",
)
_row(
    (f"{_CORE}.AdaptiveKLController", f"{_CORE}.FixedKLController"),
    f"{_ALGORITHMS}.adaptive_coefficients:KlController",
    "it is one class for both",
)
_row(
    (f"{_CORE}.compute_gae_advantage_return",),
    f"{_ALGORITHMS}.advantages.estimators.token_estimators:compute_gae",
    "samples are packed, not padded",
)
_row(
    (f"{_CORE}.compute_grpo_outcome_advantage",),
    f"{_ALGORITHMS}.advantages.estimators.group_estimators:compute_grpo_advantages",
    "rewards are one number a sample",
)
_row(
    (f"{_CORE}.compute_rloo_outcome_advantage",),
    f"{_ALGORITHMS}.advantages.estimators.group_estimators:compute_rloo_advantages",
    "rewards are one number a sample",
)
_policy = tuple(
    f"{_CORE}.{name}" for name in ("compute_policy_loss", "compute_policy_loss_vanilla")
)
_row(
    _policy,
    f"{_ALGORITHMS}.objectives.policy_objective:PolicyObjective",
    "an engine calls it; it returns losses by token, which the engine reduces",
)
_row(
    (f"{_CORE}.compute_value_loss",),
    f"{_ALGORITHMS}.objectives.value_loss:ValueObjective",
    "an engine calls it, as a loss of a value_model",
)

WITHOUT: tuple[tuple[str, str], ...] = (
    (
        f"{PACKAGE}.trainer.ppo.ray_trainer",
        "the loop is temper-train's; its pages are temper_trainer.loops",
    ),
    (f"{PACKAGE}.trainer.main", "run temper-train"),
    (
        f"{PACKAGE}.utils.reward_score.math_verify",
        (
            "use temper_trainer.reward.builtin_rewards.math_verify, which takes a prompt and the "
            "completion's text"
        ),
    ),
    (
        f"{PACKAGE}.utils.reward_score.math_dapo",
        (
            "temper_legacy_shim.old_rewards.by_data_source scores data_source math_dapo; copy the "
            "function for another use"
        ),
    ),
    (
        f"{PACKAGE}.utils.reward_score",
        (
            "name a scoring function in reward.function; temper_legacy_shim.old_rewards calls "
            "those of "
            "the old signature"
        ),
    ),
    (f"{PACKAGE}.workers.reward_manager", "a reward is a function: name it in reward.function"),
    (f"{PACKAGE}.experimental.reward_loop", "a reward is a function: name it in reward.function"),
    (
        f"{PACKAGE}.single_controller",
        (
            "worker groups are temper_trainer.runtime's; an engine computes its dispatch itself "
            "(shard_data)"
        ),
    ),
    (f"{PACKAGE}.workers.rollout", "sampling is temper_trainer.rollout's, behind its Sampler"),
    (
        f"{PACKAGE}.workers.sharding_manager",
        "an engine moves its own parts: train_mode() and eval_mode()",
    ),
    (
        f"{PACKAGE}.utils.checkpoint",
        "engines save and load themselves; old files are read by temper-migrate checkpoint",
    ),
    (f"{PACKAGE}.model_merger", "use temper-migrate checkpoint"),
    (
        f"{PACKAGE}.utils.dataset",
        "data is read by temper_trainer.data; columns are named in its configuration",
    ),
    (f"{PACKAGE}.tools", "copy the tool, and derive it from temper_legacy_shim.old_tools.BaseTool"),
    (f"{PACKAGE}.utils.tracking", "trackers are chosen in run.trackers"),
    (
        f"{PACKAGE}.utils.hf_processor",
        "images are out of scope; transformers.AutoProcessor reads the processor",
    ),
    (
        f"{PACKAGE}.utils.distributed",
        "call torch.distributed.init_process_group() before init_model()",
    ),
    (f"{PACKAGE}.utils.device", "use torch.accelerator"),
    (
        f"{PACKAGE}.utils.profiler",
        "an engine profiles itself: see profile_to in docs/engines/fsdp.md",
    ),
    (
        f"{PACKAGE}.trainer.ppo.metric_utils",
        "temper-train computes metrics: docs/metrics.md lists them",
    ),
    (f"{PACKAGE}.trainer.ppo.reward", "a reward is a function: name it in reward.function"),
    (f"{PACKAGE}.trainer.fsdp_sft_trainer", "run temper-train algorithm=sft"),
    (
        f"{PACKAGE}.experimental.agent_loop",
        "rollouts of several turns are environments: docs/how-to/environment.md",
    ),
    (f"{PACKAGE}.workers.engine", "see docs/writing-an-engine.md for what an engine does"),
    (f"{PACKAGE}.workers.config", "an engine has one configuration: FSDPConfig or MegatronConfig"),
    (f"{PACKAGE}.models", "models are those of transformers: docs/models.md"),
    (f"{PACKAGE}.third_party", "sampling is temper_trainer.rollout's, behind its Sampler"),
)
"""Advice for names without a successor, by the beginning of their path; the first that fits counts.
"""


def successor_of(name: str, *, keeps_legacy: bool) -> Successor | None:
    """Return the successor of an old full name, or None.

    Args:
        name: such as ``verl.workers.fsdp_workers.CriticWorker``.
        keeps_legacy: prefer this package's deprecated class, which takes the old arguments.
    """
    if keeps_legacy:
        module, _, attribute = name.rpartition(".")
        result = MODULES.get(module, {}).get(attribute)
        if result is not None:
            return Successor(target=result, how="")
    return _SYNC_LOOP.get(name)


def is_module(name: str) -> bool:
    """Check if an old full name is a module with successors."""
    return name in MODULES or any(each.startswith(f"{name}.") for each in _SYNC_LOOP)


def advice_for(name: str) -> str:
    """Return advice for a name without a successor."""
    result = next(
        (
            advice
            for start, advice in WITHOUT
            if name == start or name.startswith((f"{start}.", f"{start}_"))
        ),
        "",
    )
    return result or (
        "there is no such thing in Temper: keep a copy of the function in your own code, or "
        "do without"
    )


def rows() -> list[tuple[str, Successor, str]]:
    """Return every row.

    Old name, Temper's own, and the deprecated one of this package, empty if there is none.
    """
    legacy = {
        f"{module}.{name}": target
        for module, offers in MODULES.items()
        for name, target in offers.items()
    }
    return [
        (name, successor, legacy.get(name, "")) for name, successor in sorted(_SYNC_LOOP.items())
    ]
