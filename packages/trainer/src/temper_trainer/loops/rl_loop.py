"""Run the steps of an RL run: take a batch of rollouts, train, publish the weights.

`temper_trainer.loops.rollouts.batch_pipeline` decides when the sampling of a batch starts. With
loops ``sync`` and ``one_step_off`` a batch is a function of (run.seed, step) and the weights, so a
run repeats bit for bit. Loop ``async`` trains the groups that are ready first, unless dynamic
sampling selects them: see `temper_trainer.loops.rollouts.ready_groups`. A resumed run samples the
prompts again that were not trained.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from temper_engine_api.objective import Objective
from temper_trainer.config.run import RunConfig
from temper_trainer.data.streams import FeedMark
from temper_trainer.loops.rl_step import Controllers, StepResult, train_on_rollouts
from temper_trainer.loops.rollouts.batch_pipeline import (
    AdmissionRule,
    BatchPipeline,
    check_staleness,
    count_tokens_by_staleness,
    measure_staleness,
)
from temper_trainer.loops.rollouts.group_pipeline import GroupPipeline, GroupSink
from temper_trainer.loops.rollouts.sampled_groups import (
    NumberedPrompt,
    SampledGroup,
    form_rollouts,
    sample_groups,
    time_groups,
)
from temper_trainer.loops.rollouts.sampling import (
    SampledStep,
    measure_reward_seconds,
    sample_step,
)
from temper_trainer.loops.run.interrupts import allow_stop_after_half_grace
from temper_trainer.loops.run.run_components import RunComponents
from temper_trainer.loops.run.seeds import derive_seed
from temper_trainer.metrics.rollout_records import pick_rollouts
from temper_trainer.metrics.timeline import StepTimeline, measure_timeline
from temper_trainer.progress import StepTimer
from temper_trainer.reward.scoring import RunningStats
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.types import DataCursor, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampling:
    """Records of requests whose sampling has started."""

    timer: StepTimer = field(default_factory=StepTimer)
    mark: "Future[FeedMark]" = field(default_factory=Future)
    """Place in the data before the requests; known when their first prompt is taken."""
    positions: set[int] = field(default_factory=set)
    """Prompts that are not trained, if the groups that are ready first are; known with `mark`."""


class StepLoop:
    """Runs the steps of an RL run one after the other."""

    def __init__(self, components: RunComponents, *, first_step: int) -> None:
        """Keep the components; the first step starts the sampling.

        Args:
            components: Components of the run, with published weights.
            first_step: Number of the first step.
        """
        self.components = components
        self._first_step = first_step
        self._pipeline = self._make_pipeline()
        self._samplings: dict[int, _Sampling] = {}
        """Samplings in progress, by the step whose staleness their requests count for."""
        self._trained: set[int] = set()
        """Positions of trained prompts, if groups are trained as soon as they are ready."""
        self._reward_stats = RunningStats()
        """Statistics of the rewards of all batches that were taken."""

    @property
    def cursor(self) -> DataCursor:
        """Position in the data of the first prompt that no step has trained on.

        With dynamic sampling and loop ``async``, prompts after it may have been trained.
        """
        return self._find_mark().cursor

    @property
    def trained_ahead(self) -> tuple[int, ...]:
        """Prompts from the cursor on that are trained, counted from it."""
        return self.components.prompts.list_trained_ahead(self._find_mark(), trained=self._trained)

    def run_step(
        self, *, step: int, objectives: Mapping[str, Objective], controllers: Controllers
    ) -> StepResult:
        """Run the next step.

        Args:
            step: Number of the step, from 1.
            objectives: Objective per trained role.
            controllers: Controllers for this step.
        """
        components, timer, start = self.components, StepTimer(), time.perf_counter()
        self._reward_stats = controllers.reward_stats
        # Sampling changes no weight, so a stop request may abandon it.
        with self._measure_wait(timer), allow_stop_after_half_grace():
            batch, groups = self._take(step)
        sampled, self._reward_stats = batch.shape_rewards(
            components.config, reward_stats=controllers.reward_stats
        )
        trained_at = time.perf_counter()
        # Before the step trains, so that sampling and training overlap.
        self._pipeline.start_batches()
        # A colocated vLLM sampler frees its GPU memory while the roles train.
        sampler = components.sampler
        sampler_is_asleep = isinstance(sampler, VllmSampler) and sampler.sleep()
        version, staleness = components.publisher.version, self._check_staleness(sampled)
        train_metrics, controllers = train_on_rollouts(
            sampled.rollouts,
            config=components.config,
            roles=components.roles,
            teachers=components.teachers,
            objectives=objectives,
            controllers=replace(controllers, reward_stats=self._reward_stats),
            step=step,
            timer=timer,
            log=components.log,
        )
        if sampler_is_asleep:
            # The servers allocate their memory again as soon as weights arrive.
            for role in components.roles.values():
                role.release_cache()
        sync_metrics = self._publish(step, timer=timer)
        timeline = StepTimeline(
            step=step,
            began_at=start,
            trained_at=trained_at,
            published_at=time.perf_counter(),
            weight_version=version,
            rollouts=sampled.times,
            servers=components.scheduler.occupancy.drain(),
            capacity=components.config.rollout.max_concurrent,
            tokens_by_staleness=count_tokens_by_staleness(sampled.rollouts, version=version),
        )
        components.log.add_timeline(timeline)
        if is_table_due(step, run=components.config.run):
            self._record_rollouts(step, sampled.rollouts)
        seconds = timer.seconds | self._end_sampling(step, groups)
        metrics = {
            **sampled.metrics,
            **train_metrics,
            **staleness,
            **sync_metrics,
            "rollout/tokens_per_s": sampled.metrics["rollout/tokens"]
            / max(seconds["time/rollout_s"], 1e-9),
            "data/epoch": float(self.cursor.epoch),
            **seconds,
            **measure_timeline(timeline),
            "time/step_s": time.perf_counter() - start,
        }
        return StepResult(metrics=metrics, rollouts=sampled.rollouts, controllers=controllers)

    @contextmanager
    def pause_sampling(self) -> Iterator[None]:
        """Wait for the batches in progress, and start no other one during the body."""
        self._pipeline.wait()
        yield

    def close(self) -> None:
        """Cancel the batches in progress."""
        self.components.scheduler.cancel()

    def _make_pipeline(self) -> BatchPipeline[SampledStep] | GroupPipeline[SampledGroup]:
        config, scheduler = self.components.config, self.components.scheduler
        rule = AdmissionRule.from_config(config.loop, config.asynchrony)
        last_step = config.run.total_steps
        if rule.overlaps and config.algorithm.dynamic_sampling is None:
            return GroupPipeline(
                scheduler,
                self._sample_groups,
                rule=rule,
                first_step=self._first_step,
                last_step=last_step,
                batch_size=config.batching.prompts_per_step,
                recorder=scheduler.recorder,
                replay=scheduler.replay,
            )
        return BatchPipeline(
            scheduler, self._sample, rule=rule, first_step=self._first_step, last_step=last_step
        )

    def _take(self, step: int) -> tuple[SampledStep, list[SampledGroup]]:
        """Wait for the rollouts of a step; return their groups too if the first ready are taken."""
        if isinstance(self._pipeline, BatchPipeline):
            return self._pipeline.take(step), []
        groups = self._pipeline.take(step)
        rollouts, metrics = form_rollouts(
            groups, config=self.components.config, scorer=self.components.scorer, step=step
        )
        return (
            SampledStep(rollouts=rollouts, metrics=metrics, times=time_groups(groups)),
            groups,
        )

    def _end_sampling(self, step: int, groups: list[SampledGroup]) -> dict[str, float]:
        """Record that a step is trained; return the times of its sampling."""
        if isinstance(self._pipeline, BatchPipeline):
            return self._samplings.pop(step).timer.seconds
        trained = {group.position for group in groups}
        self._trained |= trained
        for requested, sampling in list(self._samplings.items()):
            sampling.positions.difference_update(trained)
            if sampling.mark.done() and not sampling.positions:
                del self._samplings[requested]
                self._pipeline.forget(requested)
        scored_at = max(each.scored_at for group in groups for each in group.members)
        timer = StepTimer()
        timer.add("rollout", scored_at - min(group.requested_at for group in groups))
        timer.add("reward", measure_reward_seconds(groups))
        return timer.seconds

    def _find_mark(self) -> FeedMark:
        """Return the place in the data of the first prompt that is not trained."""
        step = self._pipeline.oldest_step
        if step is None:
            return self.components.prompts.mark
        return self._find_sampling(step).mark.result()

    def _find_sampling(self, step: int) -> _Sampling:
        # Made by whichever thread comes first; `setdefault` is atomic.
        return self._samplings.setdefault(step, _Sampling())

    async def _sample(self, step: int) -> SampledStep:
        sampling = self._find_sampling(step)
        # In the event loop, as every use of the prompts while a batch is sampled.
        sampling.mark.set_result(self.components.prompts.mark)
        with sampling.timer.measure("rollout"):
            return await sample_step(
                self.components, step=step, timer=sampling.timer, reward_stats=self._reward_stats
            )

    async def _sample_groups(self, step: int, sink: GroupSink[SampledGroup]) -> None:
        config, prompts = self.components.config, self.components.prompts
        num_prompts = config.batching.prompts_per_step
        mark = prompts.mark
        # Numbered by their positions, so that a resumed run samples with the same seeds.
        numbered = [
            NumberedPrompt(
                prompt=prompt,
                step=1 + position // num_prompts,
                index=position % num_prompts,
                position=position,
            )
            for position, prompt in prompts.take(num_prompts)
        ]
        sampling = self._find_sampling(step)
        sampling.positions.update(each.position for each in numbered)
        sampling.mark.set_result(mark)
        await sample_groups(
            self.components,
            numbered,
            priority=step,
            off_policy_seed=derive_seed(config.run.seed, "off-policy", step, 0),
            sink=sink,
        )

    def _record_rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write some rollouts with their tokens, for the viewer in the report."""
        components = self.components
        picked = pick_rollouts(rollouts, count=components.config.run.num_table_rows)
        components.log.add_rollouts(step, picked, decode=components.tokenizer.decode)

    def _measure_wait(self, timer: StepTimer) -> AbstractContextManager[None]:
        # With loop sync, training waits for all of the sampling, which is time/rollout_s.
        has_wait = self._pipeline.rule.max_staleness > 0
        return timer.measure("wait") if has_wait else nullcontext()

    def _check_staleness(self, sampled: SampledStep) -> dict[str, float]:
        config, version = self.components.config, self.components.publisher.version
        check_staleness(
            [completion for each in sampled.rollouts for completion in each.completions],
            loop=config.loop,
            asynchrony=config.asynchrony,
            version=version,
        )
        if config.loop == "sync":
            return {}
        return measure_staleness(sampled.rollouts, version=version)

    def _publish(self, step: int, *, timer: StepTimer) -> dict[str, float]:
        """Publish the actor's weights after a step; return the metrics."""
        components = self.components
        if not self._pipeline.rule.overlaps:
            with self._measure_wait(timer):
                self._pipeline.wait()
        num_resumed = components.scheduler.num_resumed
        with timer.measure("weight_sync"), self._pipeline.sync_weights(step):
            metrics = components.publisher.publish(components.canary)
        if self._pipeline.rule.overlaps:
            num_resumed = components.scheduler.num_resumed - num_resumed
            metrics["rollout/continued"] = float(num_resumed)
        return metrics


@contextmanager
def open_step_loop(components: RunComponents, *, first_step: int) -> Iterator[StepLoop]:
    """Make the loop of the run; cancel its sampling when the body ends.

    Args:
        components: Components of the run, with published weights.
        first_step: Number of the first step.
    """
    with closing(StepLoop(components, first_step=first_step)) as loop:
        yield loop


def is_table_due(step: int, *, run: RunConfig) -> bool:
    """Return True if some completions of a step are printed and recorded."""
    if not run.table_every:
        return False
    return step in (1, run.total_steps) or step % run.table_every == 0
