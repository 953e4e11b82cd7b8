"""A model hub on this machine, as huggingface_hub 2.4 asks one, with faults on demand.

Large files (LARGE) are kept as the real hub keeps them: listed with their sha256, and given by another host
name, which a token must not reach.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".bin", ".gguf")
INFO = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/(.+)")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)")
ELSEWHERE = re.compile(r"/elsewhere/(models|datasets)/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)")
NOT_THERE = {"X-Error-Code": "RepoNotFound"}


class Fault(NamedTuple):
    """What goes wrong with a repository: at its listing (info), a file's head, or a file's content (get).

    It befalls `file` alone, if given. Another status takes the answer's place, with `headers` (None removes
    one); `body` that of its content; only `sent` bytes of the content go out, under a Content-Length of the
    same (`honest`) or of the whole; `stall` never answers. After `times` answers all is well again.
    """

    at: str
    status: int = 200
    headers: dict[str, str | None] | None = None
    file: str | None = None
    body: bytes | None = None
    sent: int | None = None
    honest: bool = False
    stall: bool = False
    times: int = 10**6


class Hub(NamedTuple):
    """A running hub: what it holds, {(kind, name): {commit: {file: content}}}, and what it was asked."""

    address: str
    repositories: dict[tuple[str, str], dict[str, dict[str, bytes]]]
    faults: dict[str, Fault]
    asked: list[tuple[str, str, str | None, str | None]]  # method, path, token, Range
    closing: Event

    def fault(self, name: str, at: str, file: str | None) -> Fault | None:
        """The fault to play now, which has then happened once more."""
        fault = self.faults.get(name)
        if fault is None or fault.at != at or fault.file not in (None, file) or fault.times == 0:
            return None
        self.faults[name] = fault._replace(times=fault.times - 1)
        return fault


def blob_id(content: bytes) -> str:
    """Git's own name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def listing(commit: str, files: dict[str, bytes]) -> dict:
    """A model's or data set's description, with the size and hash of every file."""
    siblings = [
        {"rfilename": name, "size": len(content), "blobId": blob_id(content)}
        | (
            {"lfs": {"size": len(content), "sha256": sha256(content), "pointerSize": 1}}
            if large(name)
            else {}
        )
        for name, content in files.items()
    ]
    return {"id": "owner/name", "sha": commit, "siblings": siblings}


def large(name: str) -> bool:
    return name.endswith(LARGE)


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests on a free port of this machine; give the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """An empty hub, to be filled through its `repositories`."""
    hub = None

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, hub)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Keep the console quiet."""

    with serving(Handler) as address:
        hub = Hub(address, {}, {}, [], Event())
        yield hub
        hub.closing.set()


def answer(request: BaseHTTPRequestHandler, hub: Hub) -> None:
    path = unquote(urlsplit(request.path).path)
    hub.asked.append((request.command, path, request.headers["Authorization"], request.headers["Range"]))
    if found := INFO.fullmatch(path):
        kind, name, commit = found.groups()
        at, file = "info", None
    elif found := (FILE.fullmatch(path) or ELSEWHERE.fullmatch(path)):
        kind, name, commit, file = found.groups()
        kind, at = (kind or "models").rstrip("/"), "head" if request.command == "HEAD" else "get"
    else:
        send(request, 404)
        return
    fault = hub.fault(name, at, file)
    if fault is not None and fault.stall:
        hub.closing.wait()
        return
    commits = hub.repositories.get((kind, name))
    if fault is not None and fault.status != 200:
        send(request, fault.status, fault.headers)
    elif commits is None:
        send(request, 404, NOT_THERE)
    elif commit not in commits:
        send(request, 404, {"X-Error-Code": "RevisionNotFound"})
    elif at == "info":
        content = json.dumps(listing(commit, commits[commit])).encode()
        send(request, 200, {}, content if fault is None else fault.body)
    else:
        give(request, hub, (kind, name, commit, file), commits[commit][file], fault)


def give(
    request: BaseHTTPRequestHandler, hub: Hub, where: tuple, content: bytes, fault: Fault | None
) -> None:
    """Answer for a file as the hub does: a head with its hash, another host for what is large, Ranges."""
    kind, name, commit, file = where
    headers = {"X-Repo-Commit": commit, "ETag": f'"{sha256(content) if large(file) else blob_id(content)}"'}
    headers |= (fault.headers or {}) if fault else {}
    if large(file) and FILE.fullmatch(unquote(request.path)):
        other = hub.address.replace("127.0.0.1", "localhost")
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": headers["ETag"]}
        location = f"{other}/elsewhere/{kind}/{name}/{commit}/{file}"
        send(request, 302, headers | {"Location": location})
        return
    content = content if fault is None or fault.body is None else fault.body
    start = int((request.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
    if start:
        headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
    rest = content[start:]
    sent = rest if fault is None or fault.sent is None else rest[: fault.sent]
    length = len(sent) if fault is not None and fault.honest else len(rest)
    send(request, 206 if start else 200, headers, sent, length)


def send(
    request: BaseHTTPRequestHandler,
    status: int,
    headers: dict[str, str | None] | None = None,
    content: bytes = b"",
    length: int | None = None,
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        if value is not None:
            request.send_header(name, value)
    request.send_header("Content-Length", str(len(content) if length is None else length))
    request.end_headers()
    if request.command != "HEAD":
        with contextlib.suppress(ConnectionError):  # the client has given up
            request.wfile.write(content)
