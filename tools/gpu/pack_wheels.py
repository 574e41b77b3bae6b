r"""Pack wheels for a GPU host without network, leaving out what the host has.

On the host, write a list of its packages:

    python3 -m pip list --format=freeze > host.txt

On a computer with network, pack what the measurements need, here vLLM 0.26.0 for torch 2.11.0:

    python -m tools.gpu.pack_wheels --host host.txt --python 3.12 --out vllm --part-mb 43 \
        --skip flashinfer-python,tilelang,torchcodec,pynvvideocodec,nvidia-cutlass-dsl,\
quack-kernels,fastsafetensors,tokenspeed-mla,humming-kernels,nvidia-cudnn-frontend,mistral-common,\
lm-format-enforcer,outlines-core,depyf \
        vllm==0.26.0 apache-tvm-ffi==0.1.15.post2
    python -m tools.gpu.pack_wheels --host host.txt --python 3.12 --out others \
        --bare megatron-core,megatron-bridge,trl,torchao,datasets \
        hydra-core==1.3.8 antlr4-python3-runtime==4.9.3 blake3 cattrs msgspec filelock ray==2.60.0 \
        torchao==0.18.0 trl==1.16.0 datasets dill multiprocess megatron-core==0.16.1 \
        megatron-bridge==0.3.1

On the host, unpack them; nothing is installed:

    mkdir vllm-site && cat wheels.tar.xz.part* | tar -xJ -C vllm-site
    PYTHONPATH=vllm-site python3 -c "import vllm"

The first command gives 85 MB, the second 38 MB. Downloads are recursive. Versions of the host's
packages are not checked, because vLLM pins more of them than it needs; only a run shows whether
they will do. vLLM's own pin of apache-tvm-ffi breaks xgrammar. `--skip` leaves out requirements,
here kernels and formats that the runs do not use; `PRUNED` leaves out files, such as kernels of
350 MB that runs of dense models on H100s and H200s do not call. Models with experts need
`vllm/_moe_C_*.so`, which gives 40 MB. Keep vLLM apart from the trainer's packages: a
script that sets PYTHONPATH and starts Python serves as `runtime.rollout_python`.
"""

import argparse
import fnmatch
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

PRUNED = (
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_flashmla*.so",
    "vllm/_moe_C_*.so",
    "vllm/_qutlass_C.abi3.so",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/flashmla/*",
    "ray/jars/*",
    "ray/thirdparty_files/*/*.so.dbg",
)
"""Patterns of files that are left out."""
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""Minor versions of glibc whose platform tags pip should accept; it matches them exactly."""
MIB = 1 << 20


def download(requirement: str, *, python: str, folder: Path) -> Path:
    """Download the newest wheel that satisfies a requirement; return its path."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    before = set(folder.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    command += [argument for name in platforms for argument in ("--platform", name)]
    result = subprocess.run([*command, requirement], stderr=subprocess.DEVNULL, check=False)
    if result.returncode:
        # Without a wheel on the index, only a package in pure Python can be built here.
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
        subprocess.run([*command, requirement], check=True)
    name = canonicalize_name(Requirement(requirement).name)
    new = set(folder.glob("*.whl")) - before
    return next(p for p in [*new, *before] if parse_wheel_filename(p.name)[0] == name)


def read_requirements(wheel: Path, *, python: str) -> list[Requirement]:
    """Return what a wheel requires on Linux, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    host = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return [r for r in requirements if r.marker is None or r.marker.evaluate(host)]


def collect_wheels(
    requirements: Iterable[str],
    *,
    bare: frozenset[str],
    present: frozenset[str],
    python: str,
    folder: Path,
) -> list[Path]:
    """Download wheels and what they require, except packages that are present.

    Packages in `bare` are downloaded without their requirements.
    """
    waiting, wheels = list(requirements), list[Path]()
    # A requirement of the command line may be newer than the host's package.
    seen = set(present) - {canonicalize_name(Requirement(each).name) for each in waiting}
    while waiting:
        requirement = Requirement(waiting.pop(0))
        name = canonicalize_name(requirement.name)
        if name in seen:
            continue
        seen.add(name)
        wheel = download(f"{requirement.name}{requirement.specifier}", python=python, folder=folder)
        print(f"{wheel.stat().st_size / MIB:8.1f} MiB  {wheel.name}", flush=True)
        wheels.append(wheel)
        if name in bare:
            continue
        waiting += [f"{r.name}{r.specifier}" for r in read_requirements(wheel, python=python)]
    return wheels


def unpack(wheels: Iterable[Path], folder: Path) -> None:
    """Unpack wheels into one folder, without the files in PRUNED."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if not any(fnmatch.fnmatch(name, pattern) for pattern in PRUNED)
            ]
            for name in names:
                path = archive.extract(name, folder)
                # zipfile drops permissions, without which Ray cannot start its programs.
                if mode := archive.getinfo(name).external_attr >> 16:
                    os.chmod(path, mode)


def pack(folder: Path, target: Path, *, part_mb: int | None) -> None:
    """Pack a folder with xz, in parts of a size if one is given."""
    with tarfile.open(target, "w:xz") as archive:
        archive.add(folder, arcname=".")
    print(f"{target}: {target.stat().st_size / MIB:.1f} MiB")
    if part_mb is not None:
        prefix = f"{target}.part"
        subprocess.run(["split", "-b", f"{part_mb}M", "-d", str(target), prefix], check=True)


def main() -> None:
    """Download, prune and pack the wheels named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("requirements", nargs="+")
    parser.add_argument("--host", type=Path, required=True, help="output of pip list on the host")
    parser.add_argument("--python", default="3.12", help="Python version of the host")
    parser.add_argument("--skip", default="", help="comma-separated requirements to leave out")
    parser.add_argument(
        "--bare", default="", help="comma-separated packages to pack without their requirements"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part-mb", type=int, help="split the archive into parts of this size")
    options = parser.parse_args()
    lines = options.host.read_text().split() + options.skip.split(",")
    present = frozenset(canonicalize_name(line.split("==")[0]) for line in lines if line)
    folder = options.out / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    wheels = collect_wheels(
        options.requirements,
        bare=frozenset(options.bare.split(",")),
        present=present,
        python=options.python,
        folder=folder,
    )
    unpack(wheels, options.out / "site")
    pack(options.out / "site", options.out / "wheels.tar.xz", part_mb=options.part_mb)


if __name__ == "__main__":
    main()
