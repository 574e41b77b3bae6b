"""Helper functions of the old package that scripts for data and evaluation import.

They are about files, tokenizers and padding.

They give the old results for the same arguments. Remote paths (``hdfs://...``) go through fsspec.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from temper_legacy_shim.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_REMOTE = "hdfs://"
_CACHE = "~/.cache/temper-legacy-shim"
Truncation = Literal["left", "right", "middle", "error"]


def exists(path: str) -> bool:
    """Check if a local or remote path exists."""
    if not path.startswith(_REMOTE):
        return Path(path).exists()
    files, inner = _remote(path)
    return bool(files.exists(inner))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False) -> None:
    """Create a folder with parents; a remote folder may already exist."""
    if not name.startswith(_REMOTE):
        os.makedirs(name, mode=mode, exist_ok=exist_ok)
        return
    files, inner = _remote(name)
    files.makedirs(inner, exist_ok=True)


def copy(src: str, dst: str, **kwargs: Any) -> str | bool:
    """Copy a file or a folder; returns where it is, or True if a side is remote."""
    sides = src.startswith(_REMOTE), dst.startswith(_REMOTE)
    if not any(sides):
        copied = (
            shutil.copytree(src, dst, **kwargs)
            if Path(src).is_dir()
            else shutil.copy(src, dst, **kwargs)
        )
        return str(copied)
    files, inner = _remote(dst if sides[1] else src)
    if all(sides):
        files.copy(_remote(src)[1], inner, recursive=True)
    elif sides[1]:
        files.put(src, inner, recursive=True)
    else:
        files.get(inner, dst, recursive=True)
    return True


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    **ignored: Any,
) -> str:
    """Return a local path: the path itself, or that of a download.

    Args:
        src: Local path, name on a hub, or remote path.
        cache_dir: Takes downloads.
        filelock: No effect: each process downloads to a separate folder.
        verbose: Log downloads.
        ignored: Further arguments of later releases.
    """
    if not src.startswith(_REMOTE):
        return src
    target = (
        Path(cache_dir or _CACHE).expanduser()
        / str(os.getpid())
        / src.rstrip("/").rpartition("/")[2]
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    if verbose:
        logger.warning("downloading %s to %s", src, target)
    if not target.exists():
        copy(src, str(target))
    return str(target)


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> Any:
    """Load a tokenizer, with the end-of-text token for padding if it has none.

    Args:
        name_or_path: As transformers takes it.
        correct_pad_token: Whether to set a missing padding token.
        correct_gemma2: Whether gemma-2-2b-it ends at its end of turn.
        kwargs: Of ``AutoTokenizer.from_pretrained``.
    """
    from transformers import AutoTokenizer

    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        kwargs |= {"eos_token": "<end_of_turn>", "eos_token_id": 107}
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if correct_pad_token and tokenizer.pad_token_id is None:
        warnings.warn(
            f"the tokenizer has no padding token: {tokenizer.eos_token!r} is used", stacklevel=2
        )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """Return positions over the tokens of a mask [B, L]; padding before them has 0."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Pad the last dimension to a length; a longer tensor stays as it is."""
    from torch.nn.functional import pad

    missing = max(max_seq_len - tensors.shape[-1], 0)
    return pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Truncation = "error",
) -> tuple[Tensor, Tensor]:
    """Pad or cut token IDs and mask [B, L] to a fixed length.

    Raises:
        NotImplementedError: They are longer, and truncation is error.
    """
    length = input_ids.shape[-1]
    if length <= max_length:
        return pad_sequence_to_length(
            input_ids, max_length, pad_token_id, left_pad
        ), pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    if truncation == "error":
        raise NotImplementedError(
            f"a sequence has {length} tokens, but max_length is {max_length}: raise it, or set "
            "truncation."
        )
    start = {"left": max_length, "right": 0, "middle": max_length - max_length // 2}.get(truncation)
    if start is None:
        raise NotImplementedError(
            f"truncation is {truncation!r}, but must be left, right, middle or error."
        )
    head = max_length - start

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, [*range(head), *range(length - start, length)]]

    return cut(input_ids), cut(attention_mask)


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: Any,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Truncation = "error",
) -> tuple[Tensor, Tensor]:
    """Tokenize a text, then pad or cut it: token IDs and mask [1, L]."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"],
        encoded["attention_mask"],
        max_length,
        pad_token_id,
        left_pad,
        truncation,
    )


def collate_fn(data_list: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Stack the tensors of rows, and collect other values in object arrays."""
    import numpy as np
    import torch

    columns: dict[str, list[Any]] = {}
    for row in data_list:
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    out: dict[str, Any] = {}
    for key, values in columns.items():
        if isinstance(values[0], torch.Tensor):
            out[key] = torch.stack(values)
        else:
            out[key] = np.empty(len(values), dtype=object)
            out[key][:] = values
    return out


def _remote(path: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(
            f"{path} is a remote path, which needs fsspec: pip install fsspec."
        ) from error
    files, inner = url_to_fs(path)
    return files, str(inner)
