"""The components of a run: sampler, scorer, workers for each role, publisher, teachers.

`build_components` starts what training needs, `build_inference_components` what the tasks eval and
generate need. Both close everything when the context ends.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from temper_engine_api.batch import from_sequences
from temper_engine_api.objective import HeadOutput
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.data import DataConfig
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.reward import RewardConfig
from temper_trainer.config.rollout import RECORD_FILE
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.memory_mapped import MappedPrompts
from temper_trainer.data.streams import (
    Curriculum,
    InMemoryStream,
    MixedStream,
    PromptFeed,
    get_difficulty,
)
from temper_trainer.data.text_decoder import TextDecoder
from temper_trainer.environment.protocol import EnvironmentFactory
from temper_trainer.environment.tool_environment import make_environment_factory
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.reward.scoring import Scorer
from temper_trainer.rollout.completion_record import (
    CompletionRecorder,
    CompletionReplay,
)
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.runtime.engine_reward_model import build_reward_model
from temper_trainer.runtime.placement import AVERAGED_ROLE
from temper_trainer.runtime.runtime_factory import Runtime
from temper_trainer.runtime.self_teacher import build_self_teacher
from temper_trainer.runtime.teacher_factory import build_teachers
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.teacher.teacher_client import TeacherClient
from temper_trainer.types import DataCursor, Prompt
from temper_trainer.weight_sync.publisher import Canary, Publisher
from temper_trainer.weight_sync.transport import NullTransport
from temper_trainer.weight_sync.transport_factory import build_transport


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """Held-out prompts that are evaluated together."""

    key: str
    """Setting of their source, such as ``data.eval``."""
    prompts: Sequence[Prompt]
    num_trained: int | None = None
    """Number of prompts that are also in the training data; None if nothing is trained
    or ``data.streaming`` is true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """A run's started components."""

    config: TrainerConfig
    log: RunLog
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of all roles."""
    text_decoder: TextDecoder
    """Returns the text of completions, as the tokenizer does."""
    prompts: PromptFeed
    """Training prompts in the run's order."""
    eval_sets: Mapping[str, EvalSet]
    """Held-out prompts by name; data.eval has the empty name. May be empty."""
    sampler: Sampler
    """Samples completions of prompts."""
    scheduler: RolloutScheduler
    """Runs rollouts with the sampler and the environments."""
    scorer: Scorer
    """Computes the rewards of completions."""
    roles: Mapping[str, WorkerGroup]
    """Workers for ``actor`` and, if configured, other roles; empty for inference."""
    publisher: Publisher
    """Sends the actor's weights to the sampler."""
    teachers: TeacherClient | None
    """Teachers of on-policy distillation; None without distillation."""
    canary: Canary | None
    """Compares log-probs of engine and sampler after each publish; None if disabled."""


@contextmanager
def build_components(
    config: TrainerConfig,
    *,
    log: RunLog,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    eval_sets: Mapping[str, EvalSet],
    state: TrainerState,
    runtime: Runtime,
) -> Iterator[RunComponents]:
    """Start all components of an RL run; close them when the body ends or raises.

    Args:
        config: The configuration, as `fit_models_to_tokenizer` returns it.
        log: Log of the run.
        tokenizer: Tokenizer of all roles.
        prompts: Training prompts; at least one.
        eval_sets: Held-out prompts; see `RunComponents`.
        state: Where the run continues: data position and weight version.
        runtime: Starts the processes.
    """
    with ExitStack() as stack:
        roles = stack.enter_context(_open_roles(config, runtime=runtime))
        sampler = runtime.open_sampler(config, tokenizer=tokenizer)
        stack.callback(sampler.close)
        teachers = stack.enter_context(
            _open_teachers(config, roles=roles, runtime=runtime, tokenizer=tokenizer)
        )
        scorer = stack.enter_context(
            _open_scorer(
                config.reward,
                selected={
                    reward
                    for each in (prompts, *(each.prompts for each in eval_sets.values()))
                    for reward in _list_rewards(each)
                },
                max_tokens=config.batching.max_tokens,
                runtime=runtime,
                tokenizer=tokenizer,
            )
        )
        publisher = stack.enter_context(
            _open_publisher(
                config,
                actor=roles["actor"],
                sampler=sampler,
                # The first publish, before the first step, restores the state's version.
                version=state.weight_version - 1,
            )
        )
        yield RunComponents(
            config=config,
            log=log,
            tokenizer=tokenizer,
            text_decoder=TextDecoder(tokenizer),
            prompts=PromptFeed(
                _open_prompts(prompts, data=config.data, seed=config.run.seed, cursor=state.cursor),
                num_trained=state.step * config.batching.prompts_per_step,
                trained_ahead=state.trained_ahead,
            ),
            eval_sets=eval_sets,
            sampler=sampler,
            scheduler=stack.enter_context(
                _open_scheduler(config, sampler=sampler, tokenizer=tokenizer)
            ),
            scorer=scorer,
            roles=roles,
            publisher=publisher,
            teachers=teachers,
            canary=_build_canary(config, actor=roles["actor"], prompt=prompts[0]),
        )


