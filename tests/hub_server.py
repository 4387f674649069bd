"""A small stand-in for the Hub's HTTP API, in a thread: repositories, branches, files (LFS without Xet), commits; and what can go wrong.

It answers what huggingface_hub asks, as the Hub documents it, and keeps everything in memory. A `Fault` replaces the answer to requests.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "s3cret" * 5
USER = "me"
SMALL = (".json", ".md", ".txt", ".jinja", ".gitattributes", ".py")
"""Ends of files that the Hub keeps in git itself."""


@dataclass
class Repo:
    """A repository: files by branch; ``commits`` are (branch, title, names of the files) in their order."""

    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b"*.safetensors filter=lfs\n"}})
    commits: list[tuple[str, str, list[str]]] = field(default_factory=list)


@dataclass
class Fault:
    """What happens to the next ``times`` requests of a method whose path matches: an answer, or (status 0) the connection breaks."""

    method: str
    path: str
    status: int
    code: str = ""
    message: str = ""
    times: int = 1000
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Hub:
    """The state of a server; ``asked`` are method and path of all requests, ``uploaded`` the SHA-256 of files in their order."""

    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    uploaded: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=lambda: {TOKEN})
    url: str = ""

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        return self.repos[repo].branches[branch]


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    """A server on a free port of this machine while the block runs."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


