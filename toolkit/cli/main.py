"""Run the command line, and turn what comes out of it into an exit code."""

from __future__ import annotations

import contextlib
import os
import sys

import typer
from typer.exceptions import TyperException

from toolkit.cli.common import FAILED, INTERRUPTED, STAGES, USAGE, app, say
from toolkit.errors import ToolkitError

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    # OpenMP threads that spin while they wait make everything crawl on a busy machine: on two
    # loaded cores a calibration took 136 s spinning and 16 s sleeping. OpenMP reads this when it is
    # loaded, so it stands before every heavy import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = sys.argv[1:]
    try:
        code = app(arguments, prog_name="toolkit", standalone_mode=False) or 0
        if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            code = _interrupted(arguments)
    except ToolkitError as error:
        if "--debug" in arguments:
            raise
        say(str(error))
        code = error.exit_code
    except TyperException as error:  # an unknown option, a missing argument
        say(_usage_error(error))
        code = USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = _interrupted(arguments)
    except BrokenPipeError:  # the reader of our output has gone, for instance `| head`
        with contextlib.suppress(OSError):
            sys.stdout.close()
        code = 0
    except OSError as error:  # that nobody below explained: mostly output that cannot be written
        if "--debug" in arguments:
            raise
        say(
            f"{error.filename or 'reading or writing'}: {error.strerror or error}\n  --debug shows"
            " where it happened."
        )
        with contextlib.suppress(OSError):
            sys.stdout.close()
        code = FAILED
    sys.exit(code if isinstance(code, int) else 0)


def _usage_error(error: TyperException) -> str:
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f"\n  {context.command_path} --help lists what there is."
    return f"{error.format_message()}{hint}"


def _interrupted(arguments: list[str]) -> int:
    again = (
        "; finished stages are kept, the same command goes on from there"
        if arguments[:1] in [["build"], *([s] for s in STAGES)]
        and not any(one.startswith("--replay") for one in arguments)
        else ""
    )
    say(f"interrupted{again}")
    return INTERRUPTED
