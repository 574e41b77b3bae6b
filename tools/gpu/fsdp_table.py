"""Format the rows of `engine_fsdp`: speed by number of GPUs, disagreements and failures."""

import math
from collections.abc import Iterable, Mapping

import torch
import transformers

Row = Mapping[str, object]


def format_table(rows: list[dict[str, object]]) -> str:
    """Format the rows as text: speed first, failures last."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        f"torch {torch.__version__}, transformers {transformers.__version__}, {device}",
        *_format_speeds(rows),
        "",
    ]
    lines += [
        "  ".join(f"{key}={value}" for key, value in row.items())
        for row in rows
        if row["job"] != "update"
    ]
    failed = [f"not ok: {row}" for row in rows if row.get("ok") is False] + find_disagreements(rows)
    return "\n".join([*lines, *failed, f"{len(failed)} failures"])


def _format_speeds(rows: Iterable[Row]) -> list[str]:
    updates = [row for row in rows if row["job"] == "update"]
    speed = {
        (row["shape"], row["contender"], row["world_size"]): _get_number(row, "tokens_per_s")
        for row in updates
    }
    heads = (
        "shape",
        "contender",
        "GPUs",
        "tok/s/GPU",
        "of one GPU",
        "of plain",
        "MFU",
        "imbalance",
        "exposed comm. ms",
        "idle ms",
        "GiB",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in sorted(
        updates,
        key=lambda row: (str(row["shape"]), str(row["contender"]), _get_number(row, "world_size")),
    ):
        single_gpu = speed.get((row["shape"], row["contender"], 1), math.nan)
        plain = speed.get((row["shape"], "plain, compiled", row["world_size"]), math.nan)
        rate = _get_number(row, "tokens_per_s")
        cells = (
            row["shape"],
            row["contender"],
            row["world_size"],
            f"{rate:.0f}",
            f"{rate / single_gpu:.3f}",
            f"{rate / plain:.3f}",
            row["mfu"],
            row["imbalance"],
            row.get("exposed_communication_ms"),
            row.get("idle_ms"),
            row["peak_gib"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _get_number(row: Row, key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float)
    return float(value)


def find_disagreements(rows: Iterable[Row]) -> list[str]:
    """Report gradient norms that differ from the first row of the same job and compute dtype.

    Rows are compared with the one on the fewest ranks. Only the first updates are compared, because
    rounding differences grow with every update: three updates in fp32, two in bf16 and fp16.
    """
    messages = []
    first: dict[tuple[object, object], list[float]] = {}
    for row in sorted(
        (r for r in rows if r["job"] in ("ranks", "strategies") and "norms" in r),
        key=lambda r: _get_number(r, "world_size"),
    ):
        norms = row["norms"]
        assert isinstance(norms, list)
        reference = first.setdefault((row["job"], row["compute"]), norms)
        limit, count = (1e-4, 3) if row["compute"] == "fp32" else (2e-2, 2)
        if any(
            not math.isclose(a, b, rel_tol=limit)
            for a, b in zip(norms[:count], reference[:count], strict=True)
        ):
            messages.append(
                f"{row.get('case', '')} {row['compute']} at {row['world_size']} ranks: "
                f"norms {norms}, expected {reference}"
            )
    return messages
