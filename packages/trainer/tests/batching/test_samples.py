from dataclasses import replace

import pytest
import torch

from temper_engine_api.errors import BatchError
from temper_trainer.batching.samples import demonstrations_to_samples, to_samples
from temper_trainer.types import Completion, Demonstration, FinishReason, Prompt, Rollout, Turn


def make_prompt(*tokens: int) -> Prompt:
    return Prompt(prompt_id=0, text="", tokens=tokens, answer="")


def make_rollout(
    prompt: tuple[int, ...],
    completion: tuple[int, ...],
    logprobs: tuple[float, ...],
    *,
    sample: int,
    group: int,
) -> Rollout:
    made = Completion(
        request_id=0,
        tokens=completion,
        rollout_logprobs=logprobs,
        finish_reason=FinishReason.END_TOKEN,
        weight_version=1,
    )
    return Rollout(
        prompt=make_prompt(*prompt),
        completion=made,
        text="",
        reward=1.0,
        group_id=group,
        sample_id=sample,
    )


def test_prompt_and_completion_are_concatenated_and_only_the_completion_is_trained() -> None:
    rollouts = [
        make_rollout((1, 2), (3,), (-0.5,), sample=4, group=9),
        make_rollout((5,), (6, 7), (-0.1, -0.2), sample=2, group=8),
    ]
    samples = to_samples(rollouts, temperature=0.7)
    assert samples.tokens.tolist() == [1, 2, 3, 5, 6, 7]
    assert samples.sequence_starts.tolist() == [0, 3, 6]
    assert samples.loss_mask.tolist() == [False, False, True, False, True, True]
    assert samples.columns["rollout_logprobs"].tolist() == pytest.approx(
        [0.0, 0.0, -0.5, 0.0, -0.1, -0.2]
    )
    assert (samples.sample_ids.tolist(), samples.group_ids.tolist()) == ([4, 2], [9, 8])
    assert samples.temperature.tolist() == pytest.approx([0.7, 0.7])


def test_each_sample_has_its_own_pack_group() -> None:
    samples = to_samples(
        [make_rollout((1,), (2,), (-1.0,), sample=i, group=0) for i in range(3)], temperature=1.0
    )
    assert len(set(samples.pack_group_ids.tolist())) == 3


def test_all_completion_tokens_of_a_demonstration_and_no_prompt_tokens_are_trained() -> None:
    demonstrations = [
        Demonstration(prompt=make_prompt(1, 2, 3), tokens=(4, 5)),
        Demonstration(prompt=make_prompt(6), tokens=(7,)),
    ]
    samples = demonstrations_to_samples(demonstrations)
    assert samples.tokens[samples.loss_mask].tolist() == [4, 5, 7]
    assert samples.temperature.tolist() == [1.0, 1.0]
    assert len(set(samples.sample_ids.tolist())) == 2
    assert samples.columns["loss_weights"].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]


def test_weight_of_zero_leaves_a_token_untrained() -> None:
    demonstrations = [
        Demonstration(prompt=make_prompt(1), tokens=(2, 3, 4), loss_weights=(0.5, 0.0, 2.0)),
        # The mask leaves out the first token, whatever its weight is.
        Demonstration(
            prompt=make_prompt(5), tokens=(6, 7), loss_mask=(False, True), loss_weights=(3.0, 1.0)
        ),
    ]
    samples = demonstrations_to_samples(demonstrations)
    assert samples.tokens[samples.loss_mask].tolist() == [2, 4, 7]
    assert samples.columns["loss_weights"].tolist() == [0.0, 0.5, 0.0, 2.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("rollouts", "temperature", "sentence"),
    [
        ([], 1.0, "no rollout"),
        ([make_rollout((1,), (2,), (-1.0,), sample=0, group=0)], 0.0, "sampling.temperature"),
        ([make_rollout((1,), (2,), (-1.0,), sample=0, group=0)] * 2, 1.0, "must be unique"),
        (
            [make_rollout((1,), (2, 3), (-1.0,), sample=7, group=0)],
            1.0,
            "sample 7 has 2 completion tokens but 1 rollout_logprobs",
        ),
    ],
)
def test_invalid_rollouts_are_refused(
    rollouts: list[Rollout], temperature: float, sentence: str
) -> None:
    with pytest.raises(BatchError, match=sentence):
        to_samples(rollouts, temperature=temperature)


