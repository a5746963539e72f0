import pyarrow as pa
import pytest

from kafkalog.storage_engine.records.murmur2 import partition_of


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 100])
def test_a_keys_partition_is_the_one_that_the_sink_takes(size: int) -> None:
    from kafkalog.storage_engine.records.records import murmur2_partitions

    keys = [bytes((n * 37 + i * 11) % 256 for i in range(size)) for n in range(20)]

    found = murmur2_partitions(pa.array(keys, pa.binary()), 7).tolist()

    assert [partition_of(key, 7) for key in keys] == found
