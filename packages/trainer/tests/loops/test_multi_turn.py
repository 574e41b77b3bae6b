"""Multi-turn rollouts: exactly the sampled tokens are trained; text is never tokenized again."""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from temper_trainer.batching.samples import to_samples
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.protocol import EnvironmentFactory, Observation
from temper_trainer.environment.tool_environment import make_environment_factory
from temper_trainer.loops.multi_turn import Conversation, RolloutLimits, run_conversations
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.types import Completion, Prompt, Rollout, SamplingRequest

WORDS = ["<eos>", "<unk>", *"0123456789", "+", "-", "*", "=", "#", "\n", " ", "12", "error", ":"]
IDS = {word: i for i, word in enumerate(WORDS)}
CONFIG = EnvironmentConfig(call_start="", call_end="=", answer_start="", answer_end="", max_turns=3)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that merges "12", so that sampled "1", "2" is another token as text."""
    inner = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex(r"12|error|[\s\S]"), "isolated")
    inner.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")


class RecordingSampler(ScriptedSampler):
    """A scripted sampler that records requests and completions."""

    def __init__(self, turns: Sequence[Sequence[str]]) -> None:
        self.seen: list[tuple[SamplingRequest, Completion]] = []
        super().__init__(
            lambda request: [IDS[word] for word in turns[len(self.seen)]], end_token_id=0
        )

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        made = []
        for request in requests:
            made += super().sample([request])
            self.seen.append((request, made[-1]))
        return made


def run_conversation(
    *turns: Sequence[str],
    limits: RolloutLimits,
    config: EnvironmentConfig = CONFIG,
    make_environment: EnvironmentFactory | None = None,
) -> tuple[Conversation, RecordingSampler, dict[str, float]]:
    sampler = RecordingSampler(turns)
    request = SamplingRequest(
        request_id=0, prompt_tokens=(IDS["#"],), sampling=SamplingConfig(max_tokens=20), seed=1
    )
    prompt = Prompt(prompt_id=0, text="#", tokens=(IDS["#"],), answer="")
    (conversation,), metrics = run_conversations(
        sampler,
        [request],
        prompts=[prompt],
        make_environment=make_environment
        or make_environment_factory(config, tokenizer=tokenizer()),
        limits=limits,
    )
    return conversation, sampler, metrics


class LengthFee:
    """An environment that charges for the tokens of each turn and answers with a line break."""

    def reset(self, prompt: Prompt) -> None:
        pass

    def step(self, tokens: Sequence[int]) -> Observation:
        return Observation(tokens=(IDS["\n"],), reward=-0.5 * len(tokens))


LIMITS = RolloutLimits(max_turns=3, max_tokens=40, stop="=")


def test_calculator_answers_between_completions_and_only_sampled_tokens_are_trained() -> None:
    conversation, sampler, metrics = run_conversation(
        ("3", "*", "4", "="), ("\n", "1", "2", "-", "2", "="), ("\n", "#", "<eos>"), limits=LIMITS
    )
    assert tokenizer().decode(conversation.tokens, skip_special_tokens=True) == "3*4=12\n12-2=10\n#"
    rollout = Rollout(
        prompt=Prompt(prompt_id=0, text="#", tokens=(IDS["#"],), answer=""),
        completion=conversation.completions[0],
        turns=tuple(conversation.turns),
        text="",
        reward=1.0,
        group_id=0,
        sample_id=0,
    )
    samples = to_samples([rollout], temperature=1.0)
    trained_words = [
        WORDS[i]
        for i, is_trained in zip(samples.tokens.tolist(), samples.loss_mask.tolist(), strict=True)
        if is_trained
    ]
    assert trained_words == [*"3*4=", "\n", *"12-2=", "\n", "#", "<eos>"]
    assert metrics["tool/calls"] == 2.0
    assert metrics["rollout/turns_mean"] == 3.0
    # The comparator: the policy saw exactly the tokens that are trained on, although their text has
    # another spelling in tokens.
    sample_tokens = tuple(samples.tokens.tolist())
    for request, completion in sampler.seen:
        length = len(request.prompt_tokens)
        assert sample_tokens[:length] == request.prompt_tokens
        assert sample_tokens[length : length + len(completion.tokens)] == completion.tokens
    again = tokenizer()(tokenizer().decode(sample_tokens[1:]), add_special_tokens=False)[
        "input_ids"
    ]
    assert tuple(again) != sample_tokens[1:], (
        "1 and 2 were sampled apart, and would come back as one token"
    )


def test_rollout_ends_with_an_end_token_or_without_a_call() -> None:
    ended, _, _ = run_conversation(("3", "<eos>"), limits=LIMITS)
    silent, _, _ = run_conversation(("3", "+"), limits=LIMITS)
    assert len(ended.completions) == len(silent.completions) == 1


def test_invalid_call_gets_an_answer_and_is_counted() -> None:
    conversation, _, metrics = run_conversation(("+", "="), ("\n", "<eos>"), limits=LIMITS)
    assert metrics["tool/failed"] == 1.0
    assert conversation.turns[0].observation[:2] == (IDS["error"], IDS[":"])


def test_turns_and_tokens_are_limited() -> None:
    calls = [("\n", "1", "+", "1", "=")] * 9
    assert len(run_conversation(*calls, limits=LIMITS)[0].completions) == 3
    # 5 tokens and an answer of 1, then 1 token of the next completion: 7 in all.
    short, _, _ = run_conversation(
        *calls, limits=RolloutLimits(max_turns=9, max_tokens=7, stop="=")
    )
    assert len(short.tokens) == 7


def test_long_answer_is_truncated_and_counted() -> None:
    conversation, _, metrics = run_conversation(
        ("9", "*", "9", "="),
        ("<eos>",),
        limits=LIMITS,
        config=EnvironmentConfig(
            call_start="",
            call_end="=",
            answer_start="",
            answer_end="",
            max_turns=3,
            max_observation_tokens=1,
        ),
    )
    assert metrics["tool/cut_answers"] == 1.0
    assert len(conversation.turns[0].observation) == 1


def test_the_reward_of_each_turn_is_kept_and_their_sum_is_the_rollouts() -> None:
    conversation, _, _ = run_conversation(
        ("1", "="), ("2", "2", "="), ("3", "<eos>"), limits=LIMITS, make_environment=LengthFee
    )
    assert conversation.rewards == [-1.0, -1.5, -1.0]
    assert conversation.reward == -3.5
