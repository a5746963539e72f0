"""The search for occurrences of keys finds them in every kind of file, and invents none."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
from kafkalog.erasure import file_occurrences
from kafkalog.erasure.file_occurrences import scan_file
from kafkalog.erasure.topic_files import FileKind, topic_files
from kafkalog.errors import InvalidInputError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.directory import pins
from kafkalog.storage_engine.directory.pins import Action
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.writer import Writer, writer_slug
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from tests.acceptance.users import as_nobody
from tests.builders.batch_builder import Record, batch_data
from tests.builders.log_builder import LogBuilder
from tests.builders.message_builder import message
from tests.unit.cleaner.searched_log import (
    BASE,
    KEY,
    NOW,
    batch,
    directory,
    kinds,
    searched_log,
)
from tests.unit.storage_engine.broker_root import BrokerRoot


@pytest.fixture
def log(tmp_path: Path) -> Iterator[KafkaLog]:
    with searched_log(tmp_path / "log") as opened:
        yield opened


# --- it is seen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [layout.CODEC_NONE, layout.CODEC_GZIP])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{BASE}.log", FileKind.LOG),
        (f"{BASE}.log.deleted", FileKind.RETIRED),
        (f"{BASE}.log.cleaned", FileKind.UNFINISHED),
        (f"{BASE}.log.swap", FileKind.UNFINISHED),
        (f"kl-{'ab' * 16}-7-0-0.staged", FileKind.STAGED),
        (f"../kl-{'ab' * 16}-7-0-0.staged", FileKind.STAGED_FOR_ANY),
        (f"../t-1.{'ab' * 16}-delete/{BASE}.log", FileKind.LOG),
        (f"../t-0.{'ab' * 16}-stray/{BASE}.log", FileKind.LOG),
        (f"below/{BASE}.log", FileKind.LOG),
        (f"../t-1/{BASE}.log", FileKind.LOG),
    ],
)
def test_a_record_is_seen_in_every_file_of_batches(
    log: KafkaLog, name: str, kind: FileKind, codec: int
) -> None:
    assert kinds(log.occurrences("t", [KEY], now_ms=NOW)) == set()
    path = directory(log) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(batch(b"another", KEY, codec=codec))
    found = log.occurrences("t", [KEY], now_ms=NOW)
    (file,) = [file for file in found.files if not file.is_clear]
    assert (file.file.kind, file.found, file.first_offset) == (kind, {0: 1}, 1)
    assert [one.path.resolve() for one in found.residuals] == [path.resolve()]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (f"{BASE}.index", FileKind.INDEX),
        (f"{BASE}.timeindex", FileKind.INDEX),
        (f"{BASE}.txnindex.deleted", FileKind.INDEX),
        (f"kl-{'ab' * 16}-7-0-0.staged-offsets", FileKind.INDEX),
        (f"kl-{'ab' * 16}-7-0-0.staged-times", FileKind.INDEX),
        ("kl-gaps", FileKind.INDEX),
        ("kl-raw-gaps", FileKind.INDEX),
        (f"kl-{BASE}.keys", FileKind.KEY_INDEX),
        (f"{BASE}.snapshot", FileKind.SNAPSHOT),
        (f"{BASE}.snapshot.deleted", FileKind.SNAPSHOT),
        ("kl-snapshot.tmp", FileKind.SNAPSHOT),
        ("kl-spill-0", FileKind.TEMPORARY),
        ("kl-spilling", FileKind.MARK),
        ("kl-uncleanable", FileKind.MARK),
        ("kl-delete-horizon", FileKind.MARK),
        ("kl-last-cleaning", FileKind.MARK),
        ("partition.metadata", FileKind.MARK),
        ("leader-epoch-checkpoint", FileKind.MARK),
        ("leader-epoch-checkpoint.tmp", FileKind.MARK),
        ("../commit", FileKind.JOURNAL),
        ("../kl-commit.tmp", FileKind.JOURNAL),
        ("../kl-commit.released", FileKind.JOURNAL),
        ("../kl-pin-0123456789abcdef-x-0123456789abcdef", FileKind.PIN),
        ("../cleaner-offset-checkpoint", FileKind.MARK),
        ("../meta.properties", FileKind.MARK),
        ("../.lock", FileKind.MARK),
        ("notes.txt", FileKind.OTHER),
        ("below/notes.txt", FileKind.OTHER),
        ("../notes.txt", FileKind.OTHER),
        ("../lost+found/notes.txt", FileKind.OTHER),
    ],
)
def test_bytes_are_seen_in_every_other_file(log: KafkaLog, name: str, kind: FileKind) -> None:
    path = directory(log) / name
    path.parent.mkdir(exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before + b"\0\1" + KEY + b"\2")
    found = log.occurrences("t", [b"user-9999", KEY], now_ms=NOW)
    (file,) = [file for file in found.files if not file.is_clear]
    assert (file.file.kind, file.positions) == (kind, {1: len(before) + 2})
    assert f"at byte {len(before) + 2}" in found.residuals[0].sentence


def test_bytes_are_seen_where_pieces_of_a_file_meet(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, keys = directory(log) / "notes.txt", ErasedKeys([KEY])
    for start in range(20):
        path.write_bytes(b"x" * start + KEY + b"x" * 30)
        (file,) = [one for one in topic_files(directory_log_of(log), "t") if one.path == path]
        for size in (1, 7, 16):
            monkeypatch.setattr(file_occurrences, "_PIECE_SIZE", size)
            assert scan_file(file, keys).positions == {0: start}


def test_a_key_that_begins_or_ends_in_a_hole_of_a_sparse_file_is_seen(log: KafkaLog) -> None:
    path, size = directory(log) / "kl-sparse", 1 << 40
    with path.open("wb") as file:
        file.write(b"x" * (4096 - len(KEY)) + KEY)
        file.truncate(size)
        file.seek(size)
        file.write(KEY + b"x" * 99)
    (file,) = (each for each in topic_files(directory_log_of(log), "t") if each.path == path)
    found = scan_file(file, ErasedKeys([KEY + bytes(9), bytes(9) + KEY])).positions
    assert found == {0: 4096 - len(KEY), 1: size - 9}


@pytest.mark.parametrize("others", [0, 15, 16, 500])
def test_one_of_many_keys_is_seen(log: KafkaLog, others: int) -> None:
    keys = [*(b"user-%06d" % n for n in range(others)), KEY, b"\xff" * 20, b"short"]
    for content in (KEY, b"u" + KEY + b"us", b"user-47" + KEY, KEY[:-1], b"", b"\0" * 50 + KEY):
        (directory(log) / "notes.txt").write_bytes(content)
        found = log.occurrences("t", keys, now_ms=NOW)
        assert found.by_key == ({others: 1} if KEY in content else {})


@pytest.mark.parametrize("seed", range(10))
def test_many_keys_are_found_as_bytes_where_each_alone_is(seed: int) -> None:
    """Also where they begin alike, and one begins another."""
    draw = random.Random(seed)
    heads = (b"customer", b"abc" + bytes(5))  # what is short but for zeros is not looked for
    given = [heads[n % 2] + bytes(draw.choices(b"ab\0\xff", k=n % 7)) for n in range(60)]
    keys = ErasedKeys(given)
    assert len(keys.searched) > 20
    pieces = [key[: draw.randrange(8, 16)] + draw.randbytes(draw.randrange(3)) for key in given[:9]]
    data = b"".join(pieces)
    places = {number: data.find(keys.keys[number]) for number in keys.searched}
    assert dict(keys.find_bytes(data, is_text=False)) == {
        number: place for number, place in places.items() if place >= 0
    }


def test_a_record_has_a_key_if_its_key_is_the_same_bytes(log: KafkaLog) -> None:
    """Of keys of all sizes; the others differ in one byte, or are a byte shorter or longer."""
    keys = [random.Random(size).randbytes(size) for size in range(40)]
    others = [key[:-1] + bytes([key[-1] ^ 1]) for key in keys[1:]]
    others += [key + b"x" for key in keys] + [key[:-1] for key in keys[2:]]
    (directory(log) / f"{BASE}.log").write_bytes(batch(*others, *keys, *keys[:5]))
    found = log.occurrences("t", keys, now_ms=NOW)
    assert found.by_key == {number: 1 + (number < 5) for number in range(40)}


def test_bytes_that_are_not_a_batch_are_seen_and_named(log: KafkaLog) -> None:
    path = directory(log) / f"{BASE}.log.deleted"
    sound, cut = batch(b"another"), batch(KEY)[:-3]
    path.write_bytes(sound + cut)
    (file,) = [one for one in log.occurrences("t", [KEY], now_ms=NOW).files if not one.is_clear]
    assert (file.records, file.positions) == (1, {0: (sound + cut).index(KEY)})
    assert file.faults[0].startswith(f"at byte {len(sound)}: expected a batch")


def test_a_batch_that_does_not_decode_is_named_and_the_others_are_looked_at(log: KafkaLog) -> None:
    """Damaged bytes, a payload that is no gzip under a right checksum, then a sound batch."""
    record = Record(0, NOW, b"another", b"v")
    parts = [
        batch(KEY),
        batch(b"another")[:-1] + b"\xff",
        batch_data([record], payload=b"no gzip", attributes=layout.CODEC_GZIP),
        batch(b"another", codec=layout.CODEC_GZIP),
        batch(b"another", KEY),
    ]
    path = directory(log) / f"{BASE}.log.deleted"
    path.write_bytes(b"".join(parts))
    (file,) = [one for one in log.occurrences("t", [KEY], now_ms=NOW).files if not one.is_clear]
    assert (file.found, file.records) == ({0: 2}, 4)
    places = [sum(map(len, parts[:number])) for number in (1, 2)]
    assert [fault.split(":")[0] for fault in file.faults] == [f"at byte {at}" for at in places]


def test_messages_of_old_formats_are_looked_at(log: KafkaLog) -> None:
    path = directory(log) / f"{BASE}.log.deleted"
    path.write_bytes(message(0, 0, b"another", b"v") + message(1, 1, KEY, b"v"))
    (file,) = [one for one in log.occurrences("t", [KEY], now_ms=NOW).files if not one.is_clear]
    assert (file.found, file.faults, file.first_offset) == ({0: 1}, [], 1)


def test_an_unreadable_file_proves_nothing(log: KafkaLog, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory(log) / "notes.txt"
    path.write_bytes(b"x")
    opened = file_occurrences.os.open

    def refuse(name: Path, *rest: int) -> int:
        if name == path:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(name, *rest)

    monkeypatch.setattr(file_occurrences.os, "open", refuse)
    (left,) = log.occurrences("t", [KEY], now_ms=NOW).residuals
    assert left.path == path
    assert "Permission denied" in left.sentence


# --- what cannot be looked at ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_directory_that_cannot_be_listed_or_entered_proves_nothing(
    log: KafkaLog, mode: int
) -> None:
    if not can_enter_as_nobody(log.root):
        pytest.skip("others have no right to the directories above")
    below = directory(log) / "below"
    below.mkdir()
    (below / f"{BASE}.log").write_bytes(batch(b"another"))
    below.chmod(mode)
    with as_nobody(), kafkalog.open(log.root, read_only=True) as reader:
        (left,) = reader.occurrences("t", [KEY], now_ms=NOW).residuals
    assert left.path == (below / f"{BASE}.log" if mode else below)
    assert "cannot be read: Permission denied" in left.sentence


def can_enter_as_nobody(root: Path) -> bool:
    """Give everybody the right to list and to enter, from the root of the tests on."""
    for path in (root.parent, *root.parent.parents):
        if path.stat().st_mode & 0o005 != 0o005:
            if not path.name.startswith(("test_", "pytest-")):
                return False
            path.chmod(0o755)
    for path in (root, *root.rglob("*")):
        path.chmod(0o777)
    return True


def test_a_link_to_a_directory_elsewhere_is_reported(log: KafkaLog, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / f"{BASE}.log").write_bytes(batch(KEY))
    (directory(log) / "link").symlink_to(tmp_path / "elsewhere")
    (left,) = log.occurrences("t", [KEY], now_ms=NOW).residuals
    assert left.path == directory(log) / "link"
    assert "not scanned" in left.sentence


# --- and only that --------------------------------------------------------------------------------


def test_other_topics_are_none_of_it(log: KafkaLog) -> None:
    (log.root / f"t-t-0.{'ab' * 16}-delete").mkdir()
    (log.root / f"t-t-0.{'ab' * 16}-delete" / f"{BASE}.log").write_bytes(batch(KEY))
    assert log.occurrences("t", [KEY], now_ms=NOW).residuals == ()


def test_a_staged_file_may_be_another_topics_until_the_journal_knows_its_writer(
    log: KafkaLog,
) -> None:
    def stage(target: str, batch_id: int) -> StagedMessage:
        slug = writer_slug("app", target)
        builder = LogBuilder(log).to("others")
        return builder.stage((KEY, "v"), writer_slug=slug, batch_id=batch_id)

    def commit(target: str, batch_id: int) -> None:
        writer = Writer("app", target, batch_id)
        directory_log_of(log).commit([stage(target, batch_id)], writer=writer, now_ms=NOW)

    stage("others", 5)
    (left,) = log.occurrences("t", [KEY], now_ms=NOW).residuals
    assert "it may be of another topic" in left.sentence
    assert "remove" not in left.remedy
    commit("others", 1)
    assert log.occurrences("t", [KEY], now_ms=NOW).residuals == ()
    (theirs,) = (
        one for one in log.occurrences("others", [KEY], now_ms=NOW).files
        if one.file.kind is FileKind.STAGED
    )  # fmt: skip
    assert theirs.found == {0: 1}
    stage("*", 5)
    commit("*", 1)
    assert kinds(log.occurrences("t", [KEY], now_ms=NOW)) == {FileKind.STAGED_FOR_ANY}


def test_the_directories_of_a_deleted_topic_of_that_name_are_searched(log: KafkaLog) -> None:
    log.append("t", [(KEY, "1")], now_ms=NOW)
    log.alter_topic("t", {"file.delete.delay.ms": "60000"}, now_ms=NOW)
    log.delete_topic("t", now_ms=NOW)
    log.create_topic("t", now_ms=NOW)
    (left,) = log.occurrences("t", [KEY], now_ms=NOW).residuals
    assert left.until_ms == NOW + 60_000
    assert "deleted" in left.sentence


def test_numbers_and_names_are_not_occurrences(log: KafkaLog) -> None:
    """Keys as programs have them, which are also what the log's own files are full of."""
    log.create_topic("customers", config={"retention.ms": "1234567890"})
    log.append("customers", [(f"k{n}", "v" * 100) for n in range(50)], now_ms=NOW)
    log.clean("customers", force=True, now_ms=NOW)
    pins.pin(log.root, Action("app", "one"), directory_log_of(log).state, NOW)
    keys = [
        *(struct.pack(">q", number) for number in (0, 42, 50, NOW, -1)),
        *(b"customers", b"retention.ms", b"1234567890", str(NOW).encode(), b"0", b"t", b"2"),
    ]
    assert log.occurrences("customers", keys, now_ms=NOW).residuals == ()


