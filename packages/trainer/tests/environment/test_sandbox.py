"""Code in the sandbox: what it may, and what it may not."""

from pathlib import Path

import pytest

from temper_trainer.environment.sandbox import run_python


def test_what_is_printed_comes_back() -> None:
    result = run_python("import math\nprint(math.gcd(12, 18))", timeout_s=30.0, memory_mib=256)
    assert (result.output, result.is_failed, result.is_timeout) == ("6", False, False)


def test_an_error_is_its_last_line() -> None:
    result = run_python("print(1)\nprint(1 / 0)", timeout_s=30.0, memory_mib=256)
    assert result.output == "1\nZeroDivisionError: division by zero"
    assert result.is_failed


def test_a_loop_is_ended() -> None:
    assert run_python("while True: pass", timeout_s=1.0, memory_mib=256).is_timeout


@pytest.mark.parametrize(
    "code",
    [
        "open('left_behind', 'w').write('x')",
        "open('/etc/passwd').read()",
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import os; os.remove('/etc/hostname')",
    ],
)
def test_files_network_and_processes_are_refused(code: str, tmp_path: Path) -> None:
    result = run_python(code, timeout_s=30.0, memory_mib=256)
    assert result.is_failed
    assert "not allowed in the sandbox" in result.output
    assert not list(tmp_path.iterdir())


def test_memory_is_bounded() -> None:
    result = run_python("x = bytearray(1 << 30)", timeout_s=30.0, memory_mib=128)
    assert "MemoryError" in result.output
