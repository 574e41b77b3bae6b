"""Run one of two ranks; the second one never trains: python wait_as_rank.py FILE.

The first rank writes its error message to FILE, and to FILE.begun the unfinished collective that
torch's flight recorder reported while it waited.
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.errors import CollectiveTimeoutError
from temper_engine_api.specs import ModelSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.runtime.collective_tracer import find_unfinished_collective

ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def log_started_stages(file: Path, is_over: threading.Event) -> None:
    """Write the unfinished collective to a file once it is the same for a second.

    A busy host may take long to reach it.
    """
    before, begun = "", find_unfinished_collective()
    while (begun == "a collective" or begun != before) and not is_over.wait(1.0):
        before, begun = begun, find_unfinished_collective()
    file.write_text(begun)


def main(file: Path) -> None:
    """Start an engine; train, or sleep until killed."""
    engine = FSDPEngine(
        FSDPConfig(
            model=ModelSpec(architecture=ARCHITECTURE),
            precision=PrecisionSpec(compute="fp32"),
            device="cpu",
            collective_timeout_s=15.0,
        )
    )
    engine.init_model()
    engine.set_loss_fn(SftProbe())
    if os.environ["RANK"] == "1":
        time.sleep(600)
    batch = from_sequences([torch.arange(9)] * 2, loss_masks=[torch.arange(9) >= 2] * 2)
    is_over = threading.Event()
    teller = threading.Thread(target=log_started_stages, args=(file.with_suffix(".begun"), is_over))
    teller.start()
    try:
        with engine.train_mode():
            engine.forward_backward_batch(
                engine.shard_data(batch, max_tokens=64), forward_only=False
            )
    except CollectiveTimeoutError as error:
        file.write_text(str(error))
    finally:
        # Waited for: a thread that is inside torch when the interpreter ends takes the process down
        # with it.
        is_over.set()
        teller.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Without the interpreter's teardown: gloo's threads still wait for the rank that never came,
    # and on a busy machine torch then aborts ("terminate called without an active exception").
    os._exit(0)
