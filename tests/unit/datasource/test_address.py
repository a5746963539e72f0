from pathlib import Path

import pytest

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.metadata.address import log_directory


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/data/log", "/data/log"),
        ("/data/a:b", "/data/a:b"),
        ("file:/data/log", "/data/log"),
        ("file:///data/my%20log", "/data/my log"),
        ("FILE://localhost/data/log", "/data/log"),
    ],
)
def test_an_absolute_path_or_a_file_uri_is_an_address(given: str, path: str) -> None:
    assert log_directory({"PATH": given}) == Path(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", r"option 'path' is missing"),
        ("hdfs://host/log", r"is not local"),
        ("s3:log", r"is not local"),
        ("file://host/log", r"names the host 'host'"),
        ("file:///log?x#y", r"no plain file: URI"),
        ("/a\0b", r"zero byte"),
        ("file:///a%00b", r"no plain file: URI"),
    ],
)
def test_another_address_is_refused(given: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        log_directory({"path": given})


@pytest.mark.parametrize("given", ["data/log", "./data:x/log", "file:data/log"])
def test_a_relative_path_is_refused_with_what_it_would_have_meant(given: str) -> None:
    meant = str(Path.cwd() / given.removeprefix("file:"))

    with pytest.raises(InvalidInputError, match="did you mean") as error:
        log_directory({"path": given})

    assert meant in str(error.value)


def test_a_missing_path_says_how_to_give_it() -> None:
    with pytest.raises(InvalidInputError, match=r"\.load\('/dir'\).*CREATE TEMPORARY VIEW"):
        log_directory({"subscribe": "t"})
