"""The command line: `kafkalog <verb> PATH [TOPIC]`; a module per verb, imported when it is called.

Rules of all verbs:

- with KAFKALOG_PATH the PATH may be left out (`verb_command`);
- data goes to the standard output, with `--json` one object per line; messages go to the standard
  error;
- colours and progress bars appear only on terminals (`colours`);
- the exit status is 0 when all is well, and 1 for damage, a "no", or a fault of the log or the
  disk;
- it is 2 for wrong usage: options, and any InvalidInputError, as for an unknown topic;
- an expected error is one line, never a traceback.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import click

__all__ = ["main", "run"]

VERBS: Final = {
    "append": "append records, or whole batches of a .log file unchanged",
    "read": "print the records of a topic",
    "tail": "print the last records of a topic, and follow it",
    "clean": "remove obsolete records now",
    "cleaner": "run the cleaner until you stop it",
    "explain": "say why a topic is not compacted, and what would change it",
    "status": "print each partition's state, and the writers, readers and cleaners",
    "ui": "show a log as a picture, in a browser on this machine",
    "writers": "list the writers of a log, or forget one and its last batch",
    "groups": "list the consumer groups of a broker's directory, and where they were",
    "dump": "print what a file of a log holds, as kafka-dump-log does",
    "verify": "look for damage in a log directory",
    "delete-records": "delete the records before an offset",
    "erase": "delete keys for good, and prove that no file has them",
    "copy": "copy a log to another place, and later what is new",
    "adopt": "take over a stopped Kafka broker's log directory",
    "release": "give a log directory to a Kafka broker",
    "doctor": "check Java, Spark, Python, memory and file locks, and say what to do",
    "topics": "list, create, describe, alter and delete topics",
}
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141
"""The status that a shell reports for a program that died because its reader closed the pipe."""


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        _open_streams()
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def _open_streams() -> None:
    """Open missing standard streams, and let them escape text that they cannot encode."""
    # Open them in this order, so that no file of a log gets the number of a stream.
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run(arguments: Sequence[str]) -> int:
    """Run a command line; return the exit status."""
    from kafkalog.cli.terminal.log_lines import LogLines

    with LogLines(holds_back=_verb(arguments) != "cleaner") as lines:
        status = _run(arguments)
        lines.is_failed = status != 0
    return status


def _run(arguments: Sequence[str]) -> int:
    if [*arguments] == ["--version"]:
        return _print_version()  # without click, whose import takes most of the time
    import click

    from kafkalog.cli.terminal.output import PipeClosed, complain, flush
    from kafkalog.errors import InvalidInputError, KafkaLogError

    status = 0
    try:
        result = _application(arguments)(
            args=list(arguments), prog_name="kafkalog", standalone_mode=False
        )
        flush()
        status = result if isinstance(result, int) else 0
    except (KeyboardInterrupt, click.Abort):
        status = INTERRUPTED
    except (BrokenPipeError, PipeClosed):
        _silence()
        status = PIPE_CLOSED
    except SystemExit as fault:
        # click exits like this after completion, and when the reader of a help has gone.
        # Everything is printed by then.
        _silence()
        status = PIPE_CLOSED if fault.code else 0
    except KafkaLogError as fault:
        complain(str(fault))
        status = 2 if isinstance(fault, InvalidInputError) else 1
    except OSError as fault:
        # If the error names no file, name the path that the verb was given.
        given = next((text for text in arguments if os.access(text, os.F_OK)), "")
        where = fault.filename or given
        text = fault.strerror or str(fault)
        complain(f"{where}: {text}" if where else text)
        status = 1
    except click.ClickException as fault:
        text = fault.format_message()
        # Without any argument the "error" is the help.
        if text.lstrip().startswith("Usage:"):
            sys.stderr.write(text.rstrip() + "\n")
        else:
            complain(f"{text.rstrip('.')}; see kafkalog {_called(arguments)} --help")
        status = fault.exit_code
    if status not in (0, PIPE_CLOSED):
        try:
            sys.stdout.flush()
        except OSError:
            _silence()
    return status


def _print_version() -> int:
    from kafkalog import __compiled__, __version__

    kernels = "compiled" if __compiled__ else "not compiled, much slower"
    sys.stdout.write(f"kafkalog {__version__} (kernels: {kernels})\n")
    return 0


def _silence() -> None:
    """Let nothing more be written: Python flushes at exit, and must not find the fault again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _verb(arguments: Sequence[str]) -> str:
    return arguments[0] if arguments and arguments[0] in VERBS else ""


def _called(arguments: Sequence[str]) -> str:
    """Return what of a command line names a verb: `append`, `topics create`, or nothing."""
    verb = _verb(arguments)
    if verb != "topics":
        return verb
    from kafkalog.cli.topics import VERBS as BELOW

    return f"{verb} {arguments[1]}" if len(arguments) > 1 and arguments[1] in BELOW else verb


def _application(arguments: Sequence[str]) -> click.Group:
    """Return an application that knows the verb that is called; all of them where none is."""
    from kafkalog.cli.app.verb_command import Verbs

    application = Verbs(
        help="Kafka's compacted log as files: look into it, write to it, keep it in order.",
        no_args_is_help=True,
        context_settings={"show_default": True},
        params=[_version_option()],
    )
    called = _verb(arguments)
    for verb in [called] if called else VERBS:
        application.add_command(_command(verb))
    return application


@functools.cache
def _command(verb: str) -> click.Command:
    """Return a verb as click runs it; click takes a function's parameters away from it."""
    import click

    from kafkalog.cli.app.verb_command import VerbCommand, examples

    name = verb.replace("-", "_")
    module = importlib.import_module(f"kafkalog.cli.{name}")
    shown = examples(module.EXAMPLES)
    if verb == "topics":
        made: click.Command = module.application(name=verb, help=_sentence(verb), epilog=shown)
        return made
    text = _help(verb, module.__doc__)
    return click.command(verb, cls=VerbCommand, help=text, epilog=shown)(module.command)


def _version_option() -> click.Option:
    import click

    def print_version(context: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given:
            context.exit(_print_version())

    return click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=print_version,
        help="Print the release, and whether the kernels are compiled.",
    )


def _help(verb: str, document: str | None) -> str:
    """Return what the list of verbs says, and below it the rest of the module's text."""
    paragraphs = (document or "").split("\n\n")[1:]
    return "\n\n".join([_sentence(verb), *paragraphs])


def _sentence(verb: str) -> str:
    text = VERBS[verb]
    return f"{text[0].upper()}{text[1:]}."
