"""A warning if no cleaner cleans a topic that a stream writes.

`Log.neglect` says so from the log alone. This needs no memory of earlier looks, which Spark would
lose: it ends a worker that was idle for a minute. It comes once per query, topic and process.
"""

from __future__ import annotations

import logging

from kafkalog.errors import KafkaLogError
from kafkalog.sink.options import SinkOptions
from kafkalog.sink.shared_log import shared_log
from kafkalog.storage_engine.fs import files

_log = logging.getLogger("kafkalog.sink")
_warned: set[tuple[str, str]] = set()


def warn_of_backlog(options: SinkOptions, query_id: str, now_ms: int) -> None:
    """Warn, after the commit, that no cleaner cleans the option's topic; raise nothing."""
    if options.topic is None or (query_id, options.topic) in _warned:
        return
    try:
        found = shared_log(options.root).neglect(options.topic, now_ms)
    except (KafkaLogError, OSError) as fault:
        files.pass_on(fault)
        _log.debug("%s: whether a cleaner is at work is unknown: %s", options.root, fault)
        return
    if found is not None:
        _warned.add((query_id, options.topic))
        _log.warning("%s", found)