def _list_rewards(prompts: Sequence[Prompt]) -> set[str]:
    """Return the names of the rewards that prompts select."""
    if isinstance(prompts, MappedPrompts):
        return {prompts.reward}
    return {prompt.reward for prompt in prompts}


def _open_prompts(
    prompts: Sequence[Prompt], *, data: DataConfig, seed: int, cursor: DataCursor
) -> InMemoryStream[Prompt] | MixedStream[Prompt]:
    """Return the training prompt stream, mixed by source weights if any."""
    curriculum = Curriculum(get_difficulty=get_difficulty, shuffled_fraction=data.shuffled_fraction)
    train = data.train_sources["data.train"]
    if train.weight is None:
        return InMemoryStream(
            prompts,
            seed=seed,
            shuffle=data.shuffle,
            curriculum=None if train.difficulty_key is None else curriculum,
            cursor=cursor,
        )
    return MixedStream(
        {key: [prompt for prompt in prompts if prompt.source == key] for key in data.train_sources},
        weights={key: source.weight or 0.0 for key, source in data.train_sources.items()},
        seed=seed,
        shuffle=data.shuffle,
        curricula={
            key: curriculum
            for key, source in data.train_sources.items()
            if source.difficulty_key is not None
        },
        cursor=cursor,
    )


@contextmanager
def _open_roles(config: TrainerConfig, *, runtime: Runtime) -> Iterator[Mapping[str, WorkerGroup]]:
    """Open and initialize the workers of all roles that the run has."""
    configs = config.roles
    if config.averaged_engine is not None:
        configs[AVERAGED_ROLE] = replace(config.actor, engine=config.averaged_engine)
    with ExitStack() as stack:
        roles: dict[str, WorkerGroup] = {}
        for name, role in configs.items():
            roles[name] = runtime.open_group(
                name,
                engine=role.engine,
                num_workers=role.num_workers,
                is_deprecated=config.use_legacy_worker_impl == "enable",
            )
            # Before `init`, so that ranks are also freed if building a model fails.
            stack.callback(roles[name].close)
        for group in roles.values():
            group.init()
        yield roles


