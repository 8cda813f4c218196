"""The `toolkit` command: arguments, printing and exit codes, and nothing else does these.

Exit codes: 0 done or PASS; 1 a gate failed; 2 config, usage or plan; 3 a stage failed; 4
INCONCLUSIVE; 130 interrupted. Results go to stdout, progress and errors to stderr. Everything heavy
is imported by the command that needs it, so that `--help` and errors in a YAML are there at once.
"""

# Importing them registers their commands, in the order of `toolkit --help`.
from toolkit.cli import init, plan, build, validate, explain, report  # noqa: F401  # isort: skip
from toolkit.cli import tune, serve, generate, bench, doctor  # noqa: F401  # isort: skip
from toolkit.cli.common import app
from toolkit.cli.main import main

__all__ = ["app", "main"]
