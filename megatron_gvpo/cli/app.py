"""The application, and how errors become one line each on stderr and an exit code.

0: done. 2: the input or the config is wrong. 85: saved on a signal, please requeue. 1: anything else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

EXIT_FAILED = 1
EXIT_INPUT = 2

app = typer.Typer(
    name="megatron-gvpo",
    help="Post-training of language models on Megatron-Core with rollouts from SGLang.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from megatron_gvpo.cli import checks, runs, samples, servers  # noqa: F401  each registers its commands

    args = list(sys.argv[1:] if argv is None else argv)
    try:
        # Not standalone: typer would print its own boxes around errors, and exit with codes of its own.
        result = app(args=args or ["--help"], standalone_mode=False, prog_name="megatron-gvpo")
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; without this Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (typer.Abort, KeyboardInterrupt):
        return _say(["interrupted"], EXIT_FAILED)
    except Exception as error:
        if usage := _usage(error):
            return _say([usage], EXIT_INPUT)
        # This package's own exceptions are written for the user. Any other one is a bug, and its traceback is wanted.
        if not type(error).__module__.startswith("megatron_gvpo."):
            raise
        return _say(_lines(error), exit_code(error))
    if not args:
        return EXIT_INPUT
    return result if isinstance(result, int) else 0


def exit_code(error: BaseException) -> int:
    """The exit code that one of this package's exceptions asks for: its own, or 2 for wrong values and 1 for the rest."""
    return int(getattr(error, "exit_code", EXIT_INPUT if isinstance(error, ValueError) else EXIT_FAILED))


def _say(lines: Sequence[str], code: int) -> int:
    for line in lines:
        print(line, file=sys.stderr)
    return code


def _lines(error: BaseException) -> list[str]:
    """One line per problem: the config's are finished, an objective's options come as a list, others are one text."""
    if lines := getattr(error, "lines", None):
        return list(lines)
    texts = getattr(error, "problems", None) or [str(error) or type(error).__name__]
    return [f"error: {' '.join(str(text).split())}" for text in texts]


def _usage(error: Exception) -> str:
    """The line for a wrong command line, or nothing. Newer typer brings a click of its own, so its class has no fixed place."""
    message = getattr(error, "format_message", None)
    if message is None:
        return ""
    context = getattr(error, "ctx", None)
    return f"error: {' '.join(message().split())}" + (f" (see {context.command_path} --help)" if context else "")
