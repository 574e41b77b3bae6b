"""Expected values of the tests: models, batches and cached results of the oracle.

The oracle runs in the test process.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.measurements import (
    Update,
    measure_outputs,
    measure_update,
)
from temper_engine_api.conformance.harness.rank import EngineSetup, Job, P, Rank, T
from temper_engine_api.conformance.inputs.batches import (
    add_training_columns,
    make_batch,
    make_ragged_batch,
)
from temper_engine_api.conformance.inputs.tiny_adapters import TinyAdapter, write_adapter
from temper_engine_api.conformance.inputs.tiny_models import (
    QWEN2_GROUPED,
    VALUE,
    TinyModel,
    with_experts,
    write_model,
)
from temper_engine_api.conformance.oracle.oracle_engine import OracleEngine, load_model
from temper_engine_api.objective import ROUTED_EXPERTS, HeadOutput, Objective
from temper_engine_api.specs import LoraSpec

MOE_TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
"""LoRA targets in MoE models: attention projections only. Dense models use all linear layers."""


@dataclass
class OracleCache:
    """Tiny models, batches and the oracle's results, each computed once.

    Nothing in it depends on the engine under test.
    """

    folder: Path
    """Folder for models and adapters."""
    has_experts: bool = False
    """True if all models have MoE layers."""
    prescribes_experts: bool = False
    """True if batches tell the engine to use the experts that the oracle chooses; see
    `with_experts`."""
    rank: Rank = field(default_factory=lambda: Rank(OracleEngine))
    """The rank that runs the oracle."""
    _batches: dict[tuple[object, ...], SequenceBatch] = field(default_factory=dict)
    _updates: dict[tuple[EngineSetup, str, int], tuple[Update, SequenceBatch]] = field(
        default_factory=dict
    )
    """Updates by setup, objective and `id(batch)`. Each entry keeps its batch alive, so that no
    other batch gets the same id."""
    _outputs: dict[tuple[EngineSetup, HeadOutput, int], tuple[Tensor, SequenceBatch]] = field(
        default_factory=dict
    )
    """Head outputs by setup, kind and `id(batch)`; entries keep their batches alive, too."""
    _ragged_batches: dict[tuple[int, int], SequenceBatch] = field(default_factory=dict)
    """Batches without training columns, by number of sequences and seed."""

    def make_setup(self, model: TinyModel, **fields: Any) -> EngineSetup:
        """Return the setup for a tiny model; `fields` are passed to EngineSetup."""
        return EngineSetup(
            model_path=str(self.write_model(model)), model_type=model.model_type, **fields
        )

    def write_model(self, model: TinyModel, *, seed: int = 0) -> Path:
        """Write a tiny model if it is not there yet, and return its directory."""
        return write_model(
            with_experts(model) if self.has_experts else model, folder=self.folder, seed=seed
        )

    def with_experts(self, *, prescribes_experts: bool = False) -> "OracleCache":
        """Return a cache whose models have MoE layers, in a subfolder.

        Args:
            prescribes_experts: True to put the oracle's choice of experts into the batches, which
                engines must then use. By its own choice, an engine in bf16 would send some tokens
                to other experts than the oracle, which computes in float32.
        """
        folder = self.folder / "experts"
        folder.mkdir(exist_ok=True)
        return OracleCache(folder=folder, has_experts=True, prescribes_experts=prescribes_experts)

    def make_adapter_setup(
        self, adapter: TinyAdapter, *, seed: int = 0, dropout: float = 0.0, **fields: Any
    ) -> EngineSetup:
        """Return a setup that loads a tiny adapter; `fields` are passed to EngineSetup."""
        if self.has_experts:
            adapter = replace(
                adapter, fields={"target_modules": list(MOE_TARGET_MODULES), **adapter.fields}
            )
        base_setup = self.make_setup(adapter.model, **fields)
        path = write_adapter(
            adapter,
            # Use a new model, because PEFT changes the model that it attaches an adapter to.
            load_model(base_setup.build_config(OracleEngine, device="cpu", layout_fields={})),
            folder=self.folder,
            seed=seed,
        )
        return replace(base_setup, lora=LoraSpec(path=str(path), dropout=dropout))

    def make_lora_spec(self, *, rank: int) -> LoraSpec:
        """Return a new LoRA spec: all linear layers, or attention only in MoE models."""
        return LoraSpec(
            rank=rank,
            alpha=2.0 * rank,
            target_modules=MOE_TARGET_MODULES if self.has_experts else "all-linear",
        )

    def get_batch(
        self, *, num_sequences: int = 8, seed: int = 0, model: TinyModel = QWEN2_GROUPED
    ) -> SequenceBatch:
        """Return sequences of different lengths with all columns that training needs.

        The old log-probs and values differ little from those that the tiny models compute.
        """
        key = (model.name, num_sequences, seed)
        if key not in self._batches:
            # One batch for all models, so that its values are computed once.
            if (num_sequences, seed) not in self._ragged_batches:
                self._ragged_batches[num_sequences, seed] = make_ragged_batch(
                    num_sequences=num_sequences, seed=seed
                )
            batch = self._prescribe_experts(self._ragged_batches[num_sequences, seed], model=model)
            # With old log-probs or values that differ much from the model's, losses would clip most
            # tokens, which then have no gradient.
            self._batches[key] = add_training_columns(
                batch,
                logprobs=self.get_outputs(self.make_setup(model), batch, HeadOutput.LOGPROB),
                values=self.get_outputs(self.make_setup(VALUE), batch, HeadOutput.VALUE),
                seed=seed,
            )
        return self._batches[key]

    def get_batch_of(
        self,
        lengths: tuple[int, ...],
        *,
        prompt_length: int,
        are_pairs: bool = True,
        model: TinyModel = QWEN2_GROUPED,
    ) -> SequenceBatch:
        """Return a mini-batch with sequences of these lengths, and training columns."""
        key = (model.name, lengths, prompt_length, are_pairs)
        if key not in self._batches:
            batch = self._prescribe_experts(
                make_batch(lengths, prompt_length=prompt_length, are_pairs=are_pairs), model=model
            )
            self._batches[key] = add_training_columns(
                batch, logprobs=self.get_outputs(self.make_setup(model), batch, HeadOutput.LOGPROB)
            )
        return self._batches[key]

    def _prescribe_experts(self, batch: SequenceBatch, *, model: TinyModel) -> SequenceBatch:
        """Add the experts that the oracle chooses, if this cache prescribes them."""
        if not self.prescribes_experts:
            return batch
        experts = self.get_outputs(self.make_setup(model), batch, HeadOutput.ROUTED_EXPERTS)
        return batch.with_columns({ROUTED_EXPERTS: experts.to(torch.int16)})

    def get_outputs(
        self, setup: EngineSetup, batch: SequenceBatch, head_output: HeadOutput
    ) -> Tensor:
        """Return one head output of the oracle's forward pass."""
        key = (setup, head_output, id(batch))
        if key not in self._outputs:
            outputs = measure_outputs(
                self.rank, setup=setup, batch=batch, requested_outputs=[head_output]
            )
            self._outputs[key] = outputs.columns[head_output], batch
        return self._outputs[key][0]

    def get_update(self, setup: EngineSetup, objective: Objective, batch: SequenceBatch) -> Update:
        """Return the oracle's update on the full mini-batch in one micro-batch."""
        # Use the id, because batches contain tensors, which are not hashable by value.
        key = (setup, repr(objective), id(batch))
        if key not in self._updates:
            update = measure_update(self.rank, setup=setup, objective=objective, batch=batch)
            self._updates[key] = update, batch
        return self._updates[key][0]

    def run(self, job: Job[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run any job on the oracle."""
        try:
            return job(self.rank, *args, **kwargs)
        finally:
            self.rank.close_temporary_engines()


def model_with_head_for(objective: Objective) -> TinyModel:
    """Return the tiny model with the head that an objective needs."""
    return VALUE if HeadOutput.VALUE in objective.required_outputs else QWEN2_GROUPED
