"""Every broken engine: the world size at which its fault shows, and the laws that must name it.

Run as a program, it holds every saboteur to every law and prints the table of who was caught by what, in markdown.
"""

from dataclasses import dataclass

import saboteurs_of_numbers as numbers
import saboteurs_of_state as state


@dataclass(frozen=True, slots=True)
class Saboteur:
    """One broken engine."""

    engine: type
    laws: tuple[str, ...]
    """``test_file::test_name``; each must be broken."""
    world_size: int = 1

    @property
    def name(self):
        return f"{self.engine.__module__}:{self.engine.__name__}"


SPLIT = "test_gradient::test_gradient_is_independent_of_micro_batch_split"
RANKS = "test_gradient::test_gradient_is_independent_of_data_parallel_size"
RESUME = "test_checkpoint::test_resume_is_bitwise"
INDEX = "test_weights::test_exported_weights_are_those_of_the_index"
NONFINITE = "test_update::test_nonfinite_gradient_skips_on_every_rank"

SABOTEURS = (
    Saboteur(numbers.MeanPerMicroBatch, (SPLIT,)),
    Saboteur(numbers.MeanPerRank, (RANKS,), 2),
    Saboteur(numbers.CountsDummies, (SPLIT,), 2),
    Saboteur(numbers.ReducesTwice, (RANKS, "test_gradient::test_gradient_norm_is_that_of_the_whole_gradient"), 2),
    Saboteur(numbers.NeverReducesPending, ("test_gradient::test_two_calls_then_step_equal_one_call",), 2),
    Saboteur(numbers.ForgetsTemperature, ("test_logprob::test_temperature_scales_logits_before_log_softmax", SPLIT)),
    Saboteur(numbers.TempersLogProbs, ("test_logprob::test_temperature_scales_logits_before_log_softmax",)),
    Saboteur(numbers.ShiftsLabels, ("test_logprob::test_answers_equal_the_oracle", SPLIT)),
    Saboteur(numbers.DropsFirstResponseToken, ("test_gradient::test_first_response_token_contributes",)),
    Saboteur(numbers.IgnoresWeights, (SPLIT,)),
    Saboteur(numbers.IgnoresPositions, ("test_logprob::test_given_position_ids_are_used",)),
    Saboteur(numbers.LeaksAcrossSequences, ("test_logprob::test_packed_equals_alone", SPLIT)),
    Saboteur(numbers.AnswersUntrained, ("test_logprob::test_positions_that_nothing_trains_hold_zero",)),
    Saboteur(numbers.RoundsLogProbs, ("test_logprob::test_answers_are_float32_under_bf16_compute",)),
    Saboteur(numbers.EntropySpoilsLogProbs, ("test_logprob::test_asking_for_entropy_does_not_change_log_probs",)),
    Saboteur(
        numbers.IsRandomInEval,
        ("test_logprob::test_eval_twice_gives_the_same_bits", "test_logprob::test_on_policy_ratio_is_exactly_one"),
    ),
    Saboteur(
        numbers.ValueSeesItsToken,
        ("test_value::test_values_equal_the_oracle", "test_value::test_a_value_does_not_see_its_own_token"),
    ),
    Saboteur(numbers.MergesMicroBatches, ("test_batch::test_plan_is_executed_unchanged",)),
    Saboteur(numbers.LosesOrder, ("test_batch::test_output_order_is_restored",), 2),
    Saboteur(numbers.SumsLossOverRanks, (RANKS,), 2),
    Saboteur(state.IgnoresClip, ("test_update::test_clip_is_applied",)),
    Saboteur(state.ReportsClippedNorm, ("test_update::test_clip_is_applied",)),
    Saboteur(state.ReportsNormOfOneRank, ("test_gradient::test_gradient_norm_is_that_of_the_whole_gradient",), 2),
    Saboteur(state.SkipsAlone, (NONFINITE,), 2),
    Saboteur(state.StepsOnNonfinite, (NONFINITE,)),
    Saboteur(state.StepsOnAllMasked, ("test_update::test_all_masked_mini_batch_updates_nothing",)),
    Saboteur(state.RateAdvancesOnSkip, (NONFINITE, "test_update::test_all_masked_mini_batch_updates_nothing")),
    Saboteur(state.FirstStepHasNoRate, ("test_update::test_learning_rate_is_a_pure_function_of_the_step",)),
    Saboteur(state.DecaysVectors, ("test_update::test_weight_decay_spares_vectors",)),
    Saboteur(state.ForgetsBiasCorrection, ("test_update::test_three_updates_equal_adamw_by_hand",)),
    Saboteur(state.KeepsZeroedGradients, ("test_update::test_zeroed_gradients_do_not_come_back",)),
    Saboteur(state.DropsGradientsOnLeave, ("test_update::test_leaving_train_mode_keeps_gradients",)),
    Saboteur(state.StaysInModeOnError, ("test_state_machine::test_modes_end_when_their_body_raises",)),
    Saboteur(state.LosesTiedHead, (INDEX,)),
    Saboteur(state.ExportsStaleWeights, ("test_weights::test_exported_weights_give_same_logits_in_transformers",)),
    Saboteur(state.LoadsLeniently, ("test_weights::test_wrong_weights_are_refused_and_nothing_changes",)),
    Saboteur(state.LosesMoments, (RESUME,)),
    Saboteur(state.RestartsSchedule, (RESUME, "test_checkpoint::test_counters_and_rate_are_resumed")),
    Saboteur(state.ForgetsRandomState, ("test_checkpoint::test_random_state_is_resumed",)),
    Saboteur(
        state.LoadsUnchecked,
        ("test_checkpoint::test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file",),
    ),
    Saboteur(state.PortableStateLosesCounts, ("test_weights::test_portable_state_continues_bitwise",)),
    Saboteur(state.SharesStateBetweenEngines, ("test_state_machine::test_a_second_engine_follows_a_closed_one",)),
)
