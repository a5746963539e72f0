"""The address of a log in an object store."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.object_store.address import StoreAddress, is_store_url

SECRET = "s3cr3tvalue"


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("gs://b.c-d/a/b=1/", "b.c-d", "a/b=1"),
        ("az://container/logs", "container", "logs"),
        ("memory://name/x", "name", "x"),
    ],
)
def test_a_url_is_a_bucket_and_a_prefix(url: str, bucket: str, prefix: str) -> None:
    address = StoreAddress.parse(url)
    assert (address.bucket, address.prefix) == (bucket, prefix)
    assert StoreAddress.parse(str(address)) == address
    assert pickle.loads(pickle.dumps(address)) == address


def test_a_path_and_other_urls_name_no_store() -> None:
    assert is_store_url("S3://bucket/x")
    assert not any(map(is_store_url, ["/dir", "file:///dir", "/s3:/b", "hdfs://host/x", "s3"]))


@pytest.mark.parametrize("url", ["gs:/typo", "S3:/bucket/x", str(Path("az://bucket/x")), "s3:/"])
def test_an_address_with_one_slash_is_refused_and_shown_with_two(url: str) -> None:
    meant = url.replace(":/", "://")
    with pytest.raises(InvalidInputError, match=rf"{url}: .* two slashes \(expected {meant}\)"):
        is_store_url(url)


def test_an_address_with_one_slash_is_shown_without_its_secret() -> None:
    with pytest.raises(InvalidInputError, match=r"s3:/\.\.\.: .* two slashes") as refused:
        is_store_url(f"s3:/key:{SECRET}@bucket")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        *("s3://", "s3:///prefix", "s3://bu cket/x", "hdfs://b/x", "/dir", "s3://-b"),
        *("s3://b/a//b", "s3://b/../c", "s3://b/.", "s3://b/a%20b", "s3://b/ä", "s3://b/a b"),
    ],
)
def test_a_url_without_a_bucket_or_with_an_unsafe_prefix_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError, match="expected"):
        StoreAddress.parse(url)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        (f"s3://key:{SECRET}@bucket/x", {}),
        (f"s3://bucket/x?secret_access_key={SECRET}", {}),
        (f"s3://bucket/x#{SECRET}", {}),
        ("s3://b", {"store.endpoint": f"https://user:{SECRET}@host"}),
        ("s3://b", {"store.endpoint": f"https://host/?sig={SECRET}"}),
        ("s3://b", {"store.endpoint": f"key:{SECRET}@host"}),
        ("s3://b", {"store.secret_access_key": SECRET}),
        (f"s3a:key:{SECRET}@bucket", {}),
        ("s3://b", {"store.credentials": SECRET}),
    ],
)
def test_a_secret_in_an_address_is_refused_and_not_repeated(
    url: str, options: dict[str, str]
) -> None:
    with pytest.raises(InvalidInputError) as refused:
        StoreAddress.parse(url, options)
    assert SECRET not in str(refused.value)
    assert refused.value.__context__ is None


def test_the_options_of_a_store_are_read_whatever_their_letter_case() -> None:
    given = {"Store.Endpoint": "http://h:1", "STORE.ALLOW_HTTP": "True", "store.region": "r"}
    address = StoreAddress.parse("s3://b", {"path": "x", **given, "store.credentials": "m.n:P"})
    assert (address.endpoint, address.allow_http) == ("http://h:1", True)
    assert (address.region, address.credentials) == ("r", "m.n:P")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b", {"store.endpoint": "http://host"}),
        ("s3://b", {"store.endpoint": "host:80"}),
        ("s3://b", {"store.allow_http": "yes"}),
        ("gs://b", {"store.region": "r"}),
        ("memory://b", {"store.endpoint": "https://host"}),
    ],
)
def test_an_option_that_cannot_hold_is_refused(url: str, options: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match=r"store\."):
        StoreAddress.parse(url, options)
