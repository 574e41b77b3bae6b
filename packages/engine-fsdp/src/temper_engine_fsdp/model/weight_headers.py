"""Compare the headers of weight files with the model, without reading weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.model.huggingface_model import check_loading_report
from temper_engine_fsdp.model.weight_names import find_model_files


def check_weight_headers(hf: PreTrainedModel, *, spec: ModelSpec) -> None:
    """Check that a directory's weights have the model's names and shapes.

    Directories without safetensors files are not checked, because other formats have no header.

    Args:
        hf: The model, which may be on the meta device.
        spec: Its path and type.

    Raises:
        WeightError: In the words of `build_model`, if names or shapes differ.
        CapabilityError: If weights have a quantization that cannot be undone.
    """
    files = find_model_files(spec)
    if spec.path is None or files is None:
        return
    weights = {
        name: torch.empty(shape, device="meta") for name, shape in files.read_shapes().items()
    }
    with _quiet_transformers():
        # transformers itself compares, because it renames and joins the tensors of many models.
        _, report = type(hf).from_pretrained(
            None,
            config=hf.config,
            state_dict=weights,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    has_new_head = spec.model_type != "language_model"
    check_loading_report(spec.path, report, has_new_head=has_new_head)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the progress bar and the table of differences, which the exception describes."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
