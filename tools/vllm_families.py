"""Load the weights that engines export for each family in vLLM, and compare log-probs.

    TEMPER_ROLLOUT_PYTHON=PYTHON python -m tools.vllm_families [--torchvision DIR] [FAMILY ...]

PYTHON is the interpreter of an environment with vLLM. For families with an encoder of images it
also needs torchvision: there, or in DIR, to which `pip install --no-deps --target DIR torchvision`
writes it. Each family is the conformance kit's tiny model, with heads that vLLM's kernels for CPUs
take. Both engines update and export it, and their exports must have the same tensors. vLLM loads
them, and its log-probs of given tokens are compared with those of transformers in float32.

The results of the named families, by default all, are written to docs/records/vllm_families.json;
`python -m tools.family_table` then updates docs/models.md. The exit status is 1 if a family differs
too much, or no longer loads. A run of all families that was stopped continues.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from temper_engine_api.conformance.harness.rank import ADAMW, ONE_RANK
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.harness.tolerances import UPDATE, assert_all_close
from temper_engine_api.conformance.inputs.batches import make_ragged_batch
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.tiny_models import TinyModel, get_auto_class, has_experts
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_megatron.bridge_compat import TESTED_MODEL_TYPES
from temper_engine_megatron.huggingface.model_comparison import check_computes_alike

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path("docs/records/vllm_families.json")
STATE = Path(".temper/vllm_families.json")
"""Failures by family of a run of all families that was stopped."""
ENGINES = ("fsdp", "megatron")
FLOAT32_TOLERANCE = 1e-5
"""Allowed difference of log-probs from transformers where vLLM computes in float32, in nats.

