"""Runs the cleaner as its own process, until SIGTERM or Ctrl-C ends it.

It works like kafkalog.open(path, cleaner=True) in another program: it cleans what is due, the
filthiest partition first, and applies retention. Several cleaners may run on one log. A signal
aborts a running cleaning without harm; the exit status is 0.

--check starts none. It is what a container's probes and a script ask.

--config takes Kafka's settings, as in log.cleaner.threads=2. With kafkalog.cleaner.spill=false and
kafkalog.cleaner.merge.batches=false it cleans exactly as Kafka does.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from kafkalog.cli.app.arguments import path_argument
from kafkalog.cli.app.opened import open_readable, open_writable
from kafkalog.cli.app.stop_signals import stop_signals
from kafkalog.cli.terminal.config_text import configs
from kafkalog.cli.terminal.log_lines import print_details
from kafkalog.cli.terminal.output import counted, note

if TYPE_CHECKING:
    from kafkalog.cleaner.schedule.thread import CleanerThread
    from kafkalog.storage_engine.log.log import Log


EXAMPLES: Final = (
    "kafkalog cleaner /data/shop",
    "kafkalog cleaner /data/shop --threads 2 --config log.cleaner.io.max.bytes.per.second=5e7",
    "kafkalog cleaner /data/shop --metrics-port 9308 --verbose",
)
_METRICS_ADDRESS: Final = "127.0.0.1"


@path_argument
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="1",
    help="Partitions cleaned at a time.",
)
@click.option(
    "--backoff-ms",
    type=click.IntRange(min=0),
    metavar="MS",
    show_default="15000",
    help="Pause when nothing is due.",
)
@click.option(
    "--config", multiple=True, metavar="NAME=VALUE", help="A setting of the cleaner; repeatable."
)
@click.option(
    "--metrics-port",
    type=click.IntRange(min=0, max=65535),
    metavar="N",
    help="Serve Prometheus metrics on this port, at /metrics; 0: any port.",
)
@click.option(
    "--metrics-address",
    metavar="ADDRESS",
    show_default=_METRICS_ADDRESS,
    help="The address that serves the metrics; 0.0.0.0 for all.",
)
@click.option(
    "--check", is_flag=True, help="Only exit: with 0 if a cleaner runs on the log, else with 1."
)
@click.option("--verbose", "-v", is_flag=True, help="A line for each cleaning: why, and what went.")
def command(
    path: str,
    threads: int | None,
    backoff_ms: int | None,
    config: tuple[str, ...],
    metrics_port: int | None,
    metrics_address: str | None,
    check: bool,
    verbose: bool,
) -> None:
    """Clean until a signal ends it."""
    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.schedule.thread import CleanerThread
    from kafkalog.cleaner.shelves import shelf_of
    from kafkalog.errors import InvalidInputError

    if check:
        _check(path)
        return
    given = configs(config)
    _add(given, "log.cleaner.threads", "--threads", threads)
    _add(given, "log.cleaner.backoff.ms", "--backoff-ms", backoff_ms)
    settings = CleanerConfig.parse(given)
    if settings.threads == 0:  # Kafka allows it, since a broker has other work
        raise InvalidInputError("log.cleaner.threads=0: expected at least one that cleans")
    if metrics_address is not None and metrics_port is None:
        raise InvalidInputError(
            f"--metrics-address {metrics_address}: metrics are served with --metrics-port alone"
        )
    if metrics_address == "":  # a socket would listen on every address
        raise InvalidInputError("--metrics-address: expected an address, 0.0.0.0 for all")
    log = open_writable(path)
    shelf_of(log).check_cleanable()
    if verbose:
        print_details()
    with stop_signals() as stop, log:
        cleaner = CleanerThread(log, settings)
        with _metrics(log, cleaner, metrics_port, metrics_address or _METRICS_ADDRESS):
            note(f"{log.root}: the cleaner runs")
            cleaner.start()
            try:
                stop.wait()
            finally:
                cleaner.stop()
    aborts = f" ({counted(cleaner.aborts, 'other')} broken off)" if cleaner.aborts else ""
    note(
        f"{log.root}: the cleaner stopped: {counted(cleaner.cleanings, 'cleaning')}{aborts} removed"
        f" {counted(cleaner.records_removed, 'record')} and "
        f"{counted(cleaner.bytes_removed, 'byte')}, {counted(cleaner.failures, 'failure')}"
    )


def _check(path: str) -> None:
    """Raise KafkaLogError unless a cleaner is known to run on a log."""
    from kafkalog.cleaner.shelves import moment_of
    from kafkalog.errors import KafkaLogError
    from kafkalog.storage_engine.fs import clock

    with open_readable(path) as log:
        is_running = moment_of(log, clock.now_ms()).is_cleaner_running
        if is_running is None:
            raise KafkaLogError(
                f"{log.root}: nothing tells whether a cleaner runs (expected a directory with "
                "locks). Ask its metrics."
            )
        if not is_running:
            raise KafkaLogError(
                f"{log.root}: no cleaner runs. Start `kafkalog cleaner {shlex.quote(path)}`."
            )


def _add(given: dict[str, str], name: str, option: str, value: int | None) -> None:
    """Add an option to the settings by --config; raises InvalidInputError if they differ."""
    from kafkalog.errors import InvalidInputError

    if value is None:
        return
    if given.get(name, str(value)) != str(value):
        raise InvalidInputError(
            f"{option} {value} and --config {name}={given[name]}: give one of them"
        )
    given[name] = str(value)


@contextlib.contextmanager
def _metrics(log: Log, cleaner: CleanerThread, port: int | None, address: str) -> Iterator[None]:
    if port is None:
        yield
        return
    from kafkalog.cleaner.metrics import served

    with served(log, cleaner, port, address=address) as taken:
        note(f"metrics at http://{address}:{taken}/metrics")
        yield
