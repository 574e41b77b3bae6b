"""Compute log-probs of given tokens with vLLM, for several model directories in one process.

    python tools/vllm_logprobs.py JOBS.json

Runs in an environment with vLLM, which needs nothing else of this repository; see
`tools/vllm_families.py`. JOBS has a list of objects with `folder`, `rows` of token ids, `dtype`,
and `has_encoder`. Prints the versions as a line of JSON, and then for each job a line with
`logprobs` of all tokens but the first of a row, or with the `error` of vLLM.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def declare_operators_of_torchvision() -> None:
    """Let torchvision be imported next to another build of torch, without its operators.

    PyPI has no torchvision for CPUs. vLLM imports it for models with an encoder of images.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    import torch

    with contextlib.suppress(RuntimeError):
        importlib.import_module("torchvision")
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", signature)
    importlib.import_module("torchvision")


def compute_logprobs(job: Mapping[str, Any]) -> list[float]:
    """Return the log-probs of all tokens but the first of a job's rows."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    arguments: dict[str, Any] = {"language_model_only": True} if job["has_encoder"] else {}
    try:
        llm = LLM(
            model=job["folder"],
            dtype=job["dtype"],
            enforce_eager=True,
            enable_chunked_prefill=False,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=128,
            max_num_seqs=16,
            skip_tokenizer_init=True,
            generation_config="vllm",
            # The kernels of linear attention for CPUs need their state in float32.
            mamba_ssm_cache_dtype="float32",
            **arguments,
        )
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": row} for row in job["rows"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [
            by_token[token].logprob
            for row, output in zip(job["rows"], outputs, strict=True)
            for by_token, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)
        ]
    finally:
        cleanup_dist_env_and_memory()


def main(jobs_path: Path) -> None:
    """Run the jobs, and print the result of each when it is there."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # vLLM prints too; what it prints goes to stderr.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    versions = {name: version(name) for name in ("torch", "transformers")}
    print(
        json.dumps({"vllm": importlib.import_module("vllm").__version__, **versions}), file=output
    )
    for job in json.loads(jobs_path.read_text()):
        try:
            result: dict[str, object] = {"logprobs": compute_logprobs(job)}
        except Exception as error:  # noqa: BLE001  # the exception is the result for this model
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=output, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
