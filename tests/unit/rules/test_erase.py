"""Keys that are erased: nothing has them afterwards, as other tools see it, and others stay."""

from __future__ import annotations

import pyarrow as pa
import pytest
from aiokafka.record.memory_records import MemoryRecords

from kafkalog.errors import InvalidInputError
from tests.builders.log_builder import NOW_MS as NOW
from tests.builders.log_contents import latest_records, records
from tests.unit.rules.acts import Written
from tests.unit.rules.places import DAY_MS as DAY
from tests.unit.rules.places import Place

KEY = "user-4711"
LONGER = f"{KEY}-2"
"""Another key that begins with it."""


def fill(place: Place, **config: object) -> Place:
    """A topic with the key in clean, dirty, replaced and active segments, among many others."""
    place.topic("t", 2, **{"segment_bytes": 3_000, **config})
    for turn in range(3):
        rows = [(f"user-{n}", f"turn {turn} " * 9) for n in range(4700, 4730)]
        place.append(*rows, (LONGER, f"{turn}"))
    place.log.clean("t", force=True, now_ms=NOW)
    return place.append_each(*((KEY, f"turn {turn} " * 9) for turn in range(3, 5)))


def with_bytes(place: Place, key: str) -> list[str]:
    """The files or objects that have a key's bytes, and not those of the longer one alone."""
    return [
        name
        for name, data in place.everything().items()
        if key.encode() in (data if key == LONGER else data.replace(LONGER.encode(), b""))
    ]


def decoded_keys(place: Place) -> set[bytes]:
    """All keys of all batches of the place, also of dropped ones, as aiokafka decodes them."""
    found: set[bytes] = set()
    for name, data in place.everything().items():
        if ".log" in name or name.endswith((".staged", ".mixed")):
            batches = MemoryRecords(place.batches_of(name, data))
            while batches.has_next():
                found.update(
                    record.key for record in batches.next_batch() if record.key is not None
                )
    return found


def is_nowhere(place: Place, key: str = KEY) -> bool:
    return not with_bytes(place, key) and key.encode() not in decoded_keys(place)


def erased(place: Place, *keys: str, **options: object):
    given = [*keys] or [KEY]
    return place.log.erase("t", given, **{"now": True, "now_ms": NOW, **options})


def sentences(erasure) -> str:
    return "\n".join(f"{one.path}: {one.sentence}" for one in erasure.after.residuals)


# --- it is gone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_nothing_has_the_key_afterwards(place: Place, codec: str) -> None:
    fill(place, compression_type=codec)
    before = latest_records(place.log)
    assert KEY.encode() in decoded_keys(place)
    erasure = erased(place)
    assert len({file.file.kind for file in erasure.before.files if file.found}) >= 2
    assert erasure.is_erased
    assert is_nowhere(place)
    before.pop(KEY.encode())
    assert latest_records(place.log) == before


def test_offsets_and_values_of_other_records_stay(place: Place) -> None:
    place.topic().append(("a", "1"), (KEY, "2"), ("b", "3"))
    erased(place)
    assert records(place.log) == [(0, 0, b"a", b"1"), (0, 2, b"b", b"3")]
    assert place.log.offsets("t") == {0: (0, 4)}


def test_the_key_of_a_larger_one_stays(place: Place) -> None:
    fill(place)
    erased(place)
    assert LONGER.encode() in decoded_keys(place)
    assert erased(place, LONGER).is_erased
    assert with_bytes(place, LONGER) == with_bytes(place, KEY) == []


def test_many_keys_are_erased_at_once(place: Place) -> None:
    fill(place)
    keys = [f"user-{n}" for n in range(4700, 4720)]
    erasure = erased(place, *keys)
    assert erasure.is_erased
    assert len(erasure.digests) == 20
    assert sum(end - first for first, end in erasure.deletions.values()) == 20
    assert decoded_keys(place).isdisjoint(key.encode() for key in keys)
    assert b"user-4720" in decoded_keys(place)


def test_the_empty_key_is_a_key(place: Place) -> None:
    place.topic().append(("", "of nobody"), ("a", "1"))
    assert erased(place, "").is_erased
    assert decoded_keys(place) == {b"a"}


@pytest.mark.parametrize("keys", [[], [None], "key", b"key"])
def test_keys_that_are_not_a_list_are_refused(place: Place, keys: list[str]) -> None:
    with pytest.raises(InvalidInputError, match="key"):
        place.topic().log.erase("t", keys, now_ms=NOW)


def test_keys_are_not_shown_in_the_clear(place: Place) -> None:
    place.topic().append((KEY, "1"))
    assert KEY not in repr(place.log.erase("t", [KEY], now_ms=NOW))


@pytest.mark.parametrize("policy", ["delete", ""])
def test_what_is_not_compacted_is_refused_in_one_line(place: Place, policy: str) -> None:
    place.topic(policy=policy).append((KEY, "1"))
    with pytest.raises(InvalidInputError, match=r"t: its cleanup.policy is .*retention.ms") as told:
        place.log.erase("t", [KEY], now_ms=NOW)
    assert "\n" not in str(told.value)
    assert place.log.occurrences("t", [KEY], now_ms=NOW).found == 1