def test_demonstration_without_completion_is_refused_with_its_index() -> None:
    with pytest.raises(BatchError, match="demonstration 1"):
        demonstrations_to_samples(
            [
                Demonstration(prompt=make_prompt(1), tokens=(2,)),
                Demonstration(prompt=make_prompt(1), tokens=()),
            ]
        )


def test_columns_are_float32_and_tokens_int64() -> None:
    samples = to_samples([make_rollout((1,), (2,), (-1.0,), sample=0, group=0)], temperature=1)
    assert (samples.columns["rollout_logprobs"].dtype, samples.tokens.dtype) == (
        torch.float32,
        torch.int64,
    )


def test_observations_are_not_trained_and_turns_are_counted_from_the_end() -> None:
    second = Completion(
        request_id=1,
        tokens=(6, 7),
        rollout_logprobs=(-0.6, -0.7),
        finish_reason=FinishReason.END_TOKEN,
        weight_version=1,
    )
    rollout = replace(
        make_rollout((1, 2), (3,), (-0.3,), sample=0, group=0),
        turns=(Turn(observation=(4, 5), completion=second),),
    )
    samples = to_samples([rollout], temperature=1.0)
    assert samples.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert samples.loss_mask.tolist() == [False, False, True, False, False, True, True]
    assert samples.columns["rollout_logprobs"].tolist() == pytest.approx(
        [0.0, 0.0, -0.3, 0.0, 0.0, -0.6, -0.7]
    )
    assert samples.columns["turns_after"].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_experts_of_a_token_are_those_of_the_first_completion_that_processed_it() -> None:
    def record(*experts: int) -> torch.Tensor:
        return torch.tensor(experts, dtype=torch.int16)[:, None, None]

    second = Completion(
        request_id=1,
        tokens=(6, 7),
        rollout_logprobs=(-0.6, -0.7),
        finish_reason=FinishReason.END_TOKEN,
        weight_version=1,
        routed_experts=record(8, 8, 8, 13, 14, 15),
    )
    first = make_rollout((1, 2), (3,), (-0.3,), sample=0, group=0)
    rollout = replace(
        first,
        completion=replace(first.completion, routed_experts=record(11, 12)),
        turns=(Turn(observation=(4, 5), completion=second),),
    )
    without = make_rollout((1,), (2, 3), (-0.1, -0.1), sample=1, group=1)
    samples = to_samples([rollout, without], temperature=1.0)
    column = samples.columns["routed_experts"]
    assert column[:, 0, 0].tolist() == [11, 12, 8, 13, 14, 15, -1, -1, -1, -1]
    assert (column.shape, column.dtype) == ((10, 1, 1), torch.int16)
    assert "routed_experts" not in to_samples([without], temperature=1.0).columns


def test_rewards_of_turns_stand_at_the_last_token_of_their_completion() -> None:
    rollout = replace(
        make_rollout((1, 2), (3, 4), (-0.3, -0.4), sample=0, group=0),
        turns=(
            Turn(
                observation=(5,),
                completion=make_rollout((1,), (6,), (-1.0,), sample=0, group=0).completion,
            ),
        ),
        turn_rewards=(0.25, -1.0),
    )
    single = make_rollout((7,), (8,), (-1.0,), sample=1, group=0)
    samples = to_samples([rollout, single], temperature=1.0)
    assert samples.columns["turn_rewards"].tolist() == [0, 0, 0, 0.25, 0, -1.0, 0, 0]


def test_without_rewards_of_an_environment_there_is_no_column_for_them() -> None:
    rollout = replace(make_rollout((1,), (2,), (-1.0,), sample=0, group=0), turn_rewards=(0.0,))
    assert "turn_rewards" not in to_samples([rollout], temperature=1.0).columns


def test_overlong_filter_trains_no_token_of_a_truncated_rollout() -> None:
    complete = make_rollout((1,), (2, 3), (-1.0, -1.0), sample=0, group=0)
    cut = replace(
        complete,
        sample_id=1,
        completion=replace(complete.completion, finish_reason=FinishReason.MAX_TOKENS),
    )
    late = replace(
        complete, sample_id=2, turns=(Turn(observation=(4,), completion=cut.completion),)
    )
    rollouts = [complete, cut, late]
    filtered = to_samples(rollouts, temperature=1.0, overlong_filter=True)
    assert filtered.loss_mask.tolist() == [False, True, True] + [False] * 9
    assert int(to_samples(rollouts, temperature=1.0).loss_mask.sum()) == 8
