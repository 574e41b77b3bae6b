"""Weights in the safetensors files of a model directory, dequantized while they are read.

The caller passes the function that opens a file, because engine-api works without safetensors.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from temper_engine_api.errors import CapabilityError, WeightError

INDEX_NAME = "model.safetensors.index.json"
"""Index that maps each tensor to its safetensors file."""

_FP8_DTYPES = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
_SCALE, _ACTIVATION_SCALE = "_scale_inv", ".activation_scale"
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of OCP's E2M1 format by the lower three of its four bits; the highest bit is the sign."""
_EXPONENT_BIAS = 127
"""Bias of E8M0, the format of MXFP4's scales."""


def drop_quantization(config: Any) -> bool:
    """Remove the quantization from a Hugging Face config, because `ModelFiles` dequantizes weights.

    With the entry, transformers would build FP8 layers on some GPUs and dequantize elsewhere.

    Returns:
        True if the config had a quantization.

    Raises:
        CapabilityError: If `ModelFiles` cannot dequantize such weights.
    """
    is_quantized = False
    for section in (config, config.get_text_config(decoder=True)):
        settings = vars(section).get("quantization_config")
        if settings:
            _check_method(settings)
            is_quantized = True
        if "quantization_config" in vars(section):
            del section.quantization_config
    return is_quantized


def _check_method(settings: Mapping[str, Any]) -> None:
    method = settings.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise CapabilityError(
            f"quantization_config.quant_method of the model is {method!r}, but weights can only be "
            "dequantized from fp8 and mxfp4: convert the weights to bf16, and remove "
            "quantization_config from config.json."
        )


class ModelFiles(Mapping[str, Path]):
    """Maps each weight to its file.

    The weights have the names, shapes and values of a model without quantization. In the files, an
    FP8 weight also has a tensor of scales, `NAME_scale_inv`. An MXFP4 weight, which holds all
    experts of a layer, is stored as `NAME_blocks` and `NAME_scales`.
    """

    def __init__(self, folder: str | Path, *, open_file: Callable[..., Any]) -> None:
        """Read which tensors the files have.

        Args:
            folder: Model directory. Without safetensors files, the mapping is empty.
            open_file: `safetensors.safe_open`.

        Raises:
            CapabilityError: If the quantization of the weights is not supported.
        """
        self.folder = Path(folder)
        self._open_file = open_file
        self._settings = _read_quantization(self.folder)
        if self._settings:
            _check_method(self._settings)
        self._tensors = _find_tensors(self.folder, open_file=open_file)
        # For each weight, the tensors in the files from which it is computed.
        self._sources: dict[str, tuple[str, ...]] = {}
        for name in self._tensors:
            if not self._is_scale(name):
                self._sources |= self._find_sources(name)

    @property
    def is_quantized(self) -> bool:
        """True if config.json says that weights are quantized."""
        return bool(self._settings)

    def _is_scale(self, name: str) -> bool:
        """Return True if a tensor holds scales, not a weight."""
        if self._settings.get("quant_method") == "mxfp4":
            return name.removesuffix(_BLOCK_SCALES) + _BLOCKS in self._tensors
        return self.is_quantized and name.endswith((_SCALE, _ACTIVATION_SCALE))

    def _find_sources(self, name: str) -> dict[str, tuple[str, ...]]:
        """Return a tensor's weight, mapped to the tensors from which the weight is computed."""
        method = self._settings.get("quant_method")
        if method == "mxfp4" and name.endswith(_BLOCKS):
            weight = name.removesuffix(_BLOCKS)
            return {weight: (name, weight + _BLOCK_SCALES)}
        has_scales = method == "fp8" and name + _SCALE in self._tensors
        return {name: (name, name + _SCALE) if has_scales else (name,)}

    def __getitem__(self, name: str) -> Path:
        """Return the file of a weight."""
        return self._tensors[self._sources[name][0]]

    def __iter__(self) -> Iterator[str]:
        """Iterate over names of weights."""
        return iter(self._sources)

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self._sources)

    def read_shapes(self) -> dict[str, torch.Size]:
        """Return the shape of each weight, from the headers of the files.

        Raises:
            WeightError: If a file or a tensor is missing, or an FP8 weight has no scales.
        """
        shapes = {}
        with self._open() as get_file:
            for name, sources in self._sources.items():
                for source in sources:
                    header = get_file(source).get_slice(source)
                    if source == sources[0]:
                        dtype = header.get_dtype()
                        self._check_format(
                            name,
                            is_fp8=dtype.startswith("F8_"),
                            is_integer=dtype.startswith(("I", "U")),
                        )
                        shape = header.get_shape()
                if sources[0] != name:
                    experts, rows, groups, group_bytes = shape
                    shape = (experts, groups * group_bytes * 2, rows)
                shapes[name] = torch.Size(shape)
        return shapes

    @contextmanager
    def open(self) -> Iterator[Callable[[str], Tensor]]:
        """Open the files; yields a function that reads a weight by its name.

        Dequantized weights are float32; others have the dtype of the file.
        """
        with self._open() as get_file:
            yield lambda name: self._read(name, get_file=get_file)

    @contextmanager
    def _open(self) -> Iterator[Callable[[str], Any]]:
        # Open each file once: opening parses its header, and a layer may have hundreds of experts.
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}

            def get_file(tensor: str) -> Any:
                if tensor not in self._tensors:
                    raise WeightError(
                        f"the weights in {self.folder} have no {tensor}: copy or download the "
                        "directory again."
                    )
                path = self._tensors[tensor]
                if path not in opened:
                    opened[path] = stack.enter_context(self._open_file(path, framework="pt"))
                return opened[path]

            yield get_file

    def _read(self, name: str, *, get_file: Callable[[str], Any]) -> Tensor:
        first, *others = (
            get_file(source).get_tensor(source) for source in self._sources.get(name, (name,))
        )
        if not others:
            self._check_format(
                name,
                is_fp8=first.dtype in _FP8_DTYPES,
                is_integer=not (first.is_floating_point() or first.dtype == torch.bool),
            )
            weight: Tensor = first
            return weight
        if first.dtype == torch.uint8:
            return dequantize_mxfp4(first, others[0])
        try:
            return dequantize_fp8(
                first, others[0], block_size=self._settings.get("weight_block_size")
            )
        except ValueError as error:
            raise WeightError(f"{name} in {self.folder} cannot be dequantized: {error}.") from error

    def _check_format(self, name: str, *, is_fp8: bool, is_integer: bool) -> None:
        """Raise WeightError if a tensor holds a quantized weight without its scales."""
        # Buffers may be integers.
        if is_integer and name.endswith("weight"):
            raise WeightError(
                f"{name} in {self.folder} has integers, so it is quantized in a format that cannot "
                "be dequantized: convert the weights to bf16."
            )
        if is_fp8 and len(self._sources[name]) == 1:
            raise WeightError(
                f"{name} in {self.folder} is FP8, but has no scales in {name}{_SCALE}, or "
                "config.json has no quantization_config: copy or download the directory again, or "
                "convert the weights to bf16."
            )