def test_records_below_the_log_start_go_too(place: Place) -> None:
    place.topic(policy="compact,delete", retention_ms=-1)
    place.append((KEY, "1"), ("other", "1"), ("other", "2"))
    place.log.delete_records("t", 0, 2, now_ms=NOW)
    assert KEY.encode() in decoded_keys(place)
    assert erased(place).is_erased
    assert is_nowhere(place)


# --- the deletions -------------------------------------------------------------------------------


def test_a_key_is_deleted_wherever_it_was_written(place: Place) -> None:
    place.topic(partitions=4)
    rows = {
        "key": pa.array([b"k", b"k", b"k", b"other"], pa.binary()),
        "value": pa.array([b"v"] * 4, pa.binary()),
        "partition": pa.array([0, 1, 3, 2], pa.int32()),
    }
    place.log.append("t", pa.RecordBatch.from_pydict(rows), now_ms=NOW)
    number = place.engine.state().number
    erasure = place.log.erase("t", ["k"], now_ms=NOW)
    assert erasure.deletions == {0: (1, 2), 1: (1, 2), 3: (1, 2)}
    ends = {partition: end for partition, (_, end) in place.log.offsets("t").items()}
    assert ends == {0: 2, 1: 2, 2: 1, 3: 2}
    assert number < place.engine.state().number
    assert erased(place, "k").is_erased


def test_nothing_is_written_for_a_key_that_is_nowhere(place: Place) -> None:
    fill(place)
    before, number = place.log.offsets("t"), place.engine.state().number
    erasure = place.log.erase("t", ["user-9999"], now_ms=NOW)
    assert (erasure.deletions, erasure.cleanings, erasure.is_erased) == ({}, (), True)
    assert (place.log.offsets("t"), place.engine.state().number) == (before, number)


def test_a_deletion_stays_until_its_horizon_and_is_not_written_again(place: Place) -> None:
    fill(place, delete_retention_ms=DAY)
    times: list[int] = []
    waiting = {"now": False, "wait": times.append}
    first = erased(place, **waiting)
    (left,) = first.after.residuals
    assert left.until_ms == NOW + DAY
    assert "the deletion itself" in left.sentence
    assert decoded_keys(place) & {KEY.encode()}
    assert latest_records(place.log).get(KEY.encode()) is None

    early = erased(place, **waiting, now_ms=NOW + DAY - 1)
    assert early.deletions == {}
    assert [one.until_ms for one in early.after.residuals] == [NOW + DAY]

    late = erased(place, **waiting, now_ms=NOW + DAY)
    assert (late.deletions, late.is_erased) == ({}, True)
    assert is_nowhere(place)


def test_with_now_the_deletions_of_other_keys_stay(place: Place) -> None:
    fill(place).append(*((f"user-{n}", None) for n in range(4712, 4720)))
    assert erased(place).is_erased
    kept = decoded_keys(place)
    assert {f"user-{n}".encode() for n in range(4712, 4720)} <= kept
    assert KEY.encode() not in kept


def test_a_key_that_was_deleted_and_cleaned_before_goes_now(place: Place) -> None:
    """Its deletion lies in the clean section, and nothing is dirty."""
    fill(place).append((KEY, None))
    place.log.clean("t", force=True, now_ms=NOW)
    erasure = erased(place)
    assert (erasure.deletions, erasure.is_erased) == ({}, True)
    assert is_nowhere(place)


def test_a_key_that_comes_back_is_found(place: Place) -> None:
    fill(place)
    came_back: list[object] = []

    def progress(step: str, done: int, of: int) -> None:
        if step == "looking again" and not came_back:
            came_back.append(place.append((KEY, "back")))

    erasure = erased(place, progress=progress)
    assert came_back
    assert not erasure.is_erased
    assert "1 record of 1 key" in sentences(erasure)
    assert erased(place).is_erased


@pytest.mark.parametrize("step", ["cleaning", "looking again"])
def test_an_erasure_that_was_interrupted_goes_on(place: Place, step: str) -> None:
    fill(place)

    def interrupt(at: str, done: int, of: int) -> None:
        if at == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        erased(place, progress=interrupt)
    erasure = erased(place)
    assert (erasure.deletions, erasure.is_erased) == ({}, True)
    assert is_nowhere(place)


# --- what stands in the way ----------------------------------------------------------------------


def test_what_a_task_has_staged_is_named_and_its_commit_brings_the_key_back(place: Place) -> None:
    staged = fill(place).stage((KEY, "staged"), ("another", "staged"), writer_slug="ab" * 16)
    (left,) = erased(place).after.residuals
    assert str(left.path).endswith(staged.files[0].name)
    assert left.until_ms is not None
    place.engine.commit([staged], now_ms=NOW)
    assert KEY.encode() in latest_records(place.log)
    assert erased(place).is_erased
    assert is_nowhere(place)