def test_a_short_key_is_looked_for_among_keys_alone(log: KafkaLog) -> None:
    (directory(log) / "notes.txt").write_bytes(b"user-1")
    assert kinds(log.occurrences("t", [b"user-1"], now_ms=NOW)) == {FileKind.LOG, FileKind.RETIRED}
    assert log.occurrences("t", [b"ser-1"], now_ms=NOW).residuals == ()


def test_preallocated_room_is_not_a_fault(log: KafkaLog) -> None:
    path = directory(log) / f"{BASE}.log.deleted"
    path.write_bytes(batch(b"another") + bytes(5000))
    assert log.occurrences("t", [KEY], now_ms=NOW).residuals == ()


def test_a_record_of_the_key_itself_mentions_nothing(log: KafkaLog) -> None:
    (directory(log) / f"{BASE}.log").write_bytes(batch(KEY, value=KEY))
    assert log.occurrences("t", [KEY], now_ms=NOW).mentions == 0


def test_every_byte_is_counted(log: KafkaLog) -> None:
    shown: list[tuple[int, int]] = []
    found = log.occurrences(
        "t", [KEY], now_ms=NOW, progress=lambda done, of: shown.append((done, of))
    )
    files = [*log.root.iterdir(), *directory(log).iterdir()]
    files = [path for path in files if path.is_file()]
    sizes = sum(path.stat().st_size for path in files)
    assert (len(found.files), found.bytes) == (len(files), sizes)
    assert shown[-1] == (sizes, sizes)
    assert sum(total.files for total in found.by_kind) == len(files)


