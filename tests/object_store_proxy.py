"""A proxy in front of an S3 server that counts requests and spoils some of them.

It runs in threads of the test's process. A `Rule` says which request is spoiled, and how.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Fault(Enum):
    """A way to spoil a request: refused, lost, answered wrongly though it was done, or late."""

    REFUSED_403 = 403
    REFUSED_412 = 412
    REFUSED_409 = 409
    REFUSED_500 = 500
    REFUSED_503 = 503
    STALE_404 = 404
    DONE_BUT_500 = "500 after success"
    REQUEST_LOST = "the request is lost"
    ANSWER_LOST = "the answer is lost after success"
    CUT_BODY = "half of the body, then the end"
    LATE = "late"
    SLOW_LINE = "the bodies in pieces, each of them late"
    MEANWHILE = "the victim before the request, which is then done"
    VICTIM_BEFORE = "the victim before the request"
    VICTIM_AFTER = "the victim after the request, before the answer"


PIECES = 8
"""The pieces of a body on a slow line."""
_CODES = {
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    500: "InternalError",
    503: "SlowDown",
}
_OF_THIS_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Rule:
    """Spoil `times` requests of a kind that have `part` in their address, after the first ones.

    A late request is `seconds` late. With STALE_404 its object is missing for so long. On a slow
    line each of the two bodies takes so long. A refusal has the usual code, or `code`.
    """

    fault: Fault
    kind: str = "*"
    part: str = ""
    after: int = 0
    times: int = 1
    seconds: float = 0.0
    code: str = ""
    victim: Callable[[], None] | None = None
    """Called in place of the proxy's own victim."""
    met: int = field(default=0, init=False)
    _missing: str = field(default="", init=False)
    _until: float = field(default=0.0, init=False)

    @property
    def is_met(self) -> bool:
        """Whether a request was spoiled."""
        return self.met > self.after

    def takes(self, kind: str, path: str) -> bool:
        """Count a request that the rule is about; return whether it is to be spoiled."""
        if self.kind not in {"*", kind} or self.part not in path:
            return False
        if path == self._missing and time.monotonic() < self._until:
            return True
        self.met += 1
        is_spoiled = self.after < self.met <= self.after + self.times
        if is_spoiled and self.fault is Fault.STALE_404:
            self._missing, self._until = path, time.monotonic() + self.seconds
        return is_spoiled


class StoreProxy:
    """The proxy; a context manager. `port` is its own, `upstream` that of the server.

    Each request waits for `delay_s` first.
    """

    def __init__(self, upstream: int, host: str = "127.0.0.1", delay_s: float = 0.0) -> None:
        self.upstream = upstream
        self.host = host
        self.delay_s = delay_s
        self.victim: Callable[[], None] = lambda: None
        """Called by the faults MEANWHILE, VICTIM_BEFORE and VICTIM_AFTER."""
        self.rules: list[Rule] = []
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.requests: list[str] = []
        self.spans: list[tuple[float, float, str]] = []
        """The beginning and the end in epoch seconds of each request, and the request."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server((host, 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def reset(self, *rules: Rule) -> None:
        """Begin to count again, with these rules alone."""
        with self.lock:
            self.counts.clear()
            self.requests.clear()
            self.spans.clear()
            self.rules = [*rules]

    def noted(self, kind: str, path: str) -> Rule | None:
        """Count a request; return the rule that spoils it."""
        with self.lock:
            self.counts[kind] += 1
            self.requests.append(f"{kind} {path}")
            return next((rule for rule in self.rules if rule.takes(kind, path)), None)

    def __enter__(self) -> StoreProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def kind_of(request: str) -> str:
    """Return what a request is about: its method, and the kind of its object."""
    method, _, path = request.partition(" ")
    name, _, query = path.partition("?")
    if method == "LIST":
        (name,) = urllib.parse.parse_qs(query).get("prefix", [""])
    return f"{method} {name.strip('/').rpartition('/')[2].rpartition('.')[2]}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a killed client, or a spoiled request, breaks its connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave together
    owner: StoreProxy

    def log_message(self, *_: object) -> None:
        """Write no log."""

    def _serve(self) -> None:
        began = time.time()
        parts = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
        kind = "LIST" if "list-type" in query else "DELETE" if "delete" in query else self.command
        rule = self.owner.noted(kind, urllib.parse.unquote(self.path))
        fault = rule.fault if rule else None
        pause = rule.seconds / PIECES if rule and fault is Fault.SLOW_LINE else 0.0
        body = b"".join(
            self.rfile.read(piece)
            for piece in self._pieces(int(self.headers.get("Content-Length") or 0), pause)
        )
        victim = (rule and rule.victim) or self.owner.victim
        time.sleep(self.owner.delay_s)
        if fault in {Fault.VICTIM_BEFORE, Fault.MEANWHILE}:
            victim()
            fault = Fault.REQUEST_LOST if fault is Fault.VICTIM_BEFORE else None
        if fault is Fault.LATE:
            assert rule is not None
            time.sleep(rule.seconds)
        if fault is Fault.REQUEST_LOST:
            self._hang_up()
        elif fault is not None and isinstance(fault.value, int):
            self._refuse(fault.value, rule.code if rule else "")
        else:
            self._forward(body, fault, victim, pause)
        span = began, time.time(), f"{kind} {urllib.parse.unquote(self.path)}"
        with self.owner.lock:
            self.owner.spans.append(span)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _pieces(self, size: int, pause: float) -> Iterator[int]:
        """Yield the sizes of the pieces of a body, each after its pause."""
        for number in range(PIECES if size else 0):
            time.sleep(pause)
            yield size * (number + 1) // PIECES - size * number // PIECES

    def _forward(
        self, body: bytes, fault: Fault | None, victim: Callable[[], None], pause: float
    ) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self.owner.upstream, timeout=60)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            upstream.request(self.command, self.path, body=body, headers=headers)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if fault is Fault.VICTIM_AFTER:
            victim()
        if fault in {Fault.VICTIM_AFTER, Fault.ANSWER_LOST}:
            self._hang_up()
        elif fault is Fault.DONE_BUT_500:
            self._refuse(500)
        else:
            size = answer.headers["Content-Length"] if self.command == "HEAD" else str(len(data))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _OF_THIS_HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", size or "0")
            self.end_headers()
            is_cut = fault is Fault.CUT_BODY
            left = memoryview(data[: len(data) // 2] if is_cut else data)
            for piece in self._pieces(len(left), pause):
                self.wfile.write(left[:piece])
                left = left[piece:]
                if pause:
                    self.wfile.flush()
            if is_cut:
                self._hang_up()

    def _refuse(self, status: int, code: str = "") -> None:
        code = code or _CODES[status]
        body = f"<Error><Code>{code}</Code><Message>spoiled</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