def test_what_is_committed_during_the_last_look_is_not_proof(place: Place) -> None:
    staged = fill(place).stage((KEY, "staged"), writer_slug="ab" * 16)
    committed: list[object] = []

    def progress(step: str, done: int, of: int) -> None:
        if step == "looking again" and done == of and not committed:
            committed.append(place.engine.commit([staged], now_ms=NOW))

    erasure = erased(place, progress=progress)
    assert committed
    (left,) = erasure.after.residuals
    assert left.remedy == "stop the writers of the key, then erase again"
    assert erasure.after.record_number == place.engine.state().number


def test_what_was_staged_and_given_up_is_not_an_occurrence_any_more(place: Place) -> None:
    staged = fill(place).stage((KEY, "staged"), writer_slug="ab" * 16)
    assert not erased(place).is_erased
    place.engine.abort([staged], now_ms=NOW)
    assert erased(place).is_erased
    assert is_nowhere(place)


def test_a_lag_is_named(place: Place) -> None:
    fill(place, min_compaction_lag_ms=DAY)
    lags = [one for one in erased(place).after.residuals if "min.compaction.lag.ms" in one.sentence]
    assert lags
    assert {one.until_ms for one in lags} == {NOW + DAY}
    assert erased(place, now_ms=NOW + DAY).is_erased
    assert is_nowhere(place)


def test_what_is_damaged_is_not_proof(place: Place) -> None:
    sizes = {name: len(data) for name, data in fill(place).regroup().content().items()}
    name = max(sizes, key=lambda each: sizes[each])
    repair = place.spoil([*sizes].index(name), 100)
    erasure = erased(place, "user-9999")
    assert not erasure.is_erased
    assert f"{name}: its content is unknown: at byte 0" in sentences(erasure)
    repair()
    assert erased(place, "user-9999").is_erased


def test_a_partition_that_cannot_be_cleaned_says_why(place: Place) -> None:
    place.topic(segment_bytes=100).append((KEY, "1"), ("a", "1")).rounds(3, "ab")
    repair = place.spoil(1)
    erasure = erased(place)
    assert not erasure.is_erased
    assert "It is uncleanable" in sentences(erasure)
    repair()
    assert erased(place).is_erased
    assert is_nowhere(place)


def test_records_of_aborted_transactions_go_and_control_records_are_none(place: Place) -> None:
    log = Written.create(place)
    log.transact(1, 7, 8)
    log.abort(1)
    log.data(9)
    found = place.log.occurrences("t", [b"7", b"\0\0\0\0"], now_ms=0)
    assert dict(found.by_key) == {0: 1}
    erasure = place.log.erase("t", [b"7"], now=True, now_ms=0)
    assert (erasure.deletions, erasure.is_erased) == ({}, True)
    assert log.keys() == [9]


def test_an_open_transaction_is_named_and_outlives_no_deletion(place: Place) -> None:
    log = Written.create(place)
    log.data(7)
    log.transact(1, 7)
    erasure = place.log.erase("t", [b"7"], now=True, now_ms=0)
    assert not erasure.is_erased
    assert "The transaction of producer 1 is open from offset 1" in sentences(erasure)
    log.end += 1  # the deletion
    log.commit(1)
    assert place.log.erase("t", [b"7"], now=True, now_ms=0).is_erased
    assert latest_records(place.log) == {}


def test_an_aborted_deletion_deletes_nothing(place: Place) -> None:
    log = Written.create(place)
    log.data(7)
    log.data(7, producer=1, transactional=True, tombstones=True)
    log.abort(1)
    erasure = place.log.erase("t", [b"7"], now=True, now_ms=0)
    assert (erasure.deletions, erasure.is_erased) == ({0: (3, 4)}, True)


# --- the search ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["key", "value", "header", "header name"])
def test_what_other_records_mention_is_told_and_is_found_only_where_that_is_wanted(
    place: Place, where: str
) -> None:
    text = f"about {KEY}"
    headers = {"header": [("h", text.encode())], "header name": [(text, b"")]}.get(where, [])
    record = (text if where == "key" else "another", text if where == "value" else None, headers)
    place.topic().log.append("t", [record], now_ms=NOW)
    found = place.log.occurrences("t", [KEY], now_ms=NOW)
    assert (found.mentions, found.residuals) == (1, ())
    (left,) = place.log.occurrences("t", [KEY], strict=True, now_ms=NOW).residuals
    assert "1 record with another key" in left.sentence


def test_it_names_the_commit_as_of_which_it_is_so(place: Place) -> None:
    place.topic().append(("a", "1"))
    for _ in range(2):
        found = place.log.occurrences("t", [KEY], now_ms=NOW)
        expected = place.engine.state().number, {0: place.log.offsets("t")[0][1]}
        assert (found.record_number, found.high_watermarks) == expected
        place.append(("another", "1"))


def test_a_search_changes_nothing(place: Place) -> None:
    place.topic().append((KEY, "1"))
    before = place.everything()
    assert place.other(read_only=True).occurrences("t", [KEY], now_ms=NOW).found == 1
    assert place.everything() == before
