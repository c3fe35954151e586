"""A local stand-in for the Hugging Face hub: those of its HTTP calls that huggingface_hub 1.31 to 2.4 makes for kvcal.

Real enough to notice mistakes: large files go through LFS and are taken only with the right sha256 and size; a commit
naming an object that was never uploaded is refused; metadata must be YAML; tokens may read or write by organisation;
commits, branches and git's blob ids are kept. `faults` makes answers go wrong.

What it leaves out: the Xet protocol (HF_HUB_DISABLE_XET=1 makes the client use LFS), data sets and spaces, deletions
and copies, pull requests, rate limits, and that links to storage are signed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".png", ".bin")  # what .gitattributes of a new repository sends to LFS
WRITER, READER, STRANGER = "hf_writer", "hf_reader", "hf_stranger"
ADDRESSES = ("127.0.0.1", "127.0.0.2")
ID = re.compile(r"(?:[\w-]+/)?[\w.-]+")  # of models and data sets; an id need not exist
RIGHTS = {WRITER: {"lab": "write", "my-org": "write"}, READER: {"lab": "read"}, STRANGER: {}}


@dataclass(frozen=True)
class File:
    """large: stored by LFS."""

    data: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def blob(self) -> str:
        """git's id: of the content, or of the pointer that git holds in its place."""
        held = self.data
        if self.large:
            held = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(held)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.blob


Tree = dict[str, File]


