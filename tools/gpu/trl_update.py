"""Time the update of TRL's GRPOTrainer on prepared completions, without generation.

Calls `trainer.train()` as a user would. Only the method that samples and scores completions is
replaced: it returns the prepared batch, which every update trains on again.
"""

import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from temper_engine_api.batch import SequenceBatch


def grpo_update_seconds(
    folder: Path,
    batch: SequenceBatch,
    *,
    sequences_at_once: int,
    device: str,
    recomputes: bool,
    num_warm_up: int,
    num_timed: int,
) -> tuple[list[float], float]:
    """Return the seconds of each timed update, and the gradient norm of the first update.

    Args:
        folder: Hugging Face directory with weights and tokenizer.
        batch: The sequences; the first token of each is the prompt.
        sequences_at_once: TRL's `per_device_train_batch_size`.
        device: `cuda` or `cpu`.
        recomputes: TRL's `gradient_checkpointing`, which is on by default.
        num_warm_up: Updates before the timed ones.
        num_timed: Updates whose seconds are returned.
    """
    # TRL and datasets are needed only for this row.
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer  # type: ignore[import-not-found]

    inputs = _pad_batch(batch, device=device)
    times: list[float] = []
    norms: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
        """Records the time after every update."""

        def on_train_begin(self, *args: object, **kwargs: object) -> None:
            times.append(_read_clock(device))

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            times.append(_read_clock(device))

        def on_log(
            self, *args: object, logs: dict[str, float] | None = None, **kwargs: object
        ) -> None:
            norms.extend([logs["grad_norm"]] if logs and "grad_norm" in logs else [])

    class PreparedTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
        """A GRPOTrainer with prepared completions."""

        def _generate_and_score_completions(self, generation_batch: object) -> dict[str, Any]:
            return dict(inputs)

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    trainer = PreparedTrainer(
        model=model,
        reward_funcs=_no_reward,
        args=_make_arguments(
            folder,
            batch,
            sequences_at_once=sequences_at_once,
            device=device,
            recomputes=recomputes,
            num_updates=num_warm_up + num_timed,
        ),
        train_dataset=Dataset.from_list([{"prompt": "t2"}] * len(batch.lengths)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[Clock()],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    seconds = [end - start for start, end in pairwise(times)]
    return sorted(seconds[num_warm_up:]), norms[0]


def _make_arguments(
    folder: Path,
    batch: SequenceBatch,
    *,
    sequences_at_once: int,
    device: str,
    recomputes: bool,
    num_updates: int,
) -> Any:
    """Return a GRPOConfig in which every update trains on all sequences of the batch once."""
    from trl import GRPOConfig

    num_sequences = len(batch.lengths)
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=device == "cpu",
        bf16=True,
        per_device_train_batch_size=sequences_at_once,
        gradient_accumulation_steps=num_sequences // sequences_at_once,
        num_generations=num_sequences,
        max_completion_length=int(batch.lengths.max()),
        gradient_checkpointing=recomputes,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_steps=num_updates,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )


def _no_reward(completions: Sequence[str], **_: object) -> list[float]:
    return [0.0] * len(completions)


def _read_clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _pad_batch(batch: SequenceBatch, *, device: str) -> dict[str, Any]:
    """Return the batch in TRL's padded layout."""
    spans = batch.lengths.tolist()

    def rows(column: Tensor) -> Tensor:
        parts = [part[1:] for part in column.split(spans)]
        return pad_sequence(parts, batch_first=True).to(device)

    prompts = batch.tokens[batch.sequence_starts[:-1].long()][:, None].to(device)
    mask = rows(torch.ones_like(batch.tokens))
    first = batch.sequence_starts[:-1].long()
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": rows(batch.tokens),
        "completion_mask": mask,
        "advantages": batch.columns["advantages"][first].to(device),
        "old_per_token_logps": rows(batch.columns["old_logprobs"]),
        "num_items_in_batch": mask.sum(),
    }
