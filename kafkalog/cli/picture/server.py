"""Serves the picture on loopback: the page, the figures that it polls, and pages of records.

Only a request that names a loopback host gets an answer. A web page whose name was made to point
here (DNS rebinding) gets none. Other users of this machine can ask, too, so a request must have the
token of the address that `kafkalog ui` prints. It is kept in a cookie, for the requests of the
page.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs

from kafkalog.cleaner.state.uncleanable import fault_reason
from kafkalog.cli.picture.counts import Counts
from kafkalog.cli.picture.figures import figures
from kafkalog.cli.picture.page import CONTENT_SECURITY, figures_json, page
from kafkalog.cli.picture.records import records_page
from kafkalog.errors import InvalidInputError, KafkaLogError
from kafkalog.storage_engine.fs import clock

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.log import Log

HOST: Final = "127.0.0.1"
_LOOPBACK: Final = (HOST, "localhost")
_COUNT_EVERY_S: Final = 2.0


class Served(NamedTuple):
    """The address of the picture, and the token that lets a browser see it."""

    port: int
    token: str

    @property
    def address(self) -> str:
        """The address to open; who has it reads the log."""
        return f"http://{HOST}:{self.port}/?token={self.token}"


class _Stopped(Exception):
    """The server ends, so a running count is useless."""


@contextlib.contextmanager
def serving(path: str, log: Log, port: int, *, counts_obsolete: bool) -> Iterator[Served]:
    """Serve the picture and yield where (port 0: any free one).

    Raises InvalidInputError if the port is taken.
    """
    counts = Counts()
    try:
        server = _Server(
            (HOST, port),
            lambda: figures(path, log, counts, clock.now_ms()),
            lambda query: records_page(log, query),
        )
    except OSError as fault:
        raise InvalidInputError(f"port {port} of {HOST}: {fault.strerror}; try another") from None
    stopped = threading.Event()
    workers = [threading.Thread(target=server.serve_forever, name="kafkalog-ui", daemon=True)]
    if counts_obsolete:
        work = threading.Thread(
            target=_count, args=(log, counts, stopped), name="kafkalog-ui-counts", daemon=True
        )
        workers.append(work)
    for worker in workers:
        worker.start()
    try:
        yield Served(server.server_address[1], server.token)
    finally:
        stopped.set()
        server.shutdown()
        for worker in workers:
            worker.join()
        server.server_close()


def _count(log: Log, counts: Counts, stopped: threading.Event) -> None:
    def check_abort() -> None:
        if stopped.is_set():
            raise _Stopped

    with contextlib.suppress(_Stopped):
        while not stopped.is_set():
            with contextlib.suppress(OSError, KafkaLogError):
                counts.count(log, check_abort=check_abort)
            stopped.wait(_COUNT_EVERY_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        figures: Callable[[], dict[str, Any]],
        records: Callable[[Mapping[str, Sequence[str]]], dict[str, Any]],
    ) -> None:
        super().__init__(address, _Handler)
        self._figures = figures
        self.records = records
        self.token = secrets.token_urlsafe(16)
        self._lock = threading.Lock()

    def figures(self) -> dict[str, Any]:
        """Return the current figures, computed by one thread at a time."""
        with self._lock:
            return self._figures()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the page, the figures, some records, or an error."""
        if not self._is_local():
            self._answer(403, "text/plain", b"this page is served to this machine alone\n")
            return
        path, _, text = self.path.partition("?")
        query = parse_qs(text)
        given = query.pop("token", [""])[-1]
        if not (self._is_token(given) or self._is_token(self._cookie())):
            reason = b"open the address that `kafkalog ui` prints, with its token\n"
            self._answer(403, "text/plain", reason)
            return
        if path not in ("/", "/figures.json", "/records.json"):
            self._answer(404, "text/plain", b"there is /, /figures.json and /records.json\n")
            return
        try:
            server = self.server
            found = server.records(query) if path == "/records.json" else server.figures()
        except (OSError, KafkaLogError) as fault:
            status = 400 if isinstance(fault, InvalidInputError) else 503
            reason = f"{fault_reason(fault)}\n".encode("utf-8", "replace")
            self._answer(status, "text/plain", reason)
            return
        if path == "/":
            self._answer(200, "text/html", page(found, is_live=True))
        else:
            self._answer(200, "application/json", figures_json(found).encode())

    do_HEAD = do_GET

    def _is_local(self) -> bool:
        host = self.headers.get("Host", "")
        return host.rpartition(":")[0] in _LOOPBACK or host in _LOOPBACK

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode())

    @property
    def _cookie_name(self) -> str:
        # The browser gives a host's cookies to all of its ports.
        return f"kafkalog-{self.server.server_address[1]}"

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie_name)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", CONTENT_SECURITY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if status == 200 and kind == "text/html":
            cookie = f"{self._cookie_name}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):  # the reader has gone
                self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""
