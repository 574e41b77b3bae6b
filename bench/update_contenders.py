"""The contenders of bench_update.py.

All train the same model on the same sequences with AdamW, clipping at 1 and fp32 weights. They
compute in bf16 if the processor has instructions for it, otherwise in fp32.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from update_workload import (
    IS_BF16,
    LEARNING_RATE,
    MICRO_BATCH_TOKENS,
    NUM_SEQUENCES,
    Example,
    Timing,
    draw_batches,
    load_model,
    pack_first_fit,
    time_updates,
)

PADDED_BATCH = 8
"""Number of sequences in a padded micro-batch, for contenders that pad."""
PACKED_BINS = 3
"""Number of packed bins per update, with about the tokens of `NUM_SEQUENCES` sequences."""


def rank_and_size() -> tuple[int, int]:
    """Return rank and world size of this process from torchrun's variables."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class VariableLengthAttention:
    """Causal attention over packed sequences, with one SDPA call per sequence.

    This never builds a T x T mask.
    """

    def __init__(self) -> None:
        self.starts = [0]

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention of [1, heads, T, D] tensors; return [1, T, heads, D] and no weights."""
        attend = partial(
            F.scaled_dot_product_attention,
            is_causal=True,
            scale=options.get("scaling"),
            enable_gqa=True,
        )
        parts = [
            attend(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b])
            for a, b in pairwise(self.starts)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2), None

    def register(self) -> str:
        """Register this attention with transformers and return its name."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register("bench_varlen", self)
        AttentionMaskInterface.register("bench_varlen", lambda *args, **kwargs: None)
        return "bench_varlen"


def packed_loss(
    model: nn.Module, attention: VariableLengthAttention, chosen: Sequence[Example]
) -> Tensor:
    """Return the summed loss of packed sequences; the head runs only on trained positions."""
    tokens = torch.cat([e.tokens for e in chosen])
    attention.starts = [0, *torch.tensor([len(e.tokens) for e in chosen]).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(len(e.tokens)) for e in chosen])
    # Position t predicts token t + 1, so the mask moves by one; the last position predicts none.
    trained = torch.cat([e.is_response for e in chosen]).roll(-1)
    trained[-1] = False
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=IS_BF16):
        hidden = model.model(
            input_ids=tokens[None], position_ids=positions[None]
        ).last_hidden_state[0]
        logits = model.lm_head(hidden[trained])
    return F.cross_entropy(logits.float(), tokens.roll(-1)[trained], reduction="sum")


def hand_loop(folder: Path, num_updates: int) -> Timing:
    """Train with a loop written only for this model, on one rank."""
    attention = VariableLengthAttention()
    model = load_model(folder, attention=attention.register())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def update(batch: Sequence[Example]) -> float:
        num_trained, total = sum(int(e.is_response.sum()) for e in batch), 0.0
        for chosen in pack_first_fit([len(e.tokens) for e in batch], cap=MICRO_BATCH_TOKENS):
            loss = packed_loss(model, attention, [batch[i] for i in chosen]) / num_trained
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return time_updates(update, num_updates=num_updates)


