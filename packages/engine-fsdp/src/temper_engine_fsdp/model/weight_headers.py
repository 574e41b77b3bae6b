"""Compare the headers of weight files with the model, without reading weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.model.huggingface_model import check_loading_report
from temper_engine_fsdp.model.streaming_load import find_model_files


def check_weight_headers(hf: PreTrainedModel, *, spec: ModelSpec) -> None:
    """Check that a directory's weights have the model's names and shapes.

    Directories without safetensors files are not checked, because other formats have no header.

    Args:
        hf: The model, which may be on the meta device.
        spec: Its path and type.

    Raises:
        WeightError: In the words of `build_model`, if names or shapes differ.
    """
    files = find_model_files(spec)
    if spec.path is None or not files:
        return
    weights = _read_as_meta_tensors(files)
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


def _read_as_meta_tensors(files: dict[str, Path]) -> dict[str, Tensor]:
    """Return a tensor without memory for each name, in the shape that its file's header has."""
    tensors = {}
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if files.get(name) == path:
                    shape = file.get_slice(name).get_shape()
                    tensors[name] = torch.empty(shape, device="meta")
    return tensors


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