def test_a_deleted_directory_whose_long_topic_name_is_shortened_is_searched(tmp_path: Path) -> None:
    topic, suffix = "t" * 230, f"-0.{'ab' * 16}-delete"
    with KafkaLog(tmp_path / "log") as log:
        log.create_topic(topic, 1)
        for name in (topic, "u" * 230):
            gone = log.root / (name[: layout.FILE_NAME_MAX - len(suffix)] + suffix)
            gone.mkdir()
            (gone / f"{BASE}.log").write_bytes(batch(KEY))
        found = log.occurrences(topic, [KEY])
    assert [file.file.path.parent.name[:1] for file in found.files if file.file.kind == "log"] == [
        "t", "t",
    ]  # fmt: skip
    assert found.found


def test_every_directory_of_a_broker_is_searched(tmp_path: Path) -> None:
    first, second = BrokerRoot(tmp_path / "a"), BrokerRoot(tmp_path / "b")
    first.partition("t-0")
    second.partition("u-0")
    gone = tmp_path / "b" / f"t-1.{'ab' * 16}-stray"
    gone.mkdir()
    (gone / f"{BASE}.log").write_bytes(batch(KEY))
    for root, name in ((first, "t-0"), (second, "u-0")):
        root.checkpoint("replication-offset-checkpoint", {name: 100})
        root.shut_down()
    with kafkalog.open([tmp_path / "a", tmp_path / "b"], read_only=True) as log:
        found = log.occurrences("t", [KEY])
    assert found.found == 1
    assert gone in {file.file.path.parent for file in found.files}


@pytest.mark.parametrize("keys", [None, 5, object(), b"k", "k", [], [None], [5]])
def test_what_is_not_several_keys_is_refused(keys: Any) -> None:
    with pytest.raises(InvalidInputError, match="key"):
        ErasedKeys(keys)