@contextmanager
def _open_scorer(
    config: RewardConfig,
    *,
    selected: Collection[str],
    max_tokens: int,
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[Scorer]:
    """Open the scorer, and the reward model if one is configured; close both after the body."""
    with ExitStack() as stack:
        model = build_reward_model(
            config.model, max_tokens=max_tokens, runtime=runtime, tokenizer=tokenizer
        )
        if model is not None:
            stack.callback(model.close)
        yield stack.enter_context(Scorer(config, model=model, selected=selected))


@contextmanager
def _open_teachers(
    config: TrainerConfig,
    *,
    roles: Mapping[str, WorkerGroup],
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[TeacherClient | None]:
    """Open the teachers of distillation: other models, the policy itself, or none."""
    teachers = (
        build_teachers(config, runtime=runtime, tokenizer=tokenizer)
        if config.distillation.self_teacher is None
        else build_self_teacher(config, roles=roles, tokenizer=tokenizer)
    )
    with ExitStack() as stack:
        if teachers is not None:
            stack.callback(teachers.close)
        yield teachers


@contextmanager
def _open_publisher(
    config: TrainerConfig, *, actor: WorkerGroup, sampler: Sampler, version: int
) -> Iterator[Publisher]:
    """Open the publisher of the actor's weights; its first publish has ``version + 1``."""
    with closing(build_transport(config, actor=actor, sampler=sampler)) as transport:
        yield Publisher(
            transport=transport,
            sampler=sampler,
            version=version,
            software=sampler.software if isinstance(sampler, VllmSampler) else "",
        )


def _open_scheduler(
    config: TrainerConfig, *, sampler: Sampler, tokenizer: PreTrainedTokenizerBase
) -> RolloutScheduler:
    """Open the rollout scheduler, with the configured environments."""
    environment, rollout = config.environment, config.rollout

    def make_factory(environment: EnvironmentConfig) -> EnvironmentFactory:
        return make_environment_factory(
            environment,
            tokenizer=tokenizer,
            chat_template=config.data.chat_template,
            address=config.runtime.bind_address,
        )

    return RolloutScheduler(
        sampler,
        environment=environment,
        make_environment=None if environment is None else make_factory(environment),
        named_environments={
            name: (each, make_factory(each)) for name, each in config.environments.items()
        },
        max_failure_fraction=rollout.max_failure_fraction,
        # Send twice as many requests as servers can run at once, so that the next one is there when
        # a sequence ends. Servers that others started are not part of rollout.num_replicas.
        max_sampling=2
        * (len(sampler.replicas) if isinstance(sampler, VllmSampler) else rollout.num_replicas)
        * rollout.max_concurrent,
        interrupts=config.loop == "async" and config.asynchrony.partial_rollouts,
        tokenizer=tokenizer,
        recorder=CompletionRecorder(Path(config.run.dir) / RECORD_FILE) if rollout.record else None,
        replay=None
        if rollout.replay is None
        else CompletionReplay(
            Path(rollout.replay), needs_experts=rollout.routing_replay == "sampler"
        ),
        vocab_size=len(tokenizer),
    )


@contextmanager
def build_inference_components(
    config: TrainerConfig,
    *,
    log: RunLog,
    tokenizer: PreTrainedTokenizerBase,
    eval_sets: Mapping[str, EvalSet],
    runtime: Runtime,
) -> Iterator[RunComponents]:
    """Start only sampler and scorer; the sampler loads the weights of ``actor.engine.model``."""
    with ExitStack() as stack:
        sampler = runtime.open_sampler(config, tokenizer=tokenizer)
        stack.callback(sampler.close)
        scorer = stack.enter_context(
            _open_scorer(
                config.reward,
                selected={prompt.reward for each in eval_sets.values() for prompt in each.prompts},
                max_tokens=config.batching.max_tokens,
                runtime=runtime,
                tokenizer=tokenizer,
            )
        )
        yield RunComponents(
            config=config,
            log=log,
            tokenizer=tokenizer,
            text_decoder=TextDecoder(tokenizer),
            prompts=PromptFeed(
                InMemoryStream(
                    [prompt for each in eval_sets.values() for prompt in each.prompts],
                    seed=config.run.seed,
                    shuffle=False,
                )
            ),
            eval_sets=eval_sets,
            sampler=sampler,
            scheduler=stack.enter_context(
                _open_scheduler(config, sampler=sampler, tokenizer=tokenizer)
            ),
            scorer=scorer,
            roles={},
            publisher=Publisher(
                transport=NullTransport(), sampler=sampler, version=sampler.weight_version
            ),
            teachers=None,
            canary=None,
        )


def _build_canary(config: TrainerConfig, *, actor: WorkerGroup, prompt: Prompt) -> Canary | None:
    """Return a canary that compares log-probs of a prompt's last 64 tokens; None if disabled."""
    if not config.rollout.canary:
        return None
    # At least two tokens, because the first one has no log-prob.
    tokens = torch.tensor(prompt.tokens[-64:] if len(prompt.tokens) > 1 else prompt.tokens * 2)
    batch = from_sequences([tokens], loss_masks=[torch.zeros(len(tokens), dtype=torch.bool)])
    plan = plan_mini_batch(
        [len(tokens)],
        dp_size=actor.dp_size,
        max_tokens=config.batching.max_tokens,
        constraints=actor.topology.plan_constraints,
    )
    denominators = count_denominators(batch)
    packed = [
        build_packed_batch(batch, plan=plan, rank=rank, denominators=denominators)
        for rank in range(actor.dp_size)
    ]

    def engine_logprobs() -> list[float]:
        outputs = actor.forward(packed, outputs=[HeadOutput.LOGPROB], sample_ids=batch.sample_ids)
        # The first token has no log-prob, and the sampler returns none for it.
        logprobs: list[float] = outputs.columns[HeadOutput.LOGPROB][1:].tolist()
        return logprobs

    return Canary(
        tokens=tuple(tokens.tolist()),
        engine_logprobs=engine_logprobs,
        tolerance=config.rollout.resolve_canary_tolerance(config.actor.engine),
    )
