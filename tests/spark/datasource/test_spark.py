"""What Spark makes of the source. Found with no registration, since nothing here registers it."""

from pathlib import Path
from typing import Any

import pytest

from tests.log_place import in_a_directory, log_in
from tests.unit.datasource.logs import append, append_to, numbered
from tests.unit.storage_engine.broker_root import BrokerRoot

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of topic `t`: k0..k9, then k1 anew and k2 deleted."""
    root = log_in(tmp_path_factory.mktemp("log"))
    append(root, "t", [*numbered(10), (b"k1", b"new"), (b"k2", None)])
    return root


def reading(spark: Any, root: Path, **options: str) -> Any:
    return spark.read.format("kafkalog").options(**{"subscribe": "t", **options}).load(str(root))


def streaming(
    spark: Any, root: Path, checkpoint: Path, *, once: bool = False, **options: str
) -> list[list[int]]:
    """Run a query to its end; the sorted offsets of each of its batches."""
    batches: list[list[int]] = []
    frame = spark.readStream.format("kafkalog").options(**{"subscribe": "t", **options})
    query = (
        frame.load(str(root))
        .writeStream.foreachBatch(
            lambda frame, _: batches.append(sorted(row.offset for row in frame.collect()))
        )
        .option("checkpointLocation", str(checkpoint))
        .trigger(**({"once": True} if once else {"availableNow": True}))
        .start()
    )
    assert query.awaitTermination(120)
    return batches


@pytest.mark.chosen
def test_a_batch_reads_earliest_to_latest(spark: Any, log: Path) -> None:
    frame = reading(spark, log)

    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    rows = sorted(frame.collect(), key=lambda row: row.offset)
    assert [row.offset for row in rows] == list(range(12))
    assert (bytes(rows[10].key), bytes(rows[10].value)) == (b"k1", b"new")
    assert rows[11].value is None
    assert rows[0].timestampType == 0
    assert frame.selectExpr("unix_millis(min(timestamp)) as ms").first().ms == 1_700_000_000_000


@in_a_directory("a frame of a store is of the moment of its plan")
def test_a_fixed_end_stays_while_an_open_one_moves(spark: Any, tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(4))
    fixed = reading(spark, tmp_path, endingOffsets='{"t":{"0":3}}')
    moving = reading(spark, tmp_path, minPartitions="2")
    assert (fixed.count(), moving.count()) == (3, 4)

    append(tmp_path, "t", numbered(2))

    assert (fixed.count(), moving.count()) == (3, 6)


def test_headers_are_a_column_on_request(spark: Any, tmp_path: Path) -> None:
    import pyarrow as pa

    from kafkalog.schema import HEADERS
    from kafkalog.storage_engine.place import open_log

    root = log_in(tmp_path)
    with open_log(root) as engine:
        engine.create_topic("t")
        headers = [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None]
        engine.append(
            "t",
            pa.table(
                {
                    "key": pa.array([b"a", b"b"], pa.binary()),
                    "value": pa.array([b"", b""], pa.binary()),
                    "headers": pa.array(headers, HEADERS),
                }
            ),
            now_ms=1,
        )

    rows = reading(spark, root, includeHeaders="true").orderBy("offset").collect()

    assert [(h.key, h.value and bytes(h.value)) for h in rows[0].headers] == [
        ("h", b"1"),
        ("h", None),
    ]
    assert rows[1].headers is None


def test_a_narrower_schema_is_honoured(spark: Any, log: Path) -> None:
    frame = (
        spark.read.format("kafkalog").option("subscribe", "t").schema("offset bigint, key binary")
    )

    assert frame.load(str(log)).orderBy("offset").first().asDict() == {"offset": 0, "key": b"k0"}


@in_a_directory("a frame of a store is of the moment of its plan")
def test_a_view_follows_the_log_in_a_dataframe_and_in_sql(spark: Any, tmp_path: Path) -> None:
    append(tmp_path, "t", [*numbered(3), (b"k1", b"new"), (b"k2", None)])
    frame = reading(spark, tmp_path, view="latest")
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW latest_records USING kafkalog "
        f"OPTIONS (path '{tmp_path}', subscribe 't', view 'latest')"
    )

    def found() -> list[dict[bytes, bytes]]:
        tables = (frame, spark.sql("SELECT key, value FROM latest_records"))
        return [{bytes(r.key): bytes(r.value) for r in table.collect()} for table in tables]

    assert found() == [{b"k0": b"v0", b"k1": b"new"}] * 2
    append(tmp_path, "t", [(b"k0", None), (b"k9", b"late")])
    assert found() == [{b"k1": b"new", b"k9": b"late"}] * 2


@pytest.mark.chosen
def test_a_stream_is_cut_in_exact_batches_and_goes_on_from_its_checkpoint(
    spark: Any, tmp_path: Path
) -> None:
    root, checkpoint = log_in(tmp_path), tmp_path / "checkpoint"
    append(root, "t", numbered(15))
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "6"}

    batches = streaming(spark, root, checkpoint, **options)
    assert batches == [list(range(6)), list(range(6, 12)), [12, 13, 14]]

    append(root, "t", numbered(2))
    assert streaming(spark, root, checkpoint, **options) == [[15, 16]]


def test_a_stream_from_now_on_begins_where_it_was_started(spark: Any, tmp_path: Path) -> None:
    root, checkpoint = log_in(tmp_path), tmp_path / "checkpoint"
    append(root, "t", numbered(4))
    assert streaming(spark, root, checkpoint) == [[]]

    append(root, "t", numbered(3))

    assert streaming(spark, root, checkpoint) == [[4, 5, 6]]


def test_once_takes_all_whatever_the_limit(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    append(root, "t", numbered(9))
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "2"}

    assert streaming(spark, root, tmp_path / "checkpoint", once=True, **options) == [list(range(9))]


def test_a_mistake_in_a_stream_is_reported_when_it_starts(
    spark: Any, log: Path, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=r"ending offset not valid in streaming queries"):
        streaming(spark, log, tmp_path / "checkpoint", endingOffsets="latest")


def test_the_limit_is_shared_as_format_kafka_shares_it(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    append_to(root, "t", {0: 20, 1: 4, 2: 1})

    batches = streaming(
        spark, root, tmp_path / "checkpoint", startingOffsets="earliest", maxOffsetsPerTrigger="10"
    )

    assert [len(batch) for batch in batches] == [10, 10, 5]
    assert sorted(offset for batch in batches for offset in batch) == sorted(
        [*range(20), *range(4), *range(1)]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subscirbe": "t"}, "unknown option 'subscirbe', did you mean subscribe"),
        ({"subscribe": "x"}, "'x' does not exist"),
        ({"startingTimestamp": "now"}, "startingTimestamp: Expected a single long"),
        ({"startingTimestamp": "9000000000000"}, "No offset matched from request of topic-parti"),
    ],
)
def test_a_mistake_is_reported_in_a_sentence(
    spark: Any, log: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match="PYTHON_DATA_SOURCE_ERROR") as error:
        reading(spark, log, **options).collect()

    assert message in str(error.value)


@in_a_directory("several directories")
@pytest.mark.parametrize("count", [1, 2])
def test_a_list_of_paths_is_read_as_one_log(spark: Any, tmp_path: Path, count: int) -> None:
    roots = [BrokerRoot(tmp_path / name) for name in "ab"[:count]]
    for number, root in enumerate(roots):
        root.partition(f"t-{number}", (0,), 10)

    frame = spark.read.format("kafkalog").option("subscribe", "t")

    assert frame.load([str(root.path) for root in roots]).count() == 10 * count


@in_a_directory("files")
def test_a_path_to_a_file_is_reported_at_load(spark: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()

    with pytest.raises(Exception, match="a log is a directory, this is a file"):
        reading(spark, file)