def hand_loop_sharded(folder: Path, num_updates: int) -> Timing:
    """Train with `fully_shard` on each layer and sequences balanced over ranks by length."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    rank, world_size = rank_and_size()
    attention = VariableLengthAttention()
    model = load_model(folder, attention=attention.register())
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if IS_BF16 else None, reduce_dtype=torch.float32
    )
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)

    def compute_loss(chosen: Sequence[Example]) -> Tensor:
        tokens = torch.cat([e.tokens for e in chosen])
        attention.starts = [0, *torch.tensor([len(e.tokens) for e in chosen]).cumsum(0).tolist()]
        positions = torch.cat([torch.arange(len(e.tokens)) for e in chosen])
        trained = torch.cat([e.is_response for e in chosen]).roll(-1)
        trained[-1] = False
        logits = model(input_ids=tokens[None], position_ids=positions[None]).logits[0]
        return F.cross_entropy(logits[trained].float(), tokens.roll(-1)[trained], reduction="sum")

    def update(batch: Sequence[Example]) -> float:
        num_trained, num_tokens, total = (
            sum(int(e.is_response.sum()) for e in batch),
            [0] * world_size,
            torch.zeros(()),
        )
        examples_by_rank: list[list[Example]] = [[] for _ in range(world_size)]
        for example in sorted(batch, key=lambda e: -len(e.tokens)):
            # Longest sequence first, always to the rank with the fewest tokens.
            lightest = num_tokens.index(min(num_tokens))
            examples_by_rank[lightest].append(example)
            num_tokens[lightest] += len(example.tokens)
        bins = [
            pack_first_fit([len(e.tokens) for e in examples], cap=MICRO_BATCH_TOKENS)
            for examples in examples_by_rank
        ]
        # Every rank needs the same number of micro-batches, because each runs collectives.
        while len(bins[rank]) < max(map(len, bins)):
            largest = max(bins[rank], key=len)
            bins[rank].append([largest.pop() for _ in range(len(largest) // 2)])
        for number, chosen in enumerate(bins[rank], start=1):
            # Reduce gradients once per update, in the backward pass of the last micro-batch.
            model.set_requires_gradient_sync(number == len(bins[rank]))
            loss = compute_loss([examples_by_rank[rank][i] for i in chosen]) / num_trained
            # FSDP averages gradients over ranks; the factor turns the average into a sum.
            (loss * world_size).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item()

    return time_updates(update, num_updates=num_updates, world_size=world_size)


def temper(
    folder: Path, num_updates: int, *, is_policy: bool = False, keeps_logits: bool = False
) -> Timing:
    """Train FSDPEngine with the SFT objective, or with a clipped policy gradient.

    Args:
        folder: Directory of the model.
        num_updates: Number of timed updates.
        is_policy: Use the clipped policy gradient with its columns, and return entropies too.
        keeps_logits: Keep the logits for the backward pass, as the hand-written loop does. By
            default the head recomputes them, which saves memory.
    """
    from temper_engine_api.batch import SequenceBatch, from_sequences
    from temper_engine_api.metrics import merge_metrics
    from temper_engine_api.objective import HeadOutput
    from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec
    from temper_engine_fsdp.config import FSDPConfig
    from temper_engine_fsdp.engine import FSDPEngine
    from temper_trainer.algorithms.objectives.policy_objective import PolicyObjective
    from temper_trainer.algorithms.objectives.supervised_losses import SftObjective

    engine = FSDPEngine(
        FSDPConfig(
            model=ModelSpec(path=str(folder)),
            optimizer=OptimizerSpec(lr=LEARNING_RATE),
            precision=PrecisionSpec(compute="bf16" if IS_BF16 else "fp32"),
            device="cpu",
            head_keeps_logits=keeps_logits,
        )
    )
    engine.init_model()
    engine.set_loss_fn(PolicyObjective() if is_policy else SftObjective())
    outputs = (HeadOutput.LOGPROB, HeadOutput.ENTROPY) if is_policy else ()

    def to_sequences(batch: Sequence[Example]) -> SequenceBatch:
        columns = {
            "old_logprobs": [torch.full((len(e.tokens),), -9.0) for e in batch],
            "advantages": [e.is_response.float() for e in batch],
        }
        return from_sequences(
            [e.tokens for e in batch],
            loss_masks=[e.is_response for e in batch],
            columns=columns if is_policy else None,
        )

    def update(batch: Sequence[Example]) -> float:
        engine.optimizer_zero_grad()
        with engine.train_mode():
            local_batch = engine.shard_data(to_sequences(batch), max_tokens=MICRO_BATCH_TOKENS)
            result = engine.forward_backward_batch(local_batch, forward_only=False, outputs=outputs)
        engine.optimizer_step()
        engine.lr_scheduler_step()
        parts = engine._gather_objects(result.metrics)
        return merge_metrics(parts)["loss"].result

    timing = time_updates(update, num_updates=num_updates, world_size=rank_and_size()[1])
    engine.close()
    return (
        timing
        if not is_policy
        else Timing(tokens=timing.tokens, wall_s=timing.wall_s, cpu_s=timing.cpu_s, losses=[])
    )


class StepClock:
    """Times the updates of transformers' Trainer and counts their real tokens."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.losses: list[float] = []
        self.tokens: list[int] = []

    def callback(self) -> object:
        """Return a TrainerCallback that records times and losses."""
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):
            def on_step_begin(self, *args: object, **kwargs: object) -> None:
                clock.started = time.perf_counter(), time.process_time()
                clock.tokens.append(0)

            def on_step_end(self, *args: object, **kwargs: object) -> None:
                clock.wall_s.append(time.perf_counter() - clock.started[0])
                clock.cpu_s.append(time.process_time() - clock.started[1])

            def on_log(
                self,
                args: object,
                state: object,
                control: object,
                logs: dict[str, float],
                **kwargs: object,
            ) -> None:
                clock.losses += [logs["loss"]] if "loss" in logs else []

        return Callback()

    def count(self, trainer: Any) -> None:
        """Wrap the trainer's step to count the real tokens of each micro-batch."""
        step = trainer.training_step

        def counted(
            model: object, inputs: dict[str, Tensor], *args: object, **kwargs: object
        ) -> Tensor:
            mask = inputs.get("attention_mask")
            self.tokens[-1] += inputs["input_ids"].numel() if mask is None else int(mask.sum())
            result: Tensor = step(model, inputs, *args, **kwargs)
            return result

        trainer.training_step = counted

    def timing(self, *, has_same_batches: bool) -> Timing:
        """Return the timing without the first update."""
        return Timing(
            tokens=self.tokens[1:],
            wall_s=self.wall_s[1:],
            cpu_s=self.cpu_s[1:],
            losses=self.losses if has_same_batches else [],
        )


