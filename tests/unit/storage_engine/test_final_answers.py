"""Errors of an object store that no retry can mend end at once, with the cause and what to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import kafkalog
from kafkalog.errors import StorageError
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.failure import PermanentError

pytest.importorskip("obstore")

FINAL = [
    (400, "", "Correct the address"),
    (400, "AuthorizationHeaderMalformed", "AWS_REGION"),
    (401, "", "credentials"),
    (403, "", "Allow this identity"),
    (404, "NoSuchBucket", "Create the bucket"),
    (405, "", "Use a store"),
    (301, "PermanentRedirect", "region"),
    (501, "NotImplemented", "Use a store"),
    (505, "", "another store"),
]


class AnsweringServer(ThreadingHTTPServer):
    """A server that gives one answer to every request, and counts the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.code, self.requests = 500, "", 0

    def answer(self, status: int, code: str = "") -> None:
        self.status, self.code, self.requests = status, code, 0


class _Handler(BaseHTTPRequestHandler):
    server: AnsweringServer

    def do_GET(self) -> None:
        self.server.requests += 1
        self.rfile.read(int(self.headers.get("content-length") or 0))
        code = self.server.code
        body = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[AnsweringServer]:
    made = AnsweringServer()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.server_port}"),
        ("AWS_ACCESS_KEY_ID", "of-a-test"),
        ("AWS_SECRET_ACCESS_KEY", "of-a-test"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ALLOW_HTTP", "true"),
    ):
        monkeypatch.setenv(name, value)
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.mark.parametrize(("status", "code", "advice"), FINAL)
def test_an_answer_that_no_retry_mends_ends_an_open_at_once(
    server: AnsweringServer, status: int, code: str, advice: str
) -> None:
    server.answer(status, code)
    with pytest.raises(PermanentError, match=advice) as raised:
        kafkalog.open("s3://b/log")
    assert "ry again" not in str(raised.value)
    assert server.requests == 1


@pytest.mark.parametrize(("status", "code", "advice"), FINAL)
def test_it_ends_each_kind_of_request_at_once(
    server: AnsweringServer, status: int, code: str, advice: str
) -> None:
    server.answer(status, code)
    client = ObjectClient(StoreAddress("s3", "b", "log"), patience_s=30)
    for number, request in enumerate(
        [
            lambda: client.get("x"),
            lambda: client.fetch("x", 0, 10),
            lambda: [*client.list("data")],
            lambda: client.create("x", b"1"),
            lambda: client.put_unique("x", b"1"),
        ],
        start=1,
    ):
        with pytest.raises(PermanentError, match=advice):
            request()
        assert server.requests == number


@pytest.mark.parametrize("scheme", ["s3", "az"])
def test_plain_http_that_is_not_allowed_is_refused_at_once(
    server: AnsweringServer, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    endpoint = f"http://127.0.0.1:{server.server_port}"
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.setenv(name, "b2YtYS10ZXN0")
    client = ObjectClient(StoreAddress(scheme, "b", "log", endpoint=endpoint))
    for request in (lambda: client.get("x"), lambda: client.put_unique("x", b"1")):
        with pytest.raises(PermanentError, match="begins with http://"):
            request()
    assert not server.requests


@pytest.mark.parametrize(
    ("status", "code"), [(500, ""), (503, "SlowDown"), (400, "RequestTimeout"), (429, "")]
)
def test_an_answer_that_may_pass_is_asked_for_again(
    server: AnsweringServer, status: int, code: str
) -> None:
    server.answer(status, code)
    client = ObjectClient(StoreAddress("s3", "b", "log"), patience_s=0.2)
    for request in (lambda: client.get("x"), lambda: client.put_unique("x", b"1")):
        server.requests = 0
        with pytest.raises(StorageError, match="ry again") as raised:
            request()
        assert not isinstance(raised.value, PermanentError)
        assert server.requests > 1
