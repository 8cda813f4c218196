"""Run the command line, and turn its result or its exception into an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from typer.exceptions import TyperException

from toolkit.cli.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, STAGES, app, say
from toolkit.cli.foreground import Signal
from toolkit.errors import ToolkitError
from toolkit.process.policies import set_policies

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    set_policies()
    _replace_closed_streams()
    with _terminated_as_interrupted():
        sys.exit(_exit_code(sys.argv[1:]))


def _exit_code(arguments: list[str]) -> int:
    try:
        code = app(arguments, prog_name="toolkit", standalone_mode=False) or 0
        if code == EXIT_INTERRUPTED:  # typer turns a KeyboardInterrupt into this code
            code = _interrupted(arguments)
    except ToolkitError as error:
        if "--debug" in arguments:
            raise
        say(str(error))
        code = error.exit_code
    except TyperException as error:  # an unknown option, a missing argument
        say(_usage_error(error))
        code = EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = _interrupted(arguments)
    except BrokenPipeError:  # the reader of our output has closed it, as `| head` does
        with contextlib.suppress(OSError):
            sys.stdout.close()
        code = 0
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        code = 0  # typer ends with 1 then
    except OSError as error:  # no code below has explained it; mostly, output cannot be written
        if "--debug" in arguments:
            raise
        what = f"{error.filename or 'reading or writing'}: {error.strerror or error}"
        say(
            "the current folder was deleted\n  Change to one that exists."
            if _is_folder_gone()
            else f"{what}\n  Add --debug to see where it happened."
        )
        with contextlib.suppress(OSError):
            sys.stdout.close()
        code = EXIT_FAILED
    return code if isinstance(code, int) else 0


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, as `timeout`, CI and systemd send it, ends a command as Ctrl-C does. Further ones
    are ignored, and the cleaning up goes on.

    A terminal interrupts what this process has started, too, such as a compiler and its parts. Here
    nobody else does, and before this process lets go of it, since then its parts would be lost.
    """
    from toolkit.pipeline.memory import process_tree

    def terminate(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        own = os.getpid()
        for pid in [pid for pid in process_tree(own) if pid != own]:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == os.getpgrp():
                    os.kill(pid, number)
        raise Signal(number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _replace_closed_streams() -> None:
    """Discard what is written to a stream that the shell has closed, as `>&-` does: Python has None
    there. No other file gets the stream's number then.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def _is_folder_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _usage_error(error: TyperException) -> str:
    """The message of a usage error, and the command that prints the help about it."""
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f"\n  See {context.command_path} --help."
    return f"{error.format_message()}{hint}"


def _interrupted(arguments: list[str]) -> int:
    """Say that the command was interrupted, and for a build that it can be continued."""
    runs_stages = bool(arguments) and arguments[0] in ("build", *STAGES)
    is_replay = any(argument.startswith("--replay") for argument in arguments)
    if runs_stages and not is_replay:
        say("interrupted; finished stages are kept, and the same command continues after them")
    else:
        say("interrupted")
    # It is ignored once it came; serving commands, which handle it themselves, do not come here.
    was_terminated = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    return 128 + signal.SIGTERM if was_terminated else EXIT_INTERRUPTED
