"""An MCP server over its standard input and output, made with the package's own classes."""

import os
import subprocess
import time
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("tests")
calls = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Return the sum of two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """Return how often the tool was called in this process."""
    global calls
    calls += 1
    return str(calls)


@server.tool()
def measure(text: str) -> str:
    """Return the number of characters of a text."""
    return str(len(text))


@server.tool()
def hang(file: str) -> str:
    """Start a program, write the ids of both processes into a file, and never return."""
    program = subprocess.Popen(["sleep", "600"])
    Path(f"{file}.partial").write_text(f"{os.getpid()} {program.pid}")
    Path(f"{file}.partial").rename(file)
    time.sleep(600)
    return ""


@server.tool()
def crash() -> str:
    """End the process."""
    os._exit(1)


if __name__ == "__main__":
    server.run("stdio")
