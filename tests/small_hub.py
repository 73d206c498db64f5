"""A small hub on 127.0.0.1, with the few answers that client libraries need to fetch whole files."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub
import pytest
import transformers.utils.hub

LARGE = (".safetensors", ".parquet")
"""Files that the hub keeps by their sha256."""


@dataclass
class Repository:
    commit: str
    files: dict[str, bytes]
    gated: bool = False


@dataclass
class SmallHub:
    """Served repositories, by `models/<id>` or `datasets/<id>`, and ways to fail.

    Attributes:
        status: answered to everything in place of what was asked for, where it is not 200.
        fetched: path of every file that was asked for.
        tokens: every token that came with a request.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    status: int = 200
    fetched: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    address: str = ""


@contextmanager
def serving(hub: SmallHub) -> Iterator[SmallHub]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # else ending takes half a second
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


def become(hub: SmallHub, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it the hub of this process's libraries, which then ask again at once where they would wait."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # kept, with another test's hub
    urls = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(caches / "hub cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(caches / "none"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", caches / "datasets cache")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(caches / "modules"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


class _Handler(BaseHTTPRequestHandler):
    hub: SmallHub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.tokens |= {token} if token else set()
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.hub.status != 200:
            return self._fail(self.hub.status, "", f"told by {token}")
        if (asked := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/([a-z-]+)(?:/(.*))?)?", path)) is not None:
            kind, name, what, rest = asked.groups()
        elif (asked := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/(.*)", path)) is not None:
            kind, name, what, rest = (asked[1] or "models/").rstrip("/"), asked[2], "resolve", asked[3]
        else:
            return self._fail(404, "RepoNotFound")
        repository = self.hub.repositories.get(f"{kind}/{name}")
        if repository is None:
            return self._fail(404, "RepoNotFound")
        if repository.gated and what in ("auth-check", "resolve"):
            return self._fail(403 if token else 401, "GatedRepo")
        revision, _, inner = (rest or "main").partition("/")
        if revision not in ("main", repository.commit):
            return self._fail(404, "RevisionNotFound")
        if what == "auth-check":
            return self._answer({})
        if what in (None, "revision"):
            siblings = [{"rfilename": file} for file in repository.files]
            return self._answer({"id": name, "sha": repository.commit, "siblings": siblings})
        if what == "tree":
            return self._answer(list(_tree(repository, inner, "recursive=true" in self.path.lower())))
        if what == "paths-info":
            form = parse_qs(body.decode())
            wanted = form["paths"] if "paths" in form else json.loads(body)["paths"]
            return self._answer([entry for entry in _tree(repository, "", True) if entry["path"] in wanted])
        return self._file(repository, name, inner)

    do_HEAD = do_POST = do_GET

    def _file(self, repository: Repository, name: str, inner: str) -> None:
        if inner not in repository.files:
            return self._fail(404, "EntryNotFound")
        content = repository.files[inner]
        self.send_response(200)
        self.send_header("X-Repo-Commit", repository.commit)
        self.send_header("ETag", f'"{_hash(inner, content)}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.fetched.append(f"{name}/{inner}")
        self.wfile.write(content)

    def _answer(self, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _fail(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _tree(repository: Repository, folder: str, recursive: bool) -> Iterator[dict[str, Any]]:
    """Files and folders below a folder, or in it."""
    folders: dict[str, None] = {}
    for path, content in repository.files.items():
        if folder and not path.startswith(f"{folder}/"):
            continue
        inner = path.removeprefix(f"{folder}/") if folder else path
        above = [str(parent) for parent in PurePosixPath(inner).parents if str(parent) != "."]
        folders |= dict.fromkeys(f"{folder}/{name}" if folder else name for name in above)
        if recursive or not above:
            yield {"type": "file", "path": path, "size": len(content), "oid": _git_hash(content)} | (
                {"lfs": {"oid": _hash(path, content), "size": len(content), "pointerSize": 130}}
                if path.endswith(LARGE)
                else {}
            )
    depth = folder.count("/") + 1 if folder else 0
    for name in folders:
        if recursive or name.count("/") == depth:
            yield {"type": "directory", "path": name, "oid": _git_hash(name.encode())}


def _hash(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else _git_hash(content)


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
