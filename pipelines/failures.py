"""What a person sees when something ends badly: one paragraph on stderr, and the exit code."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import click

from headwater.core.errors import HeadwaterError

_STOPPED = 130

_where: list[Path] = []
"""The run folder in use, so that the traceback of an unexpected error ends up beside what it concerns."""


def concerning(run_folder: Path) -> None:
    """Say that errors from now on concern this run."""
    _where[:] = [run_folder]


def exit_code_of(error: BaseException) -> int:
    """Tell the person what happened (stderr, one paragraph) and return the exit code."""
    if isinstance(error, HeadwaterError):
        _say(error.what, error.todo)
        return error.exit_code
    if isinstance(error, click.UsageError):
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()
        else:
            command = error.ctx.command_path if error.ctx is not None else "pipeline"
            _say(error.format_message(), f"See `{command} --help`.")
        return error.exit_code
    if isinstance(error, click.Abort) and isinstance(error.__cause__, EOFError):
        return _unexpected(error.__cause__)  # click takes any for the end of a person's input; nobody is asked here
    if isinstance(error, KeyboardInterrupt | click.Abort):
        _say("Stopped.")
        return _STOPPED
    if isinstance(error, SystemExit):  # click's answer to a reader (`head`) that has gone away
        return error.code if isinstance(error.code, int) else 1
    return _unexpected(error)


def _unexpected(error: BaseException) -> int:
    text = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    try:
        path = _write(text)
    except OSError:
        sys.stderr.write(text)
        _say(f"An unexpected error: {kind}: {error}.", "The traceback is above.")
        return 1
    _say(
        f"An unexpected error: {kind}: {error}.",
        f"This is a fault of the program; the traceback is in {path}. Everything finished is kept: run again to go on.",
    )
    return 1


def _write(text: str) -> Path:
    folder = _where[0] if _where else Path(os.environ.get("TMPDIR", "/tmp"))
    name = "traceback.txt" if _where else f"headwater-traceback-{time.time_ns()}.txt"
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def _say(what: str, todo: str = "") -> None:
    paragraph = " ".join(f"{what} {todo}".split())
    click.echo(f"{click.style('Error:', fg='red', bold=True)} {paragraph}", err=True)
