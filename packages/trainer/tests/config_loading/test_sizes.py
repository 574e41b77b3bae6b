from temper_trainer.config_loading import load
from temper_trainer.config_loading.sizes import describe_sizes

from .conftest import RL, SFT


def test_sizes_of_an_rl_run_follow_from_its_settings() -> None:
    overrides = [
        "batching.prompts_per_step=6",
        "algorithm.group_size=4",
        "batching.num_mini_batches=3",
        "batching.num_passes=2",
    ]
    lines = describe_sizes(load([*RL, *overrides, "run.total_steps=10"]).config)
    assert lines[0] == "a step: 6 prompts x 4 = 24 completions, 6 updates"  # 3 mini-batches, twice
    assert lines[1] == "an update: 8 completions"  # 24 / 3
    assert lines[2] == "a run: 10 steps = 240 completions, 60 updates"
    assert lines[3] == "a sample: at most 1,024 + 512 = 1,536 tokens"


def test_size_of_a_step_is_printed_in_tokens() -> None:
    lines = describe_sizes(
        load([*RL, "batching.prompts_per_step=6", "algorithm.group_size=4"]).config
    )
    assert lines[4] == "a step's tokens: at most 24 x 1,536 = 36,864"


def test_turns_and_tool_answers_count_in_the_sample_size() -> None:
    # 3 completions of 20 tokens and 2 answers of 8 are 76.
    overrides = [
        "environment.name=calculator",
        "environment.max_turns=3",
        "environment.max_observation_tokens=8",
        "sampling.max_tokens=20",
    ]
    lines = describe_sizes(load([*RL, *overrides]).config)
    assert (
        "a rollout: at most 3 completions of 20 tokens each, with observations of 8 tokens between "
        "them" in lines
    )
    assert "a sample: at most 1,024 + 76 = 1,100 tokens" in lines


def test_additional_samples_are_printed() -> None:
    lines = describe_sizes(load([*RL, "algorithm=remax", "batching.prompts_per_step=6"]).config)
    assert "additionally: 6 greedy completions per step as baselines, not trained on" in lines
    lines = describe_sizes(
        load(
            [*RL, "algorithm=dapo", "batching.prompts_per_step=6", "algorithm.group_size=4"]
        ).config
    )
    assert (
        "dynamic sampling: at most 10 rounds of 6 prompts x 4 = 240 completions per step, of which "
        "24 are trained on" in lines
    )


def test_tasks_without_training_print_what_they_sample() -> None:
    lines = describe_sizes(load([*RL, "task=generate", "generate.num_completions=3"]).config)
    assert (
        lines[0]
        == "a prompt: 3 completions of at most 1,024 + 512 = 1,536 tokens, the prompt included"
    )
    lines = describe_sizes(load([*RL, "task=eval", "run.eval_sampling.max_tokens=100"]).config)
    assert (
        lines[0]
        == "a problem: 1 completion of at most 1,024 + 100 = 1,124 tokens, the prompt included"
    )


def test_sizes_of_a_run_with_a_warm_start_begin_with_it() -> None:
    lines = describe_sizes(
        load(
            ["experiment=quickstart", "warm_start.total_steps=30", "warm_start.batch_size=50"]
        ).config
    )
    assert lines[0] == "warm start: 30 updates of 50 demonstrations = 1,500 demonstrations"
    assert "actor: qwen2 from scratch on fsdp, 1 worker, fp32, lr 0.0004" in lines


def test_sizes_of_sft_count_demonstrations() -> None:
    lines = describe_sizes(load([*SFT, "batching.prompts_per_step=32", "run.total_steps=5"]).config)
    assert lines[0] == "a run: 5 updates of 32 demonstrations = 160 demonstrations"


def test_frozen_role_is_printed_as_frozen() -> None:
    lines = describe_sizes(load([*RL, "ref=frozen", "algorithm.kl_loss_coef=0.1"]).config)
    assert "ref: model on fsdp, 1 worker, bf16, frozen" in lines


def test_moving_average_of_the_policy_is_a_frozen_model_in_float32() -> None:
    overrides = [
        "algorithm=distill",
        "distillation.self_teacher=ema",
        "data.train.teacher_prompt_key=hint",
    ]
    lines = describe_sizes(load([*RL, *overrides]).config)
    (line,) = [line for line in lines if line.startswith("averaged_actor: ")]
    assert line.endswith(", fp32, frozen")