def _ids(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Where a card's metadata names models and data sets: (field, value)."""
    for name in ("base_model", "datasets"):
        value = fields.get(name, [])
        yield from ((name, str(one)) for one in (value if isinstance(value, list) else [value]))
    for model in fields.get("model-index", []):
        yield from (("model-index dataset.type", str(result["dataset"]["type"])) for result in model["results"])


@dataclass
class Repository:
    """commits: id -> tree; branches: name -> id of its newest commit."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Tree] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, tree: Tree, title: str) -> str:
        about = json.dumps([sorted((n, f.blob) for n, f in tree.items()), title, len(self.commits)])
        sha = hashlib.sha1(about.encode()).hexdigest()
        self.commits[sha], self.branches[branch] = tree, sha
        return sha

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        self.status, self.message, self.code = status, message, code


class Hub:
    """calls: method and path of every request. faults: of downloads, by the end of a file's name: "tampered" (a byte
    flipped), "short" (half, and said so), "broken" (half, then the line is cut, and nothing more when asked for the
    rest), "cut once".

    Large files lie at a second address: to the client another place, which gets no token.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.part_size: int | None = None  # of multipart uploads
        self.faults: dict[str, str] = {}
        self.calls: list[str] = []
        self.lock = threading.Lock()
        self.servers = [Server(self, address) for address in ADDRESSES]
        self.url, self.storage = (
            f"http://{address}:{server.server_address[1]}"
            for address, server in zip(ADDRESSES, self.servers, strict=True)
        )


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub, address: str) -> None:
        super().__init__((address, 0), Handler)
        self.hub = hub


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    for server in hub.servers:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield hub
    finally:
        for server in hub.servers:
            server.shutdown()
            server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    ROUTES: ClassVar[list[tuple[str, tuple[str, ...], str]]] = [
        ("POST", ("api", "repos", "create"), "create"),
        ("POST", ("api", "validate-yaml"), "validate"),
        ("GET", ("api", "models", "*", "*"), "info"),
        ("GET", ("api", "models", "*", "*", "revision", "*"), "info"),
        ("POST", ("api", "models", "*", "*", "preupload", "*"), "preupload"),
        ("POST", ("api", "models", "*", "*", "commit", "*"), "commit"),
        ("POST", ("*", "*", "info", "lfs", "objects", "batch"), "batch"),
        ("PUT", ("lfs", "*"), "upload"),
        ("PUT", ("lfs", "*", "*"), "upload_part"),
        ("POST", ("lfs", "*", "complete"), "complete"),
        ("POST", ("lfs", "*", "verify"), "verify"),
        ("HEAD", ("*", "*", "resolve", "*", "*"), "resolve"),
        ("GET", ("*", "*", "resolve", "*", "*"), "resolve"),
        ("GET", ("cdn", "*", "*"), "download"),
        ("HEAD", ("",), "hello"),
    ]

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _answer(self) -> None:
        parsed = urlsplit(self.path)
        words = tuple(unquote(word) for word in parsed.path.strip("/").split("/"))
        self.query = parse_qs(parsed.query)
        self.body = self._body()
        self.hub.calls.append(f"{self.command} {parsed.path}")
        try:
            for method, pattern, name in self.ROUTES:
                if method == self.command and len(pattern) == len(words):
                    found = [word for part, word in zip(pattern, words, strict=True) if part == "*"]
                    if all(part in ("*", word) for part, word in zip(pattern, words, strict=True)):
                        with self.hub.lock:
                            getattr(self, f"on_{name}")(*found)
                        return
            raise Refused(404, f"no such call here: {self.command} {parsed.path}")
        except Refused as refused:
            headers = {"X-Error-Message": refused.message}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            self._json({"error": refused.message}, refused.status, headers)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # Who may do what.

    def _rights(self, organisation: str) -> str | None:
        """ "read", "write" or None; raises 401 for a token that does not exist."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not token:
            return None
        if token not in RIGHTS:
            raise Refused(401, "Invalid credentials in Authorization header")
        return RIGHTS[token].get(organisation)

    def _readable(self, organisation: str, name: str) -> Repository:
        rights = self._rights(organisation)
        repository = self.hub.repositories.get(f"{organisation}/{name}")
        if repository is None or (repository.private and rights is None):
            raise Refused(404 if self.headers.get("Authorization") else 401, "Repository not found", "RepoNotFound")
        if repository.gated and rights is None:
            raise Refused(403, "Access to this model is restricted", "GatedRepo")
        return repository

    def _writable(self, organisation: str, name: str) -> Repository:
        repository = self._readable(organisation, name)
        if self._rights(organisation) != "write":
            raise Refused(403, f"You don't have the rights to push to {organisation}/{name}")
        return repository

    @staticmethod
    def _commit_of(repository: Repository, revision: str) -> str:
        if (sha := repository.find(revision)) is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    # What huggingface_hub asks.

    def on_hello(self) -> None:
        self._send(b"")

    def on_create(self) -> None:
        asked = json.loads(self.body)
        organisation, name = asked["organization"], asked["name"]
        if self._rights(organisation) != "write":
            signed_in = self.headers.get("Authorization")
            raise Refused(
                403 if signed_in else 401, f"You don't have the rights to create a model under {organisation}"
            )
        if f"{organisation}/{name}" in self.hub.repositories:
            told = {"error": "You already created this model repo", "url": f"{self.hub.url}/{organisation}/{name}"}
            self._json(told, 409)
            return
        made = Repository(private=asked.get("visibility") == "private" or bool(asked.get("private")))
        made.commit("main", {".gitattributes": File(b"*.safetensors filter=lfs\n", large=False)}, "initial commit")
        self.hub.repositories[f"{organisation}/{name}"] = made
        self._json({"url": f"{self.hub.url}/{organisation}/{name}", "name": f"{organisation}/{name}"})

    def on_validate(self) -> None:
        """The front matter is YAML, a mapping, with lists and ids where the hub wants them."""
        content = json.loads(self.body)["content"]
        errors = []
        try:
            fields = yaml.safe_load(content.split("---")[1])
            if not isinstance(fields, dict):
                errors.append("metadata is not a mapping")
            else:
                errors += [
                    f"{n} must be a list"
                    for n in ("tags", "datasets", "metrics")
                    if not isinstance(fields.get(n, []), list)
                ]
                errors += [
                    f'"{name}" with value "{value}" is not valid'
                    for name, value in _ids(fields)
                    if not ID.fullmatch(value)
                ]
        except (yaml.YAMLError, IndexError) as error:
            errors.append(f"metadata is not YAML: {error}")
        told = {"errors": [{"message": error} for error in errors], "warnings": []}
        self._json(told, 400 if errors else 200)

    def on_info(self, organisation: str, name: str, revision: str = "main") -> None:
        repository = self._readable(organisation, name)
        sha = self._commit_of(repository, revision)
        files = [self._sibling(path, file) for path, file in sorted(repository.commits[sha].items())]
        self._json({"id": f"{organisation}/{name}", "sha": sha, "private": repository.private, "siblings": files,
                    "tags": [], "downloads": 0, "likes": 0})  # fmt: skip

    def _sibling(self, path: str, file: File) -> dict[str, Any]:
        told: dict[str, Any] = {"rfilename": path}
        if "blobs" in self.query:
            told |= {"size": len(file.data), "blobId": file.blob}
            if file.large:
                told["lfs"] = {"sha256": file.sha256, "size": len(file.data), "pointerSize": 130}
        return told

    def on_preupload(self, organisation: str, name: str, revision: str) -> None:
        tree = self._tree(self._writable(organisation, name), revision)
        files = []
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            mode = "lfs" if path.endswith(LARGE) or asked["size"] > 10_000_000 else "regular"
            known = tree.get(path)
            oid = {} if known is None else {"oid": known.etag}
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **oid})
        self._json({"files": files})

    def _tree(self, repository: Repository, revision: str) -> Tree:
        return repository.commits[self._commit_of(repository, revision)]

    def on_batch(self, organisation: str, name: str) -> None:
        self._writable(organisation, name.removesuffix(".git"))
        asked = json.loads(self.body)
        assert asked["operation"] == "upload" and asked["hash_algo"] == "sha256" and "basic" in asked["transfers"]
        self._json({"transfer": "basic", "objects": [self._object(**one) for one in asked["objects"]]})

    def _object(self, oid: str, size: int) -> dict[str, Any]:
        told: dict[str, Any] = {"oid": oid, "size": size}
        if oid in self.hub.objects:
            return told
        place = f"{self.hub.storage}/lfs/{oid}"
        upload: dict[str, Any] = {"href": place}
        if self.hub.part_size and size > self.hub.part_size:
            count = -(-size // self.hub.part_size)
            parts = {str(i + 1): f"{place}/{i + 1}" for i in range(count)}
            upload = {
                "href": f"{self.hub.url}/lfs/{oid}/complete",
                "header": {"chunk_size": str(self.hub.part_size), **parts},
            }
        return told | {"actions": {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs/{oid}/verify"}}}

    def on_upload(self, oid: str) -> None:
        assert "Authorization" not in self.headers
        self._take(oid, self.body)
        self._send(b"")

    def on_upload_part(self, oid: str, number: str) -> None:
        self.hub.parts.setdefault(oid, {})[int(number)] = self.body
        self._send(b"", headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def on_complete(self, oid: str) -> None:
        parts = self.hub.parts.pop(oid)
        self._take(oid, b"".join(parts[number] for number in sorted(parts)))
        self._json({})

    def _take(self, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            raise Refused(400, "content does not have the sha256 it was announced with")
        self.hub.objects[oid] = data

    def on_verify(self, oid: str) -> None:
        asked = json.loads(self.body)
        if asked["oid"] != oid or len(self.hub.objects.get(oid, b"")) != asked["size"]:
            raise Refused(400, "object is missing or of another size")
        self._json({})

    def on_commit(self, organisation: str, name: str, revision: str) -> None:
        repository = self._writable(organisation, name)
        if revision not in repository.branches:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        lines = [json.loads(line) for line in self.body.splitlines()]
        tree = dict(self._tree(repository, revision))
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                tree[value["path"]] = File(base64.b64decode(value["content"]), large=False)
            elif line["key"] == "lfsFile" and value["algo"] == "sha256" and value["oid"] in self.hub.objects:
                tree[value["path"]] = File(self.hub.objects[value["oid"]], large=True)
            else:
                raise Refused(400, f"cannot commit {line['key']} {value.get('path')}: no such object")
        sha = repository.commit(revision, tree, lines[0]["value"]["summary"])
        self._json(
            {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{organisation}/{name}/commit/{sha}"}
        )

    def on_resolve(self, organisation: str, name: str, revision: str, path: str) -> None:
        repository = self._readable(organisation, name)
        sha = self._commit_of(repository, revision)
        file = repository.commits[sha].get(path)
        headers = {"X-Repo-Commit": sha}
        if file is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        if not file.large:
            self._send(file.data, headers=headers | {"ETag": f'"{file.etag}"'})
            return
        self.hub.objects.setdefault(file.sha256, file.data)
        linked = {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(len(file.data))}
        self._send(b"", 302, headers | linked | {"Location": f"{self.hub.storage}/cdn/{file.sha256}/{path}"})

    def on_download(self, oid: str, path: str) -> None:
        assert "Authorization" not in self.headers
        data = self.hub.objects[oid]
        fault = next((fault for end, fault in self.hub.faults.items() if path.endswith(end)), None)
        if fault == "tampered":
            data = data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
        if fault == "short":
            data = data[: len(data) // 2]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        partial = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        if fault == "cut once":
            del self.hub.faults[next(end for end in self.hub.faults if path.endswith(end))]
        if fault not in ("broken", "cut once"):
            self._send(data[start:], 206 if start else 200, partial)
            return
        self.send_response(206 if start else 200)
        for header, value in {"Content-Length": str(len(data) - start), **partial}.items():
            self.send_header(header, value)
        self.end_headers()
        if not start:
            self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.close_connection = True
