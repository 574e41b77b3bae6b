"""An MCP server over its standard input and output, made with the package's own classes."""

import os

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
def crash() -> str:
    """End the process."""
    os._exit(1)


if __name__ == "__main__":
    server.run("stdio")
