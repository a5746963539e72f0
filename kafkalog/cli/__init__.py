"""The command line: `kafkalog <verb> PATH [TOPIC]`; a module per verb, imported when it is called.

What all verbs keep to:

* data goes to the standard output, with `--json` one object a line; messages to the standard error;
* the exit status is 0 when all is well; 1 for damage, a "no", or a fault of the log or the disk;
  2 for wrong usage: options, and whatever raises InvalidInputError, such as an unknown topic;
* an expected error is one line and never a traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import typer

__all__ = ["main", "run"]

VERBS: Final = {
    "topics": "list, create, describe, alter and delete topics",
    "append": "append records, or whole batches of a .log file as they are",
    "read": "print the records of a topic",
    "clean": "remove what newer records have replaced",
    "status": "how each partition stands, who owns the log and who writes to it",
    "dump": "print what a file of a log holds, as kafka-dump-log does",
    "verify": "look for damage in a log directory",
    "adopt": "take a stopped Kafka broker's log directory over",
    "release": "give a log directory to a Kafka broker",
    "warm": "compile the kernels ahead of their first use",
}
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141
"""What a shell reports of a program that died as its reader went away."""


def main() -> None:
    """Run the command line of this process and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit status."""
    import typer

    from kafkalog.cli.output import PipeClosed
    from kafkalog.errors import InvalidInputError, KafkaLogError

    status = 0
    try:
        result = _application(arguments)(
            args=list(arguments), prog_name="kafkalog", standalone_mode=False
        )
        sys.stdout.flush()
        status = result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except (BrokenPipeError, PipeClosed):
        # Python flushes once more at exit, and must not find the closed pipe then.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = PIPE_CLOSED
    except KafkaLogError as fault:
        _complain(str(fault))
        status = 2 if isinstance(fault, InvalidInputError) else 1
    except OSError as fault:
        _complain(f"{fault.filename}: {fault.strerror}" if fault.filename else str(fault))
        status = 1
    except Exception as fault:
        # Those of wrong usage are typer's, or of the package below it: a matter of its release.
        describe = getattr(fault, "format_message", None)
        if describe is None:
            raise
        text = describe()
        # Without any argument the "error" is the help.
        if text.lstrip().startswith("Usage:"):
            sys.stderr.write(text.rstrip() + "\n")
        else:
            _complain(f"{text.rstrip('.')}; see kafkalog {_verb(arguments)} --help")
        status = int(getattr(fault, "exit_code", 2))
    return status


def _complain(text: str) -> None:
    sys.stderr.write(f"kafkalog: {' '.join(text.split())}\n")


def _verb(arguments: Sequence[str]) -> str:
    return arguments[0] if arguments and arguments[0] in VERBS else ""


def _application(arguments: Sequence[str]) -> typer.Typer:
    """Return an application that knows the verb that is called; all of them where none is."""
    import typer

    application = typer.Typer(
        help="Kafka's compacted log as files: look into it, write to it, keep it in order.",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @application.callback(invoke_without_command=True)
    def version(
        version: bool = typer.Option(False, "--version", help="Print the release."),
    ) -> None:
        if version:
            from kafkalog import __version__

            sys.stdout.write(f"kafkalog {__version__}\n")
            raise typer.Exit

    called = _verb(arguments)
    for verb in [called] if called else VERBS:
        module = importlib.import_module(f"kafkalog.cli.{verb}")
        if verb == "topics":
            application.add_typer(module.application(), name=verb, help=_sentence(verb))
        else:
            application.command(verb, help=_help(verb, module.__doc__))(module.command)
    return application


def _help(verb: str, document: str | None) -> str:
    """Return what the list of verbs says, and below it the rest of the module's text."""
    paragraphs = (document or "").split("\n\n")[1:]
    return "\n\n".join([_sentence(verb), *paragraphs])


def _sentence(verb: str) -> str:
    text = VERBS[verb]
    return f"{text[0].upper()}{text[1:]}."
