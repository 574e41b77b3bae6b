"""Describe the sizes that follow from a configuration, for review before a run."""

from dataclasses import replace

from temper_trainer.config.distillation import TeacherConfig
from temper_trainer.config.run import RL_TASKS, RoleConfig, RunConfig
from temper_trainer.config.trainer_config import TrainerConfig


def describe_sizes(config: TrainerConfig) -> list[str]:
    """Return one line per fact: completions, updates and tokens per step, roles and teachers."""
    if config.task in RL_TASKS:
        lines = _rl_sizes(config)
    elif config.generates_completions:
        lines = [_inference_line(config)]
    else:
        lines = _sft_sizes(config.run, prompts_per_step=config.batching.prompts_per_step)
    lines.append(f"micro-batches: at most {config.batching.max_tokens:,} tokens each")
    roles = config.roles
    if config.averaged_engine is not None:
        roles["averaged_actor"] = replace(config.actor, engine=config.averaged_engine)
    lines += [_role_line(name, role, engine=config.model_engine) for name, role in roles.items()]
    if config.reward.model is not None:
        model = config.reward.model
        frozen = replace(model, engine=replace(model.engine, optimizer=None))
        lines.append(_role_line("reward.model", frozen, engine=config.model_engine))
    lines += [
        _teacher_line(name, teacher, engine=config.model_engine)
        for name, teacher in config.teachers.items()
    ]
    return [*lines, f"run folder: {config.run.dir}"]


def _rl_sizes(config: TrainerConfig) -> list[str]:
    batching, steps = config.batching, config.run.total_steps
    group_size, prompt = config.algorithm.group_size, config.data.max_prompt_tokens
    completions = batching.prompts_per_step * group_size
    updates = batching.num_mini_batches * batching.num_passes
    per_update = completions / batching.num_mini_batches
    lines = []
    if config.warm_start is not None:
        stage, path = config.warm_start, config.actor.engine.model.path
        demonstrations = _describe_demonstrations(stage.total_steps, stage.batch_size)
        lines.append(f"warm start: {demonstrations}{f', from the model in {path}' if path else ''}")
    noun = "update" if updates == 1 else "updates"
    prompts = f"{batching.prompts_per_step:,} prompts"
    lines += [
        f"a step: {prompts} x {group_size} = {completions:,} completions, {updates:,} {noun}",
        f"an update: {per_update:,.6g} completions",
    ]
    if config.run.total_epochs is None:
        lines.append(
            f"a run: {steps:,} steps = {steps * completions:,} completions, {steps * updates:,} "
            "updates"
        )
    else:
        lines.append(_epochs_line(config.run.total_epochs))
    length = prompt + config.max_completion_tokens
    return [
        *lines,
        f"a sample: at most {prompt:,} + {config.max_completion_tokens:,} = {length:,} tokens",
        f"a step's tokens: at most {completions:,} x {length:,} = {completions * length:,}",
        *_describe_additional_sampling(config, completions=completions),
    ]


def _describe_additional_sampling(config: TrainerConfig, *, completions: int) -> list[str]:
    """Return lines about turns, and about completions that are not trained on."""
    lines, prompts, group_size = [], config.batching.prompts_per_step, config.algorithm.group_size
    dynamic = config.algorithm.dynamic_sampling
    for key, environment in config.all_environments.items():
        name = key.partition(".")[2]
        lines.append(
            f"a rollout{f' in {name}' if name else ''}: at most {environment.max_turns} "
            f"completions of {config.sampling.max_tokens:,} tokens each, with observations of "
            f"{environment.max_observation_tokens:,} tokens between them"
        )
    if config.task == "rl" and config.algorithm.reads("baselines"):
        lines.append(
            f"additionally: {prompts:,} greedy completions per step as baselines, not trained on"
        )
    if config.task == "rl" and dynamic is not None:
        prompts_per_round = dynamic.prompts_per_round or prompts
        lines.append(
            f"dynamic sampling: at most {dynamic.max_rounds} rounds of {prompts_per_round:,} "
            f"prompts x {group_size} = {dynamic.max_rounds * prompts_per_round * group_size:,} "
            f"completions per step, of which {completions:,} are trained on"
        )
    return lines


def _inference_line(config: TrainerConfig) -> str:
    """Describe tasks eval and generate; their number of prompts is known once the data is read."""
    is_eval = config.task == "eval"
    # Task eval uses the sampling settings of evaluations during training, so that the results of
    # both can be compared.
    longest = (config.run.eval_sampling if is_eval else config.sampling).max_tokens
    longest = config.compute_max_rollout_tokens(longest)
    # A greedy evaluation takes one completion.
    num_evaluated = config.run.eval_num_completions if config.run.eval_sampling.temperature else 1
    count = num_evaluated if is_eval else config.generate.num_completions
    prompt, noun = config.data.max_prompt_tokens, "completion" if count == 1 else "completions"
    return (
        f"a {'problem' if is_eval else 'prompt'}: {count} {noun} of at most {prompt:,} + "
        f"{longest:,} = {prompt + longest:,} tokens, the prompt included"
    )


def _sft_sizes(run: RunConfig, *, prompts_per_step: int) -> list[str]:
    if run.total_epochs is not None:
        return [_epochs_line(run.total_epochs)]
    return [f"a run: {_describe_demonstrations(run.total_steps, prompts_per_step)}"]


def _describe_demonstrations(steps: int, size: int) -> str:
    return f"{steps:,} updates of {size:,} demonstrations = {steps * size:,} demonstrations"


def _epochs_line(epochs: int) -> str:
    return f"a run: {epochs:,} passes over the training data, with one step per full batch"


def _teacher_line(name: str, teacher: TeacherConfig, *, engine: str) -> str:
    model = teacher.engine.model
    source = model.path or f"{model.architecture['model_type']} from scratch"
    workers = f"{teacher.num_replicas} x {teacher.num_workers} workers in pool {teacher.pool}"
    route = name if teacher.route is None else teacher.route
    return (
        f"teachers.{name}: {source} on "
        f"{engine if teacher.backend == 'engine' else teacher.backend}, {workers}, for route "
        f"{route!r}, frozen"
    )


def _role_line(name: str, role: RoleConfig, *, engine: str) -> str:
    model = role.engine.model
    source = model.path or f"{model.architecture['model_type']} from scratch"
    training = "frozen" if role.engine.optimizer is None else f"lr {role.engine.optimizer.lr:g}"
    workers = f"{role.num_workers} worker" + ("s" if role.num_workers > 1 else "")
    return f"{name}: {source} on {engine}, {workers}, {role.engine.precision.compute}, {training}"
