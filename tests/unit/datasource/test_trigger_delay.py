from kafkalog.datasource.micro_batch import TriggerDelay
from kafkalog.datasource.offsets import TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
NOW = 1_700_000_000_000


def test_the_first_batch_never_waits() -> None:
    assert not TriggerDelay(15, 5_000).holds_back({T0: 0}, {T0: 1}, now_ms=NOW)


def test_a_batch_waits_for_the_least_count_of_offsets() -> None:
    delay = TriggerDelay(15, 5_000, last_trigger_ms=NOW)

    assert delay.holds_back({T0: 0, T1: 0}, {T0: 7, T1: 7}, now_ms=NOW + 1)
    assert not delay.holds_back({T0: 0, T1: 0}, {T0: 7, T1: 8}, now_ms=NOW + 2)
    assert delay.last_trigger_ms == NOW + 2


def test_a_batch_waits_no_longer_than_the_longest_delay() -> None:
    delay = TriggerDelay(15, 5_000, last_trigger_ms=NOW)

    assert delay.holds_back({T0: 0}, {T0: 1}, now_ms=NOW + 4_999)
    assert not delay.holds_back({T0: 0}, {T0: 1}, now_ms=NOW + 5_000)
    assert delay.holds_back({T0: 0}, {T0: 1}, now_ms=NOW + 5_001)


def test_a_new_partition_counts_from_its_first_offset_ever() -> None:
    delay = TriggerDelay(15, 5_000, last_trigger_ms=NOW)

    assert not delay.holds_back({T0: 3}, {T0: 3, T1: 15}, now_ms=NOW)


def test_a_partition_that_shrank_counts_against_the_others() -> None:
    delay = TriggerDelay(15, 5_000, last_trigger_ms=NOW)

    assert delay.holds_back({T0: 10, T1: 0}, {T0: 5, T1: 19}, now_ms=NOW)
