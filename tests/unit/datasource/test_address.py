from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.datasource.options import SourceOptions
from kafkalog.errors import InvalidInputError
from kafkalog.sink.options import SinkOptions
from kafkalog.storage_engine.metadata.address import (
    directories,
    log_directories,
    log_directory,
    shown,
)
from kafkalog.storage_engine.place import open_log, opened_for_spark, spark_path

SECRET = "s3/cr3t+value"


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
        ("hdfs://host/log", r"is not local.*an object store begins with s3, gs, az or memory"),
        ("s3:log", r"is not local"),
        ("file://host/log", r"names the host 'host'"),
        ("file:///log?x#y", r"is not a plain file: URI"),
        ("/a\0b", r"null character"),
        ("file:///a%00b", r"is not a plain file: URI"),
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


def test_a_list_of_load_is_the_log_directories_as_they_are() -> None:
    assert log_directories({"Paths": '["/a", "file:/b,c"]'}) == [Path("/a"), Path("/b,c")]
    with pytest.raises(InvalidInputError, match="several log directories"):
        log_directory({"paths": '["/a", "/b"]'})


@pytest.mark.parametrize("given", ["/a,/b", '{"/a": 1}', "[1]", ""])
def test_an_option_that_is_sparks_own_is_refused_unless_spark_made_it(given: str) -> None:
    with pytest.raises(InvalidInputError, match=r"is Spark's own.*\.load\("):
        log_directories({"paths": given})


def test_a_missing_path_says_how_to_give_it() -> None:
    with pytest.raises(InvalidInputError, match=r"\.load\('/dir'\).*CREATE TEMPORARY VIEW"):
        log_directory({"subscribe": "t"})


@pytest.mark.parametrize(
    "given",
    [
        *(f"s3a://key:{SECRET}@bucket", f"s3a:key:{SECRET}@bucket", f"s3:/{SECRET}@b"),
        *(f"hdfs://host/log?sig={SECRET}", f"abfs://c@host/log#{SECRET}", f"k:{SECRET}@bucket"),
        *(f"file://key:{SECRET}@host/log", f"file:///log?sig={SECRET}", f"file:log?{SECRET}"),
        *(f"s3://key:{SECRET}@bucket/log", f"s3://bucket/log?sig={SECRET}", f"gs:/x?{SECRET}"),
        *(f"/log,s3a://key:{SECRET}@bucket", f"s3a://key:{SECRET}@bucket,/log"),
        f"s3a://key:{SECRET}@bucket\0",
    ],
)
def test_an_error_repeats_no_secret_of_an_address(given: str) -> None:
    found = []
    for refuse in (
        lambda: SourceOptions.parse({"path": given, "subscribe": "t"}),
        lambda: SinkOptions.parse({"path": given, "topic": "t"}),
        lambda: SinkOptions.parse({"path": given, "store.region": "r"}),
        lambda: opened_for_spark({"path": given}),
    ):
        with pytest.raises(InvalidInputError) as error:
            refuse()
        found.append(str(error.value))
    assert not [text for text in found if SECRET in text]


@pytest.mark.parametrize("given", [f"s3a://key:{SECRET}@bucket", f"s3://key:{SECRET}@bucket"])
def test_an_error_of_the_engine_repeats_no_secret_of_an_address(given: str) -> None:
    for place in (given, Path(given), [given]):
        with pytest.raises(InvalidInputError) as error:
            open_log(place)
        assert SECRET not in str(error.value)
    assert spark_path(given) == given
    with pytest.raises(InvalidInputError) as error:
        directories(f"/log,{given}")
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("hdfs://host/log", "hdfs://host/log"),
        ("/data/a@b?c#d", "/data/a@b?c#d"),
        ("hdfs://me@host/log", "hdfs://..."),
    ],
)
def test_an_address_without_a_secret_is_shown_whole(given: str, text: str) -> None:
    assert shown(given) == text


@pytest.mark.parametrize(
    "asked", [open_log, directories, spark_path, lambda given: SinkOptions.parse({"path": given})]
)
def test_a_home_directory_that_no_shell_has_read_is_not_made_but_named(
    asked: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/anna")
    with pytest.raises(InvalidInputError, match=r"^(path ')?~/log.*[ ']/home/anna/log"):
        asked("~/log")
    assert [*tmp_path.iterdir()] == []


def test_a_directory_that_is_called_so_is_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~").mkdir()
    assert directories("~/log") == [tmp_path / "~/log"]
    assert directories("~nobody-has-this-name") == [tmp_path / "~nobody-has-this-name"]


@pytest.mark.parametrize("given", ["", " "])
def test_an_empty_path_is_not_the_current_directory(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for asked in (open_log, directories, spark_path):
        with pytest.raises(InvalidInputError, match=r"^' ?': the path is empty.*variable not set"):
            asked(given)
    assert [*tmp_path.iterdir()] == []
