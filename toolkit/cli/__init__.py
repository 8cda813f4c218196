"""The `toolkit` command. Arguments, printing and exit codes are handled here and nowhere else.

Exit codes: 0 done or PASS; 1 a gate failed; 2 an error in config, usage or plan; 3 a stage failed;
4 INCONCLUSIVE; 130 interrupted. Results go to stdout; progress and errors go to stderr. Each
command imports the heavy libraries that it needs when it runs, so that `--help` and errors in a
YAML appear at once.
"""

# Each import registers the commands of its module; this order is the order of `toolkit --help`.
from toolkit.cli import init, plan, build, validate, explain, report  # noqa: F401  # isort: skip
from toolkit.cli import tune, serve, gateway, rollout, generate, bench, doctor  # noqa: F401  # isort: skip
from toolkit.cli.common import app
from toolkit.cli.main import main

__all__ = ["app", "main"]
