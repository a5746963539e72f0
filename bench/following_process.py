"""A process that does nothing but follow a topic, through `log.follow` or with a Kafka consumer.

    python -m bench.following_process log PATH | kafka SERVER

A line on the standard input says how many records to follow, from where the last line ended. The
answer has the ms between the moment in each record's value, at which its commit began, and the
moment at which this process had it. The clock is the machine's monotonic one.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from bench.answering_process import AnsweringProcess
from bench.memory import peak_mib

__all__ = ["MOMENT", "TOPIC", "FollowingProcess"]

TOPIC: Final = "t"
MOMENT: Final = struct.Struct(">q")
"""The first bytes of a value: `time.monotonic_ns` before its commit."""
SILENCE_S: Final = 60
"""After such a time without a record a consumer gives up."""


class FollowingProcess(AnsweringProcess):
    """The process, as its parent sees it."""

    def __init__(self, way: str, place: str) -> None:
        super().__init__(__name__, way, place)
        self.follow(0)  # it is at its place now

    def follow(self, count: int) -> tuple[list[float], float]:
        """Return the ms of so many records, which are written meanwhile, and the memory in MiB."""
        ms, mib = self.ask(str(count))
        return ms, mib


def of_log(path: str) -> Iterator[list[bytes]]:
    """Yield values as `log.follow` gives them; first an empty list, once it follows."""
    import kafkalog

    with kafkalog.open(path, read_only=True, create=False) as log:
        followed = log.follow(TOPIC, start="earliest")
        yield []
        for batch in followed:
            yield batch.column("value").to_pylist()


def of_kafka(server: str) -> Iterator[list[bytes]]:
    """Yield values as a consumer of librdkafka gives them; first an empty list, once it follows."""
    from confluent_kafka import Consumer, TopicPartition

    settings = {"group.id": "g", "enable.auto.commit": False, "log_level": 0}
    consumer = Consumer({"bootstrap.servers": server, **settings})
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), timeout=SILENCE_S)
    yield []
    while True:
        message = consumer.poll(SILENCE_S)
        if message is None or message.error():
            raise SystemExit(f"the consumer got no record: {message and message.error()}")
        yield [message.value() or b""]


def main(arguments: Sequence[str]) -> None:
    """Follow, and answer."""
    way, place = arguments
    values = {"log": of_log, "kafka": of_kafka}[way](place)
    next(values)
    last_ns = 0
    for line in sys.stdin:
        ms: list[float] = []
        while len(ms) < int(line):
            given, now_ns = next(values), time.monotonic_ns()
            for value in given:
                (moment_ns,) = MOMENT.unpack_from(value)
                if moment_ns <= last_ns:
                    raise SystemExit("a record came twice, or not in order")
                last_ns = moment_ns
                ms.append((now_ns - moment_ns) / 1e6)
        print(json.dumps([ms, peak_mib()]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
