"""An OpenAI-compatible endpoint on loopback that does what the completion says."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "key-of-the-judge-123"


class JudgeServer(ThreadingHTTPServer):
    """Server that counts its requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.attempts: Counter[str] = Counter()
        """Requests by the text that was judged."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        """Authorization headers of all requests."""
        self.times: list[float] = []
        self.num_active = 0
        self.max_active = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JudgeServer

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._send(
            200, json.dumps({"object": "list", "data": [{"id": "judge", "object": "model"}]})
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"].rpartition("Answer: ")[2]
        with self.server.lock:
            self.server.attempts[text] += 1
            self.server.bodies.append(body)
            self.server.keys.add(self.headers["Authorization"])
            self.server.times.append(time.monotonic())
            attempt = self.server.attempts[text]
            self.server.num_active += 1
            self.server.max_active = max(self.server.max_active, self.server.num_active)
        try:
            self._answer(text, attempt=attempt)
        finally:
            with self.server.lock:
                self.server.num_active -= 1

    def _answer(self, text: str, *, attempt: int) -> None:
        action, _, argument = text.partition(" ")
        match action:
            case "hang":
                time.sleep(float(argument))
                self._send_completion("Score: 0.5")
            case "drip":  # never silent for long enough to time out while reading
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                for _ in range(100):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.1)
            case "busy" if attempt == 1:
                self._send(429, '{"error": {"message": "slow down"}}', retry_after="0.3")
            case "flaky" if attempt == 1:
                self._send(500, "oops")
            case "cut" if attempt == 1 or argument == "always":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.close_connection = True
            case "broken":
                self._send(503, "oops")
            case "refuse":
                self._send(401, json.dumps({"error": {"message": f"wrong key {KEY}"}}))
            case "page":
                self._send(200, "<html>a proxy</html>", content_type="text/html")
            case "malformed":
                self._send(200, '{"choices": [{"mess')
            case "shapeless":
                self._send(200, '{"choices": null}')
            case "empty":
                self._send_completion("", finish_reason="length")
            case "say":
                self._send_completion(argument)
            case _:
                self._send_completion("Score: 0.5")

    def _send_completion(self, content: str, *, finish_reason: str = "stop") -> None:
        choice = {
            "index": 0,
            "finish_reason": finish_reason,
            "message": {"role": "assistant", "content": content},
        }
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge"}
        self._send(200, json.dumps({**answer, "choices": [choice], "usage": usage}))

    def _send(
        self,
        status: int,
        body: str,
        *,
        content_type: str = "application/json",
        retry_after: str | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body.encode())))
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(body.encode())


@contextmanager
def serve_judge() -> Iterator[JudgeServer]:
    """Serve until the body ends."""
    with JudgeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
