"""Compare the engine's fused log-prob head with a naive head, TRL's and verl's.

    python bench/bench_fused_logprob.py [--positions 1024] [--hidden 256] [--vocabulary 152000]
        [--repeats 3] [--json FILE] [--only NAME]

All contenders compute log-probs and entropies from hidden states, forward and backward: T
positions of H dimensions over a vocabulary of V, with an upstream gradient on every log-prob and
none on the entropy. Outputs and gradients are checked to be equal. Reports CPU-seconds of the best
repeat with one thread, and the peak of resident memory beyond the inputs. Each contender runs in a
separate process; contenders that cannot be imported are named.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_fsdp.model.token_logprobs import chunked_logprobs

CONTENDERS = ("naive", "TRL", "verl fused", "temper")
MIB = 1024
"""KiB per MiB."""

Contender = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps (hidden [T, H], weight [V, H], labels [T]) to (log-probs [T], entropies [T])."""


def make_naive() -> Contender:
    """Return a head that computes all logits at once, with plain autograd."""

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = (hidden @ weight.t()).float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, labels[:, None])[:, 0]
        with torch.no_grad():
            entropy = torch.logsumexp(logits, -1) - (torch.softmax(logits, -1) * logits).sum(-1)
        return logprobs, entropy

    return run


def make_trl() -> Contender:
    """Return TRL's pair of functions, which need all logits."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.t()
        with torch.no_grad():
            entropy = entropy_from_logits(logits)
        return selective_log_softmax(logits[None], labels[None])[0], entropy

    return run


def make_verl() -> Contender:
    """Return verl's chunked linear head for PPO with its default chunk size."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = FusedLinearForPPO()(
            hidden_states=hidden[None],
            vocab_weights=weight,
            input_ids=labels[None],
            temperature=1.0,
        )
        return logprobs[0], entropy[0].detach()

    return run


def make_temper() -> Contender:
    """Return the engine's chunked head."""

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        columns = chunked_logprobs(hidden, weight, labels, needs_entropy=True)
        return columns.logprob, columns.entropy

    return run


MAKERS: dict[str, Callable[[], Contender]] = {
    "naive": make_naive,
    "TRL": make_trl,
    "verl fused": make_verl,
    "temper": make_temper,
}


def read_status_kib(field: str) -> int:
    """Return a field of this process's memory status in KiB; works only on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure time, memory and checksums of one contender."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(options.precision)
    torch.manual_seed(0)
    contender = MAKERS[name]()
    weight = (torch.randn(options.vocabulary, options.hidden) * 0.05).requires_grad_()
    hidden = torch.randn(options.positions, options.hidden).requires_grad_()
    labels = torch.randint(0, options.vocabulary, (options.positions,))
    upstream = torch.randn(options.positions)
    # Libraries allocate thread pools and workspaces on first use, which would count as memory of
    # the contender.
    small = contender(
        torch.randn(8, options.hidden, requires_grad=True),
        weight[:64].detach().requires_grad_(),
        labels[:8] % 64,
    )
    small[0].sum().backward()
    # Writing 5 to clear_refs resets the peak that VmHWM reports.
    base = read_status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds = []
    for _ in range(options.repeats):
        hidden.grad = weight.grad = None
        start = time.process_time()
        logprobs, entropy = contender(hidden, weight, labels)
        (logprobs.float() * upstream).sum().backward()
        seconds.append(time.process_time() - start)
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "cpu_s": min(seconds),
        "peak_mib": (read_status_kib("VmHWM") - base) / MIB,
        "logprob_sum": float(logprobs.detach().double().sum()),
        "entropy_mean": float(entropy.double().mean()),
        "hidden_grad_norm": float(hidden.grad.double().norm()),
        "weight_grad_norm": float(weight.grad.double().norm()),
    }


def run_in_subprocess(
    name: str, options: argparse.Namespace, *, precision: str
) -> dict[str, float] | str:
    """Run one contender in a fresh process; return the reason if it cannot be imported."""
    command = [sys.executable, __file__, "--contender", name, "--precision", precision]
    for option in ("positions", "hidden", "vocabulary", "repeats"):
        command += [f"--{option}", str(getattr(options, option))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1]
        if "ModuleNotFoundError" in last or "ImportError" in last:
            return f"not installed ({last})"
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    row: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def check_equal(rows: dict[str, dict[str, float]]) -> None:
    """Check that all contenders computed the same numbers, up to float32 rounding."""
    expected = rows["naive"]
    for name, row in rows.items():
        for key in ("logprob_sum", "entropy_mean", "hidden_grad_norm", "weight_grad_norm"):
            assert abs(row[key] - expected[key]) <= 2e-5 * abs(expected[key]), (
                name,
                key,
                row[key],
                expected[key],
            )


def report(options: argparse.Namespace) -> dict[str, object]:
    """Run all contenders, print the table, and return the contents of the JSON file."""
    names = [options.only] if options.only else list(CONTENDERS)
    results: dict[str, dict[str, dict[str, float] | str]] = {}
    print(
        f"T={options.positions} H={options.hidden} V={options.vocabulary} float32, "
        "forward and backward, one thread"
    )
    for precision in ("highest", "medium"):
        results[precision] = {
            name: run_in_subprocess(name, options, precision=precision) for name in names
        }
        rows = {name: row for name, row in results[precision].items() if isinstance(row, dict)}
        if "naive" in rows:
            check_equal(rows)
        print(f'\nmatmul precision "{precision}"')
        print(
            f"{'contender':<12}{'CPU-s':>8}{'peak MiB':>10}"
            f"{'time / naive':>16}{'memory / naive':>16}"
        )
        for name, row in results[precision].items():
            if isinstance(row, str):
                print(f"{name:<12}{row}")
                continue
            reference = rows.get("naive", row)
            time_ratio, memory_ratio = (
                row["cpu_s"] / reference["cpu_s"],
                row["peak_mib"] / reference["peak_mib"],
            )
            print(
                f"{name:<12}{row['cpu_s']:>8.2f}{row['peak_mib']:>10.0f}"
                f"{time_ratio:>16.2f}{memory_ratio:>16.2f}"
            )
    machine = (
        f"{platform.machine()}, {platform.platform()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "options": vars(options),
        "results": results,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=CONTENDERS)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--precision", choices=("highest", "medium"), default="highest", help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.contender is not None:
        print(json.dumps(measure(options.contender, options)))
        return
    results = report(options)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