ROUTES = (
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<branch>[^/]+))?", "info"),
    ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/refs", "refs"),
    ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<branch>[^/]+)", "tree"),
    ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<branch>[^/]+)", "make_branch"),
    ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<branch>[^/]+)", "preupload"),
    ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<branch>[^/]+)", "commit"),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "upload"),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/verify", "check"),
    ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<branch>[^/]+)/(?P<name>.+)", "resolve"),
    ("HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<branch>[^/]+)/(?P<name>.+)", "resolve"),
)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in ("do_GET", "do_POST", "do_PUT", "do_HEAD"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append(f"{self.command} {unquote(path)}")
        for fault in self.hub.faults:
            if fault.times and fault.method == self.command and re.search(fault.path, unquote(path)):
                fault.times -= 1
                if not fault.status:
                    # In the middle of what is sent.
                    self.rfile.read(min(1000, int(self.headers.get("Content-Length", 0))))
                    self.close_connection = True
                    self.connection.close()
                    return
                self._body()
                self._refuse(fault.status, fault.code, fault.message, fault.headers)
                return
        body = self._body()
        for method, pattern, name in ROUTES:
            found = re.fullmatch(pattern, path)
            if found is None or method != self.command:
                continue
            given = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
            if name != "upload" and self.headers.get("Authorization", "").removeprefix("Bearer ") not in self.hub.tokens:
                self._refuse(401, "", "Invalid credentials in Authorization header", {})
            elif "repo" in given and given["repo"] not in self.hub.repos:
                self._refuse(404, "RepoNotFound", "Repository not found", {})
            elif "branch" in given and name != "make_branch" and given["branch"] not in self.hub.repos[given["repo"]].branches:
                self._refuse(404, "RevisionNotFound", "Invalid rev id", {})
            else:
                getattr(self, f"_{name}")(body, **given)
            return
        self._refuse(404, "", f"no such address: {path}", {})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str]) -> None:
        named = {name: value for name, value in {"X-Error-Code": code, "X-Error-Message": message}.items() if value}
        self._send(json.dumps({"error": message}).encode(), status, {"Content-Type": "application/json", **named, **headers})

    # -- what is asked -----------------------------------------------------------------------------------------------

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        there = repo in self.hub.repos
        if not there:
            private = asked.get("visibility") == "private" or asked.get("private") is True
            self.hub.repos[repo] = Repo(private)
        self._json({"url": f"{self.hub.url}/{repo}", "name": repo, "id": "0"}, 409 if there else 200)

    def _validate(self, body: bytes) -> None:
        import yaml

        text, errors = json.loads(body)["content"], []
        if text.startswith("---\n"):
            try:
                head = yaml.safe_load(text.split("---\n")[1])
                errors = [] if isinstance(head, dict) else [{"message": "no mapping"}]
            except yaml.YAMLError as error:
                errors = [{"message": str(error)}]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _info(self, _: bytes, repo: str, branch: str = "main") -> None:
        held = self.hub.repos[repo]
        siblings = [{"rfilename": name} for name in held.branches[branch]]
        self._json({"id": repo, "private": held.private, "sha": _sha(repo, branch, held), "siblings": siblings, "tags": []})

    def _refs(self, _: bytes, repo: str) -> None:
        refs = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": "0" * 40} for name in self.hub.repos[repo].branches]
        self._json({"branches": refs, "tags": [], "converts": []})

    def _tree(self, _: bytes, repo: str, branch: str) -> None:
        files = self.hub.files(repo, branch)
        self._json([{"type": "file", "path": name, "size": len(data), "oid": _git(data)} for name, data in files.items()])

    def _make_branch(self, _: bytes, repo: str, branch: str) -> None:
        branches = self.hub.repos[repo].branches
        there = branch in branches
        if not there:
            branches[branch] = dict(branches["main"])
        self._json({}, 409 if there else 200)

    def _preupload(self, body: bytes, repo: str, branch: str) -> None:
        held = self.hub.files(repo, branch)
        told = [
            {
                "path": file["path"],
                "uploadMode": "regular" if file["path"].endswith(SMALL) else "lfs",
                "shouldIgnore": False,
                "oid": _oid(file["path"], held[file["path"]]) if file["path"] in held else None,
            }
            for file in json.loads(body)["files"]
        ]
        self._json({"files": told})

    def _batch(self, body: bytes, repo: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            known = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.blobs:
                verify = {"href": f"{self.hub.url}/{repo}.git/info/lfs/objects/verify"}
                known["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}, "verify": verify}
            objects.append(known)
        self._json({"transfer": "basic", "objects": objects})

    def _upload(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._refuse(400, "", "the content is not what was announced", {})
            return
        self.hub.blobs[oid] = body
        self.hub.uploaded.append(oid)
        self._send(b"")

    def _check(self, body: bytes, repo: str) -> None:
        asked = json.loads(body)
        right = len(self.hub.blobs.get(asked["oid"], b"")) == asked["size"]
        self._json({}, 200 if right else 400)

    def _commit(self, body: bytes, repo: str, branch: str) -> None:
        held, files, title, named = self.hub.repos[repo], dict(self.hub.files(repo, branch)), "", []
        for line in body.splitlines():
            key, value = (entry := json.loads(line))["key"], entry["value"]
            if key == "header":
                title = value["summary"]
                continue
            named.append(value["path"])
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            else:
                del files[value["path"]]
        held.branches[branch] = files
        held.commits.append((branch, title, sorted(named)))
        oid = _sha(repo, branch, held)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "pullRequestUrl": None})

    def _resolve(self, _: bytes, repo: str, branch: str, name: str) -> None:
        files = self.hub.files(repo, branch)
        if name not in files:
            self._refuse(404, "EntryNotFound", "Entry not found", {})
            return
        commit = _sha(repo, branch, self.hub.repos[repo])
        self._send(files[name], headers={"ETag": f'"{_oid(name, files[name])}"', "X-Repo-Commit": commit})


def _git(data: bytes) -> str:
    """The object ID of a file in git."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _oid(name: str, data: bytes) -> str:
    """The ID by which huggingface_hub tells whether a file changed."""
    return _git(data) if name.endswith(SMALL) else hashlib.sha256(data).hexdigest()


def _sha(repo: str, branch: str, held: Repo) -> str:
    return hashlib.sha1(f"{repo} {branch} {len(held.commits)}".encode()).hexdigest()