In bf16 it is twice the difference of transformers in bf16: both round."""
ONLY_BF16 = frozenset(
    {"gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"}
)
"""Families for which vLLM has kernels for CPUs in bf16 only."""

_WIDE: Mapping[str, object] = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
}
# vLLM's kernels for CPUs do not take smaller heads.
_HEADS: Mapping[str, object] = {"head_dim": 32}
_LATENT_HEADS: Mapping[str, object] = {
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    # vLLM also takes it for the norms of latents, which have 1e-6 in transformers.
    "rms_norm_eps": 1e-6,
}
_WITHOUT_EXPERTS: Mapping[str, object] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]
}
"""Layers of a Nemotron-H for vLLM's build for CPUs, which refuses its experts without a gate."""
_PUBLISHED: Mapping[str, Mapping[str, object]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}
"""Fields of published files that vLLM reads, and that transformers no longer has."""
_LINEAR_HEADS: Mapping[str, object] = {
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_EXTENDED: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""The extended context of published gpt-oss models, whose fields vLLM always reads."""


def widen(family: str) -> TinyModel:
    """Return the family's tiny model with sizes that vLLM's kernels for CPUs take."""
    model = FAMILIES[family]
    heads = _HEADS
    if "kv_lora_rank" in model.architecture:
        heads = _LATENT_HEADS
    elif "linear_num_value_heads" in model.architecture:
        heads = _LINEAR_HEADS
    known = {**model.settings, **model.architecture}
    wide = {name: size for name, size in _WIDE.items() if name in known}
    fields = {**model.architecture, **wide, **heads}
    rope = fields.get("rope_parameters")
    if family == "nemotron_h":
        fields |= _WITHOUT_EXPERTS
    fields |= _PUBLISHED.get(family, {})
    if family == "gpt_oss":
        fields["rope_parameters"] = _EXTENDED
    elif isinstance(rope, Mapping) and "mrope_section" in rope:
        # Pairs of dimensions for time, height and width: 16 in a head of 32.
        fields["rope_parameters"] = {**rope, "mrope_section": [8, 4, 4]}
    return replace(model, name=f"{model.name}-wide", architecture=fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A family's model after an update."""

    folder: Path
    """Folder with the model as the engines export it."""
    engines: tuple[str, ...]
    """Engines that export these tensors."""


def export(families: Sequence[str], *, folder: Path) -> dict[str, Export]:
    """Let the engines update and export the families."""
    # Imported here, because tests of the kit need the markers of its plugin in a pytest session.
    from temper_engine_api.conformance.tests.test_family import export_around_update

    oracle = OracleCache(folder=folder)
    pool = RankPool(1, folder=folder, job_timeout_s=600.0)
    exports = {}
    try:
        for family in families:
            model = widen(family)
            setup = oracle.make_setup(model, optimizer=ADAMW)
            batch = oracle.get_batch(model=model)
            engines = ENGINES if family in TESTED_MODEL_TYPES else ENGINES[:1]
            if len(engines) > 1:
                # Here, where it may take long; the engine then finds its result.
                config = AutoConfig.from_pretrained(setup.model_path)
                check_computes_alike(config, collective_timeout_s=600.0)
            weights, *others = (
                pool.run(
                    export_around_update,
                    engine=engine,
                    layout=ONE_RANK,
                    arguments={"setup": setup, "batch": batch},
                )[0][1]
                for engine in engines
            )
            for other in others:
                assert_all_close(other, weights, UPDATE, quantity=f"weights of {family}")
            target = folder / family
            AutoConfig.from_pretrained(setup.model_path).save_pretrained(target)
            save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
            exports[family] = Export(folder=target, engines=engines)
    finally:
        pool.close()
    return exports


@torch.no_grad()
def compute_expected(folder: Path, rows: Sequence[Sequence[int]], *, dtype: str) -> Tensor:
    """Return transformers' log-probs of all tokens but the first of each row."""
    auto = get_auto_class(AutoConfig.from_pretrained(folder))
    model = auto.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
    logprobs = []
    for row in rows:
        tokens = torch.tensor(row)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        logprobs.append(logits.float().log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
    return torch.cat(logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmResult:
    """Log-probs of one model, or the error of vLLM."""

    versions: Mapping[str, str]
    logprobs: Sequence[float] = ()
    error: str = ""
    """vLLM's exception, if it did not compute log-probs."""


def run_vllm(
    jobs: Sequence[Mapping[str, object]], *, folder: Path, torchvision: str | None
) -> Iterator[VllmResult]:
    """Yield the result of each job from `tools/vllm_logprobs.py` in the environment of vLLM."""
    source = folder / "jobs.json"
    # Python imports sitecustomize at its start, also in the processes in which vLLM tries models.
    program = shutil.copy(ROOT / "tools" / "vllm_logprobs.py", folder)
    (folder / "sitecustomize.py").write_text(
        "from vllm_logprobs import declare_operators_of_torchvision as declare\ndeclare()\n"
    )
    paths = list(filter(None, [str(folder), torchvision, os.environ.get("PYTHONPATH")]))
    num_done = 0
    while num_done < len(jobs):
        source.write_text(json.dumps(jobs[num_done:]))
        with subprocess.Popen(
            [os.environ["TEMPER_ROLLOUT_PYTHON"], program, str(source)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            first_line = process.stdout.readline()
            versions: Mapping[str, str] = json.loads(first_line) if first_line else {}
            for line in process.stdout:
                yield VllmResult(versions=versions, **json.loads(line))
                num_done += 1
        if not versions:
            raise ValueError(f"vLLM's process ended with exit status {process.returncode}")
        if process.returncode:
            # It ended in the next job. Those after it run in another process.
            error = f"its process ended with status {process.returncode}"
            yield VllmResult(versions=versions, error=error)
            num_done += 1


def measure(
    families: Sequence[str], *, folder: Path, torchvision: str | None
) -> Iterator[tuple[Mapping[str, str], str, dict[str, Any]]]:
    """Yield versions, family, and its difference of log-probs or vLLM's error."""
    exports = export(families, folder=folder)
    batch = make_ragged_batch()
    rows = [tokens.tolist() for tokens in batch.tokens.split(batch.lengths.tolist())]
    dtypes = {name: "bfloat16" if name in ONLY_BF16 else "float32" for name in families}
    jobs = [
        {
            "folder": str(exports[family].folder),
            "rows": rows,
            "dtype": dtypes[family],
            "has_encoder": "vision_config" in FAMILIES[family].architecture,
        }
        for family in families
    ]
    results = run_vllm(jobs, folder=folder, torchvision=torchvision)
    for family, result in zip(families, results, strict=True):
        entry: dict[str, Any] = {"engines": exports[family].engines, "dtype": dtypes[family]}
        if result.error:
            entry["error"] = shorten_error(result.error)
        else:
            source = exports[family].folder
            expected = compute_expected(source, rows, dtype="float32")
            actual = torch.tensor(result.logprobs)
            is_median = dtypes[family] != "float32" and has_experts(FAMILIES[family])
            entry["difference"] = compare(actual, expected, is_median=is_median)
            if dtypes[family] != "float32":
                rounded = compute_expected(source, rows, dtype=dtypes[family])
                entry["rounding"] = compare(rounded, expected, is_median=is_median)
            if is_median:
                entry["is_median"] = True
        yield result.versions, family, entry


def compare(actual: Tensor, expected: Tensor, *, is_median: bool) -> float:
    """Return the mean difference of log-probs, or the median.

    Models with experts in bf16 are compared by the median. If two experts have close scores,
    rounding decides which one a token gets, and the log-probs change by more than one nat. vLLM and
    transformers round different tokens in this way. In gpt-oss, vLLM chooses other experts at 3 of
    72 tokens. Their mean difference is 1.9, so they decide the mean of all tokens, 0.15. If
    transformers in float32 uses the experts that vLLM chose, the mean difference is 0.040. The mean
    difference of transformers in bf16 is 0.045.
    """
    differences = (actual - expected).abs()
    return float(differences.median() if is_median else differences.mean())


def shorten_error(text: str) -> str:
    """Return the first line that says something, without paths of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:160].rstrip()


def list_failures(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each family that differs too much, or that loaded before."""
    failures = []
    for family, result in new.items():
        if "error" in result:
            if "difference" in old.get(family, {}):
                failures.append(f"{family} does not load any more: {result['error']}")
            continue
        allowed = 2 * result["rounding"] if "rounding" in result else FLOAT32_TOLERANCE
        if not result["difference"] <= allowed:
            failures.append(f"{family} differs by {result['difference']:.1e}")
    return failures


def main() -> int:
    """Measure the families and update the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--torchvision", metavar="DIR")
    chosen = parser.parse_args()
    failures = measure_missing(chosen.families, torchvision=chosen.torchvision, root=ROOT)
    print(*failures, f"updated {RECORD}", sep="\n", file=sys.stderr)
    return int(bool(failures))


def measure_missing(families: Sequence[str], *, torchvision: str | None, root: Path) -> list[str]:
    """Measure the families, or those that a run of all families has not measured yet.

    Returns:
        A sentence for each failure, those of the stopped run among them.
    """
    state, path = root / STATE, root / RECORD
    record = json.loads(path.read_text()) if path.exists() else {}
    old = record.get("families", {})
    failures = {}
    if not families and state.exists():
        failures = json.loads(state.read_text())
    missing = families or [family for family in FAMILIES if family not in failures]
    with tempfile.TemporaryDirectory() as folder:
        for versions, family, result in measure(
            missing, folder=Path(folder), torchvision=torchvision
        ):
            failures[family] = list_failures(old, {family: result})
            # Results of other versions do not belong next to these.
            kept = record["families"] if record.get("versions") == versions else {}
            record = {"versions": versions, "families": kept | {family: result}}
            path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
            if not families:
                state.parent.mkdir(exist_ok=True)
                state.write_text(json.dumps(failures))
    if not families:
        state.unlink()
    return [failure for part in failures.values() for failure in part]


if __name__ == "__main__":
    sys.exit(main())
