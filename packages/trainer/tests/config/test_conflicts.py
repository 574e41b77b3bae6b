import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading import load

RL = ["data.train.paths=[train.jsonl]", "actor.engine.model.path=model"]

LORA = ["actor.engine.lora.rank=8", "actor.engine.lora.alpha=16"]


@pytest.mark.parametrize(
    ("overrides", "first", "second"),
    [
        (
            ["algorithm.advantage=gae"],
            "algorithm.advantage is gae",
            "critic is not set, but gae and vapo need one in task rl: add critic=value_model.",
        ),
        (
            ["algorithm.advantage=vapo"],
            "algorithm.advantage is vapo",
            "critic is not set, but gae and vapo need one in task rl: add critic=value_model.",
        ),
        (
            ["critic=value_model"],
            "algorithm.advantage is grpo",
            "critic is set, but only gae and vapo need one, in task rl: set critic=none.",
        ),
        (
            ["critic=value_model", "algorithm.advantage=gae", "task=sft"],
            "in task sft, and critic is set",
            "but only gae and vapo need one, in task rl: set critic=none.",
        ),
        (
            ["algorithm=gdpo", "reward.components={exact_match: 1}", "data.train.reward_key=score"],
            "data.train has reward or reward_key, but algorithm.advantage gdpo needs the same",
            "reward.components for all completions: remove it.",
        ),
        (
            ["algorithm=gdpo", "reward.components={exact_match: 1}", "reward.shaping.high=1"],
            "reward.shaping has no effect with algorithm.advantage gdpo, which uses the unshaped",
            "rewards: remove it.",
        ),
        (
            ["task=sft", "data.streaming=true", "data.tokenizer={kind: bpe, vocab_size: 300}"],
            "data.streaming is true, but data.tokenizer.kind bpe is trained on all rows",
            "before the run: use a pretrained one.",
        ),
        (
            ["data.streaming=true", "data.overlong_prompts=drop"],
            "data.streaming is true, but data.overlong_prompts drop removes rows before the run",
            "remove these rows from the file, or raise data.max_prompt_tokens.",
        ),
        (
            ["data.streaming=true", "data.train=parquet", "data.train.paths=[rows.parquet]"],
            "data.streaming is true, but rows can be found only in uncompressed local JSON lines",
            "decompress or convert the files, or use data.train=datasets.",
        ),
        (
            ["task=generate", "rollout.record=true", "generate.file=./completions.jsonl"],
            "rollout.record and generate.file both write completions.jsonl",
            "set generate.file to another name.",
        ),
        *(
            (
                ["task=generate", f"generate.file={name}"],
                f"generate.file is {name}, but the run itself writes there",
                "set it to another name.",
            )
            for name in ("metrics.jsonl", "./tokenizer", "checkpoints", ".", "report.html")
        ),
        (["algorithm.kl_loss_coef=0.1"], "algorithm.kl_loss_coef is 0.1", "ref is not set"),
        (["ref=frozen"], "algorithm.kl_loss_coef is 0.0", "ref is set"),
        (["ref=frozen", "task=sft"], "ref is set in task sft", "remove it (ref=none)"),
        (["actor.num_workers=2"], "actor.num_workers is 2", "runtime.kind is inline"),
        (
            [
                "model_engine=megatron",
                "actor.engine.tensor_parallel=2",
                "actor.engine.context_parallel=3",
                "actor.num_workers=4",
                "runtime.kind=ray",
            ],
            "actor.num_workers is 4",
            "over 6 ranks: set actor.num_workers to a multiple of 6",
        ),
        (["actor.engine.sequence_parallel=2"], "actor.num_workers is 1", "over 2 ranks"),
        (
            ["actor.engine.fsdp_size=2", "actor.num_workers=3", "runtime.kind=ray"],
            "actor.engine and actor.num_workers: fsdp_size is 2",
            "must divide the world size 3",
        ),
        (
            ["actor.engine.reshard_after_forward=2", "actor.num_workers=3", "runtime.kind=ray"],
            "actor.engine and actor.num_workers: reshard_after_forward is 2",
            "or a divisor of the 3 shards",
        ),
        (
            [
                *("model_engine=megatron", "actor.engine.expert_parallel=2"),
                *("actor.num_workers=3", "runtime.kind=ray"),
            ],
            "actor.engine and actor.num_workers: expert_tensor_parallel 1 x expert_parallel 2",
            "must divide the 3 ranks",
        ),
        (
            ["data.eval.paths=[test.jsonl]", "run.eval_num_completions=4"],
            "run.eval_num_completions is 4",
            "set run.eval_sampled=true or run.eval_sampling.temperature",
        ),
        (
            ["data.eval_sets.sampled.paths=[test.jsonl]"],
            "data.eval_sets has the name 'sampled'",
            "none of greedy, sampled",
        ),
        (
            ["run.eval_answer_pattern='('"],
            "run.eval_answer_pattern is '('",
            "not a regular expression",
        ),
        (["sampling.temperature=0"], "sampling.temperature is 0", "task rl"),
        (["sampling.top_k=1"], "sampling.top_k is 1", "to 0 for all tokens"),
        (
            ["batching.max_tokens=1000"],
            "batching.max_tokens is 1000",
            "data.max_prompt_tokens (1024) and sampling.max_tokens (512)",
        ),
        (
            ["batching.num_mini_batches=65"],
            "batching.num_mini_batches is 65",
            "batching.prompts_per_step is 64",
        ),
        (
            ["algorithm.kl_reference=disabled_adapter", "algorithm.kl_loss_coef=0.1"],
            "kl_reference is disabled_adapter",
            "set actor.engine.lora.rank",
        ),
        (
            ["algorithm.kl_reference=disabled_adapter", *LORA],
            "kl_reference is disabled_adapter",
            "algorithm.kl_loss_coef and",
        ),
        (
            [
                "ref=frozen",
                "algorithm.kl_loss_coef=0.1",
                "algorithm.kl_reference=disabled_adapter",
                *LORA,
            ],
            "kl_reference is disabled",
            "ref is set",
        ),
        (
            ["actor.engine.lora.path=adapter", "warm_start.total_steps=5"],
            "warm_start and actor.engine.lora.path are both set",
            "Remove one of them",
        ),
        (["actor.engine.lora.rank=8"], "actor.engine.lora", "lora.alpha is not set"),
        (
            ["actor.engine.model.model_type=value_model"],
            "actor.engine.model.model_type is value_model",
            "must be language_model in task rl",
        ),
        (
            ["task=sft", "warm_start.total_steps=5"],
            "warm_start has no effect",
            "set warm_start=null",
        ),
        (
            ["weight_sync.transport=collective"],
            "weight_sync.transport is collective",
            "rollout.sampler hf",
        ),
        (
            ["rollout=vllm", "weight_sync.transport=in_process"],
            "weight_sync.transport is in_process",
            "rollout.sampler vllm",
        ),
        (
            ["rollout=vllm", "weight_sync.transport=cuda_ipc", "actor.engine.device=cpu"],
            "weight_sync.transport is cuda_ipc",
            "actor.engine.device is cpu",
        ),
        (
            ["weight_sync.max_changed_fraction=0.1"],
            "weight_sync.max_changed_fraction",
            "weight_sync.content=delta",
        ),
        (
            ["weight_sync.content=adapter", *LORA],
            "weight_sync.content is adapter",
            "rollout.sampler is hf",
        ),
        (
            ["rollout=vllm", "weight_sync.content=adapter"],
            "weight_sync.content is adapter",
            "actor.engine.lora is off",
        ),
        (
            ["rollout=vllm", "weight_sync.content=adapter", "rollout.vllm.sleep_level=2", *LORA],
            "rollout.vllm.sleep_level is 2",
            "weight_sync.content is adapter",
        ),
        (["rollout.num_replicas=2"], "rollout.num_replicas is 2", "rollout.sampler hf"),
        (
            ["rollout=vllm", "sampling.temperature=0.7", "sampling.top_p=0.9"],
            "sampling.temperature is 0.7",
            "sampling.top_p 0.9",
        ),
        (
            [
                "rollout=vllm",
                "rollout.vllm.kv_cache_bytes=67108864",
                "rollout.vllm.gpu_memory_utilization=0.5",
            ],
            "rollout.vllm.gpu_memory_utilization",
            "rollout.vllm.kv_cache_bytes",
        ),
        (
            ["rollout=vllm", "+rollout.vllm.engine_kwargs.max_num_seqs=4"],
            "engine_kwargs.max_num_seqs",
            "rollout.max_concurrent",
        ),
        (["algorithm.group_size=1"], "algorithm.advantage grpo", "algorithm.group_size is 1"),
    ],
)
def test_conflict_names_both_keys(overrides: list[str], first: str, second: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*RL, *overrides])
    assert first in str(caught.value)
    assert second in str(caught.value)


