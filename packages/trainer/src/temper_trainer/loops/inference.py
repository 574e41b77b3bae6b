"""A model without training: its completions scored (task eval), or written for others to use (task generate)."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.streams import InMemoryStream
from temper_trainer.environment.environment_factory import make_environment_factory
from temper_trainer.loops.folder import RunFolder
from temper_trainer.loops.rooms import Rooms
from temper_trainer.loops.seeds import derive_seed
from temper_trainer.loops.turns import all_tokens, complete, rewards_of
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.progress import track_progress
from temper_trainer.reward.scoring import Scorer
from temper_trainer.runtime.engine_reward_model import build_reward_model
from temper_trainer.runtime.runtime_factory import Runtime
from temper_trainer.types import Prompt, SamplingRequest
from temper_trainer.weight_sync.publisher import Publisher
from temper_trainer.weight_sync.transport import NullTransport


@contextmanager
def open_inference(
    config: TrainerConfig,
    *,
    log: RunLog,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    runtime: Runtime,
) -> Iterator[Rooms]:
    """Sampler and scorer alone: the sampler holds the weights of actor.engine.model, and no engine is built."""
    with ExitStack() as stack:
        sampler = runtime.open_sampler(config, tokenizer=tokenizer)
        stack.callback(sampler.close)
        reward_model = build_reward_model(config, runtime=runtime, tokenizer=tokenizer)
        if reward_model is not None:
            stack.callback(reward_model.close)
        yield Rooms(
            config=config,
            log=log,
            tokenizer=tokenizer,
            prompts=InMemoryStream(prompts, seed=config.run.seed, shuffle=False),
            eval_prompts=prompts,
            sampler=sampler,
            scorer=stack.enter_context(Scorer(config.reward, model=reward_model)),
            roles={},
            publisher=Publisher(
                transport=NullTransport(), sampler=sampler, version=sampler.weight_version
            ),
            teachers=None,
            make_environment=None
            if config.environment is None
            else make_environment_factory(config.environment, tokenizer=tokenizer),
            canary=None,
        )


def generate(rooms: Rooms, *, folder: RunFolder) -> dict[str, float]:
    """One line of JSON for each completion, in the order of the prompts; the file appears whole or not at all.

    Raises:
        ConfigError: the file exists.
    """
    config, prompts = rooms.config, rooms.eval_prompts
    path = folder.root / config.generate.file
    if path.exists():
        raise ConfigError(
            f"{path} already exists and is never overwritten: choose another generate.file or run.dir."
        )
    count = config.generate.num_completions
    asked = [prompt for prompt in prompts for _ in range(count)]
    requests = [
        SamplingRequest(
            request_id=i,
            prompt_tokens=prompt.tokens,
            sampling=config.sampling,
            seed=derive_seed(config.run.seed, "generate", i),
        )
        for i, prompt in enumerate(asked)
    ]
    with track_progress("completions", total=len(requests) if config.environment is None else None):
        talks, metrics = complete(rooms, requests, prompts=asked)
    texts = [rooms.tokenizer.decode(talk.tokens, skip_special_tokens=True) for talk in talks]
    scores = rooms.scorer.score(list(zip(asked, texts, strict=True)), tokens=all_tokens(talks))
    told = rewards_of(scores, talks=talks)
    lines = [
        json.dumps(
            {
                "prompt_id": prompt.prompt_id,
                "prompt": prompt.text,
                "completion": text,
                "answer": prompt.answer,
                "reward": reward,
                "tokens": [list(completion.tokens) for completion in talk.completions],
                "logprobs": [list(completion.rollout_logprobs) for completion in talk.completions],
                "finish_reason": talk.completions[-1].finish_reason.value,
            },
            ensure_ascii=False,
        )
        for prompt, talk, text, reward in zip(asked, talks, texts, told, strict=True)
    ]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.rename(path)
    rewards = [reward for reward in told if reward is not None]
    found = {
        "generate/completions": float(len(lines)),
        "generate/reward": sum(rewards) / len(rewards) if rewards else float("nan"),
        "generate/failed": float(len(lines) - len(rewards)),
    }
    rooms.log.log_metrics(0, found | metrics, phase="generate")
    rooms.log.print_line(f"{len(lines)} completions of {len(prompts)} prompts are in {path}")
    return found
