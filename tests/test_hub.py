from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from tokenflow.errors import ModelNotFound
from tokenflow.hub import resolve, resolve_head

REPOSITORY = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed",
    "consolidated.safetensors": b"not needed",
    "onnx/config.json": b"not needed",
    "original/model.safetensors": b"not needed",
    "small+large/default_router.pt": b"not needed",
    "router.pt": b"not needed",
}
NEEDED = sorted(name for name, content in FILES.items() if content != b"not needed")


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's HTTP API that fetching a model needs."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.split("?")[0])
        self.asked.append(path)
        if path == "/api/models/tiny/model/revision/main":
            self.answer(json.dumps({"id": "tiny/model", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/tiny/model/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in FILES.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif path.startswith(f"/tiny/model/resolve/{COMMIT}/"):
            self.answer(FILES[path.removeprefix(f"/tiny/model/resolve/{COMMIT}/")])
        elif path.startswith("/api/models/gated/"):
            self.answer(b"{}", 403, "GatedRepo")
        else:
            self.answer(b"{}", 404, "RepoNotFound")

    def answer(self, body: bytes, status: int = 200, error: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
            self.send_header("X-Error-Message", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """The address of a running hub, and the paths that it was asked for."""
    asked: list[str] = []
    handler = type("Handler", (Hub,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def resolve_elsewhere(path: str, home: Path, by: str = "resolve", **environment: str) -> str:
    """What ``resolve``, or the function called ``by``, says in a fresh process, as hub libraries read the
    environment once.

    The answer is a path, or the text of a ``ModelNotFound``.
    """
    program = (
        "import sys\n"
        "from tokenflow.errors import ModelNotFound\n"
        "from tokenflow import hub\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "try:\n"
        "    print(getattr(hub, sys.argv[2])(sys.argv[1]))\n"
        "except ModelNotFound as error:\n"
        "    print('refused:', error)\n"
        "assert 'torch' not in sys.modules\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program, path, by],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**kept, **settings},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_local_directory_is_returned_as_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").write_text("{}")
    assert resolve(str(tmp_path / "org" / "model")) == tmp_path / "org" / "model"
    monkeypatch.chdir(tmp_path)
    # It reads like a hub id, but what is here wins.
    assert resolve("org/model") == Path("org/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org/model") == tmp_path / "org" / "model"


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json, so it is not a model in Hugging Face"):
        resolve(str(tmp_path))


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelNotFound, match=r"model\.gguf is a file; name the directory that holds"):
        resolve(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "path", ["/no/such/dir", "./models/qwen", "~/qwen", "a/b/c", "owner/na me", "owner/", "a--b", "x.git"]
)
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused_at_once(path: str) -> None:
    with pytest.raises(ModelNotFound, match=r"^there is no directory .* and it is not a hub id") as caught:
        resolve(path)
    assert path in str(caught.value)
    assert str(Path.cwd()) in str(caught.value) or path.startswith("/")


def test_a_hub_id_is_fetched_once_with_only_the_needed_files(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, asked = hub
    folder = Path(resolve_elsewhere("tiny/model", tmp_path, HF_ENDPOINT=address))
    assert folder.is_relative_to(tmp_path)
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == NEEDED
    assert (folder / "model.safetensors").read_bytes() == b"weights"

    asked.clear()
    assert resolve_elsewhere("tiny/model", tmp_path, HF_ENDPOINT=address) == str(folder)
    assert not [path for path in asked if "/resolve/" in path]
    # Neither offline nor without a network is anything else needed.
    assert resolve_elsewhere("tiny/model", tmp_path, HF_HUB_OFFLINE="1") == str(folder)
    assert resolve_elsewhere("tiny/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == str(folder)


def test_offline_a_model_that_is_not_cached_says_so(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = hub
    message = resolve_elsewhere("tiny/model", tmp_path, HF_ENDPOINT=address, HF_HUB_OFFLINE="1")
    assert message == (
        f"refused: there is no directory tiny/model (from {REPOSITORY}), and the cache {tmp_path}/hub does "
        "not hold all of it, while HF_HUB_OFFLINE forbids to fetch; unset it, or give a local directory"
    )
    assert asked == []


def test_without_a_network_it_fails_quickly_and_says_why(tmp_path: Path) -> None:
    started = time.monotonic()
    message = resolve_elsewhere("tiny/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert time.monotonic() - started < 20
    assert message.startswith(
        f"refused: there is no directory tiny/model (from {REPOSITORY}), and it is not in the cache "
        f"{tmp_path}/hub and cannot be fetched from http://127.0.0.1:9 (ConnectError: "
    )
    assert message.endswith("; check the network, or give a local directory")


def test_a_gated_model_says_where_to_accept_its_terms(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, _ = hub
    message = resolve_elsewhere("gated/model", tmp_path, HF_ENDPOINT=address)
    assert f"it is gated: accept its terms at {address}/gated/model, then set HF_TOKEN" in message


def test_an_unknown_model_is_named(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, _ = hub
    message = resolve_elsewhere("no/model", tmp_path, HF_ENDPOINT=address)
    assert message.endswith(
        f"and {address} has no model of that name for you; check the spelling, or set HF_TOKEN if it is "
        "private"
    )


def test_a_head_that_is_here_is_returned_as_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "heads").mkdir(parents=True)
    (tmp_path / "org" / "heads" / "router.pt").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve_head("org/heads") == Path("org/heads")
    assert resolve_head("org/heads/router.pt") == Path("org/heads/router.pt")
    assert resolve_head(str(tmp_path / "org")) == tmp_path / "org"


def test_a_head_on_the_hub_is_fetched_alone(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, asked = hub
    name = "small+large/default_router.pt"
    file = Path(resolve_elsewhere(f"tiny/model/{name}", tmp_path, "resolve_head", HF_ENDPOINT=address))
    assert file.as_posix().endswith(f"/{name}")
    assert file.is_relative_to(tmp_path)
    assert file.read_bytes() == b"not needed"
    assert {path for path in asked if "/resolve/" in path} == {f"/tiny/model/resolve/{COMMIT}/{name}"}
    folder = Path(resolve_elsewhere("tiny/model/small+large", tmp_path, "resolve_head", HF_ENDPOINT=address))
    assert folder == file.parent
    whole = Path(resolve_elsewhere("tiny/model", tmp_path, "resolve_head", HF_ENDPOINT=address))
    assert {path.name for path in whole.rglob("*.*") if path.is_file()} == {"router.pt", "default_router.pt"}


def test_a_head_that_the_hub_does_not_have_is_named(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, _ = hub
    message = resolve_elsewhere("tiny/model/no/such.pt", tmp_path, "resolve_head", HF_ENDPOINT=address)
    assert message == (
        "refused: there is no tiny/model/no/such.pt here, and tiny/model on the hub has no no/such.pt"
    )
    message = resolve_elsewhere("no/model/router.pt", tmp_path, "resolve_head", HF_ENDPOINT=address)
    assert message.startswith("refused: there is no file or directory no/model/router.pt (from ")
    for path in ("/no/such.pt", "./router.pt", "../heads"):
        with pytest.raises(ModelNotFound, match=r"there is no file or directory .* it is not a hub id"):
            resolve_head(path)