def trainer_options(folder: Path) -> dict[str, Any]:
    """Return the options that Transformers' Trainer and TRL have in common."""
    return {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": IS_BF16,
        "learning_rate": LEARNING_RATE,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "optim": "adamw_torch",
        "num_train_epochs": 1,
    }


def keep_order(trainer_class: Any) -> None:
    """Make a Trainer read the sequences in the same order as the other contenders."""
    trainer_class._get_train_sampler = lambda self, *args: torch.utils.data.SequentialSampler(
        self.train_dataset
    )


def hf_trainer(folder: Path, num_updates: int) -> Timing:
    """Train with transformers' Trainer on padded micro-batches."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows = [
        {
            "input_ids": e.tokens.tolist(),
            "labels": torch.where(e.is_response, e.tokens, -100).tolist(),
        }
        for batch in draw_batches(num_updates)
        for e in batch
    ]

    def collate(chosen: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        def pad(key: str, value: int) -> Tensor:
            return nn.utils.rnn.pad_sequence(
                [torch.tensor(row[key]) for row in chosen], batch_first=True, padding_value=value
            )

        mask = nn.utils.rnn.pad_sequence(
            [torch.ones(len(row["input_ids"]), dtype=torch.long) for row in chosen],
            batch_first=True,
        )
        return {
            "input_ids": pad("input_ids", 0),
            "labels": pad("labels", -100),
            "attention_mask": mask,
        }

    keep_order(Trainer)
    clock = StepClock()
    arguments = TrainingArguments(
        **trainer_options(folder),
        per_device_train_batch_size=PADDED_BATCH,
        gradient_accumulation_steps=NUM_SEQUENCES // PADDED_BATCH,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=load_model(folder, attention="sdpa"),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        data_collator=collate,
        callbacks=[clock.callback()],
    )
    clock.count(trainer)
    trainer.train()
    return clock.timing(has_same_batches=True)


def trl_packed(folder: Path, num_updates: int) -> Timing:
    """Train with TRL's SFTTrainer and packing.

    TRL packs sequences across updates, so its losses cannot be compared.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = [
        {"input_ids": e.tokens.tolist(), "completion_mask": e.is_response.long().tolist()}
        for batch in draw_batches(num_updates)
        for e in batch
    ]
    keep_order(SFTTrainer)
    clock = StepClock()
    config = SFTConfig(
        **trainer_options(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=PACKED_BINS,
        packing=True,
        padding_free=True,
        packing_strategy="bfd",
        max_length=MICRO_BATCH_TOKENS,
        completion_only_loss=True,
    )
    trainer = SFTTrainer(
        model=load_model(folder, attention="sdpa"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[clock.callback()],
    )
    clock.count(trainer)
    trainer.train()
    return clock.timing(has_same_batches=False)


def _open_verl_engine(folder: Path) -> Any:
    """Return verl's FSDP2 engine, initialized, in the process group of this process."""
    # `tools` is next to the folder of this file, which is the only one on the path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tools.other_engines.verl_cpu import register_cpu_platform

    register_cpu_platform()
    import verl.models.transformers.monkey_patch as patches

    # verl cannot import newer versions of TRL.
    patches.is_trl_available = lambda: False
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    # verl needs a process group even on a single rank.
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511"
        )
    dist.init_process_group("gloo")
    model = HFModelConfig(
        path=str(folder),
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=True,
        enable_gradient_checkpointing=False,
    )
    settings = FSDPEngineConfig(
        strategy="fsdp2",
        forward_only=False,
        use_dynamic_bsz=True,
        use_remove_padding=True,
        use_torch_compile=False,
        max_token_len_per_gpu=MICRO_BATCH_TOKENS,
        infer_max_token_len_per_gpu=MICRO_BATCH_TOKENS,
        ulysses_sequence_parallel_size=1,
        mixed_precision=None
        if IS_BF16
        else {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    optimizer = FSDPOptimizerConfig(
        lr=LEARNING_RATE,
        total_training_steps=100,
        lr_warmup_steps=0,
        clip_grad=1.0,
        weight_decay=0.01,
    )
    engine = FSDPEngineWithLMHead(model, settings, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def verl(folder: Path, num_updates: int) -> Timing:
    """Train with verl's FSDP2 engine, without padding and with the same cap on micro-batches."""
    engine = _open_verl_engine(folder)
    rank, world_size = rank_and_size()
    # Imported after the engine is open, because verl needs the CPU platform that it registers.
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode
    from verl.workers.utils.losses import sft_loss

    loss_fn = partial(sft_loss, config=None)

    def to_nested(columns: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(columns, layout=torch.jagged)

    def update(batch: Sequence[Example]) -> float:
        local_examples = batch[rank::world_size]
        columns = {
            "input_ids": to_nested([e.tokens for e in local_examples]),
            "loss_mask": to_nested([e.is_response.long() for e in local_examples]),
            "position_ids": to_nested([torch.arange(len(e.tokens)) for e in local_examples]),
        }
        data = TensorDict(columns, batch_size=[len(local_examples)])
        tensordict_utils.assign_non_tensor(
            data,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=MICRO_BATCH_TOKENS,
            use_remove_padding=True,
            use_fused_kernels=False,
            pad_mode=DatasetPadMode.NO_PADDING,
            temperature=1.0,
            calculate_entropy=False,
            pad_token_id=0,
        )
        outputs = engine.train_batch(data, loss_fn)
        engine.lr_scheduler_step()
        loss = outputs["loss"]
        total = torch.tensor(float(sum(loss)) if isinstance(loss, list) else float(loss))
        # Each rank's value is multiplied by the number of ranks, because FSDP averages gradients.
        dist.all_reduce(total)
        return float(total) / world_size

    with engine.train_mode():
        return time_updates(update, num_updates=num_updates, world_size=world_size)


ONE_RANK: dict[str, Callable[[Path, int], Timing]] = {
    "hand loop": hand_loop,
    "temper": temper,
    "temper, logits kept": partial(temper, keeps_logits=True),
    "temper, clipped policy + entropy": partial(temper, is_policy=True),
    "verl FSDP2": verl,
    "HF Trainer": hf_trainer,
    "TRL packed": trl_packed,
}
SEVERAL_RANKS: dict[str, Callable[[Path, int], Timing]] = {
    "hand loop": hand_loop_sharded,
    "temper": temper,
    "temper, logits kept": partial(temper, keeps_logits=True),
    "verl FSDP2": verl,
}