def test_single_completion_of_a_prompt_may_be_its_most_likely_tokens() -> None:
    one = [*RL, "algorithm=reinforce_plus_plus", "sampling.top_k=1"]
    load(one)
    with pytest.raises(ConfigError, match=r"sampling\.top_k is 1 \(greedy\)"):
        load([*one, "algorithm.group_size=2"])


def test_servers_on_other_hosts_need_an_address_that_they_reach() -> None:
    on_servers = [*RL, "rollout=vllm", "rollout.vllm.servers=[127.0.0.1:8100,10.0.0.5:8100]"]
    with pytest.raises(ConfigError, match=r"such as 10\.0\.0\.5:8100, cannot reach: set runtime"):
        load(on_servers)
    load([*on_servers, "runtime.bind_address=10.0.0.4"])
    load([*on_servers, "runtime.kind=ray"])
    load([*RL, "rollout=vllm", "rollout.vllm.servers=[127.0.0.1:8100,localhost:8101]"])


@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ("127.0.0.1:65536", "has '127.0.0.1:65536', but must have addresses HOST:PORT"),
        ("127.0.0.1:8100,localhost:8100", "a server can be connected once"),
        ("127.0.0.1:0", "has '127.0.0.1:0', but must have addresses HOST:PORT"),
        ("127.0.0.1:81,127.0.0.1:81", "remove the repeated address"),
    ],
)
def test_addresses_that_no_server_has_are_refused(servers: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load([*RL, "rollout=vllm", f"rollout.vllm.servers=[{servers}]"])


def test_samples_longer_than_the_models_positions_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"max_position_embeddings is 256, but .* allow samples of 396 tokens"
    ):  # 96 + 300
        load(["experiment=quickstart", "sampling.max_tokens=300"])


def test_completions_of_an_evaluation_must_fit_the_models_positions_too() -> None:
    with pytest.raises(
        ConfigError,
        match=r"is 256, but .* run\.eval_sampling\.max_tokens \(200\) allow samples of 296",
    ):  # 96 + 200
        load(["experiment=quickstart", "run.eval_sampling.max_tokens=200"])


def test_prompts_of_sft_longer_than_the_models_positions_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"max_position_embeddings is 1024, but data\.max_prompt_tokens is 1025"
    ):
        load(
            [
                "experiment=gsm8k_sft",
                "data.train.paths=[train.jsonl]",
                "data.max_prompt_tokens=1025",
            ]
        )


def test_reference_that_would_be_trained_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"ref.engine.optimizer is set, but the reference policy is frozen"
    ):
        load([*RL, "ref=frozen", "algorithm.kl_loss_coef=0.1", "ref.engine.optimizer.lr=0.1"])
