"""Models are loaded by their names on the Hugging Face Hub: from its cache, or from a server."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from huggingface_hub import constants
from safetensors.numpy import save

from temper_trainer.__main__ import main
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.data.tokenizer import build_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_files() -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        word_level = TokenizerConfig(kind="word_level")
        build_tokenizer(word_level, model_path=None, texts=["one two"], directory=Path(folder))
        tokenizer = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    config = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 64}
    return tokenizer | {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": save({}),
        "adapter_config.json": b'{"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"]}',
        "onnx/model.safetensors": b"not wanted",
    }


class Hub(BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub for one model."""

    files = make_files()

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        headers: dict[str, str] = {}
        body, status = b"", 200
        model = "/api/models/acme/tiny"
        if path in (f"{model}/revision/main", f"{model}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": "acme/tiny", "sha": COMMIT, "siblings": siblings}).encode()
        elif path == f"{model}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(text), "oid": name.encode().hex()}
                for name, text in self.files.items()
            ]
            body = json.dumps(entries).encode()
        elif (name := path.removeprefix(f"/acme/tiny/resolve/{COMMIT}/")) in self.files:
            body = self.files[name]
            headers = {"ETag": f'"{name.encode().hex()}"', "X-Repo-Commit": COMMIT}
        else:
            status, headers = 404, {"X-Error-Code": "RepoNotFound"}
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def make_settings(folder: Path, name: str) -> list[str]:
    """Write rows of data, and return settings that read them and name a model."""
    (folder / "rows.jsonl").write_text('{"question": "one", "answer": "#### 1"}\n')
    return [
        *("experiment=quickstart", "warm_start=null", "run.dir=out"),
        *("~data.train", "~data.eval", "+data.train.name=jsonl", "+data.train.paths=[rows.jsonl]"),
        *("data.tokenizer.kind=pretrained", "~actor.engine.model.architecture"),
        f"actor.engine.model.path={name}",
    ]


def run(folder: Path, name: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Run temper-train with a name of a model; return the exit code and all output."""
    command = [
        *(sys.executable, "-m", "temper_trainer", *make_settings(folder, name), *arguments),
    ]
    environment = os.environ | {"HF_HOME": str(folder / "cache"), **variables}
    environment.pop("HF_HUB_OFFLINE" if "HF_HUB_OFFLINE" not in variables else "", None)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_model_of_a_server_is_downloaded_with_progress_and_then_found_in_the_cache(
    tmp_path: Path,
    endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The model has no weights, so the run ends after it has written its configuration.
    adapter = "actor.engine.lora.path=acme/tiny"
    code, output = run(tmp_path, "acme/tiny", adapter, HF_ENDPOINT=endpoint)
    assert code != 0
    assert "100%" in output
    engine = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["actor"]["engine"]
    assert engine["model"]["path"] == f"acme/tiny@{COMMIT}", output
    assert engine["lora"]["path"] == f"acme/tiny@{COMMIT}"
    snapshot = tmp_path / "cache" / "hub" / "models--acme--tiny" / "snapshots" / COMMIT
    expected = sorted(name for name in Hub.files if "/" not in name)
    assert sorted(path.name for path in snapshot.iterdir()) == expected
    # In this process, which has imported what takes seconds, and read these variables long ago.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    settings = make_settings(tmp_path, f"acme/tiny@{COMMIT}")
    code = main([*settings, "run.dir=other", "--check"])
    assert code == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("tiny-0.5B", "or write OWNER/tiny-0.5B if it is a model on the Hugging Face Hub."),
        ("https://huggingface.co/acme/tiny/tree/main", "write acme/tiny, the name of the model on"),
    ],
)
def test_wrong_form_of_a_name_gets_a_hint_at_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, remedy: str
) -> None:
    assert main([*make_settings(tmp_path, name), "--check"]) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize("is_offline", [True, False])
def test_unknown_model_is_refused_with_the_command_that_downloads_it(
    tmp_path: Path, endpoint: str, is_offline: bool
) -> None:
    variables = {"HF_HUB_OFFLINE": "1"} if is_offline else {"HF_ENDPOINT": endpoint}
    code, output = run(tmp_path, "acme/other", "--check", **variables)
    assert code == 2
    assert "actor.engine.model.path is acme/other, which is not a folder here" in output
    advice = "hf download acme/other --local-dir models/other where the network allows it"
    assert advice in output
    assert "actor.engine.model.path=models/other" in output
    assert "Traceback" not in output