def dequantize_fp8(
    weight: Tensor, scales: Tensor, *, block_size: Sequence[int] | None = None
) -> Tensor:
    """Multiply an FP8 weight with its scales.

    transformers takes the block size from the number of scales instead. That is wrong if the last
    block is smaller, as in the latent attention of DeepSeek-V3.

    Args:
        weight: [..., R, C] FP8.
        scales: One scale, or one for each block: [..., ceil(R / rows), ceil(C / columns)].
        block_size: Rows and columns of a block.

    Returns:
        [..., R, C] float32.

    Raises:
        ValueError: If the shape or dtype of the scales does not fit.
    """
    if not scales.is_floating_point():
        raise ValueError(f"its scales are {scales.dtype}, but must be floating point")
    if scales.numel() == 1:
        return weight.float() * scales.float().reshape(())
    rows, columns = block_size or (1, 1)
    expected = (*weight.shape[:-2], -(-weight.shape[-2] // rows), -(-weight.shape[-1] // columns))
    if scales.shape != expected:
        raise ValueError(
            f"its shape is {list(weight.shape)}, which does not fit scales of shape "
            f"{list(scales.shape)} for blocks of {rows} x {columns}"
        )
    factors = scales.float().repeat_interleave(rows, dim=-2)[..., : weight.shape[-2], :]
    factors = factors.repeat_interleave(columns, dim=-1)[..., : weight.shape[-1]]
    return weight.float() * factors


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack an MXFP4 weight, which holds all experts of a layer.

    Args:
        blocks: [E, N, G, 16] uint8: two values in each byte, the first in the lower bits.
        scales: [E, N, G] uint8: the exponent of each group of 32 values, plus 127.

    Returns:
        [E, 32 G, N] float32: the layout of weights that are not quantized.
    """
    table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    experts, rows, groups, group_bytes = blocks.shape
    weights = torch.empty(experts, groups * group_bytes * 2, rows)
    # One expert at a time: the indices take eight bytes for each value.
    for weight, packed, exponents in zip(weights, blocks, scales, strict=True):
        values = table[torch.stack([packed & 0xF, packed >> 4], dim=-1).long()].flatten(-2)
        scaled = torch.ldexp(values, exponents.int()[..., None] - _EXPONENT_BIAS)
        weight.copy_(scaled.flatten(-2).T)
    return weights


def _read_quantization(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    config = json.loads(path.read_text())
    sections = (config, config.get("text_config") or {})
    return next(filter(None, (section.get("quantization_config") for section in sections)), {})


def _find_tensors(folder: Path, *, open_file: Callable[..., Any]) -> dict[str, Path]:
    """Return the safetensors file of every tensor; empty if there are none."""
    index, single = folder / INDEX_NAME, folder / "model.safetensors"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    if not single.is_file():
        return {}
    with open_file(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
