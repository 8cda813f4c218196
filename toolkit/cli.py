"""The `toolkit` command: arguments, printing and exit codes, and nothing else does these.

Exit codes: 0 done or PASS; 1 a gate failed; 2 config, usage or plan; 3 a stage failed; 4 INCONCLUSIVE; 130 interrupted.
Results go to stdout, progress and errors to stderr. Everything heavy is imported by the command that needs it, so that `--help`
and errors in a YAML are there at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from toolkit.errors import PlanError, ToolkitError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from toolkit.assembly import Built
    from toolkit.config.schema import DeploymentConfig
    from toolkit.records import BenchRun, ValidationReport

__all__ = ["app", "main"]

STAGES = ("pair", "quantize", "compile", "package", "validate")
VERDICTS = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4}
PIPED_WIDTH = 120  # of a report that goes to a file
USAGE, FAILED, INTERRUPTED = 2, 3, 130
URL = re.compile(r"^(?:(?:grpc|http)://)?(?P<address>\[[0-9a-fA-F:]+\]:\d+|[\w.-]+:\d+)/?$")

app = typer.Typer(
    help="Quantize, compile, package, serve and judge an LLM with draft-target speculative decoding.\n\n"
    "Exit codes: 0 done or PASS; 1 a gate failed; 2 config, usage or plan; 3 a stage failed; 4 INCONCLUSIVE.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Config = Annotated[Path, typer.Argument(help="The deployment's YAML file.", metavar="CONFIG", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set a key of the YAML: engine.max_batch_size=4. Repeatable.", metavar="KEY=VALUE"),
]
Fresh = Annotated[
    list[str] | None,
    typer.Option(help=f"Run this stage anew, stored or not ({', '.join(STAGES)}). Repeatable.", metavar="STAGE"),
]
Rehash = Annotated[
    bool, typer.Option("--rehash", help="Read every file again instead of trusting size and time of the last look.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _print_version(asked: bool) -> None:
    if asked:
        version_command()
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def init(
    target: Annotated[str, typer.Option(help="The target: a folder, or a hub id.", metavar="DIR|HUB-ID", show_default=False)],
    draft: Annotated[
        str | None, typer.Option(help="The draft; without one, nothing is drafted.", metavar="DIR|HUB-ID", show_default=False)
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="What it will run on: A100, L40S, H100, H200, B200, ...; without it, the embedded engine.", metavar="GPU"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write.", show_default="TARGET.yaml here")] = None,
    debug: Debug = False,
) -> None:
    """Write a commented YAML for a pair, with values read from the checkpoints, that the plan says can work."""
    from toolkit.plan.make import gpu_asked_for
    from toolkit.plan.suggest import suggest

    row = None if gpu is None else gpu_asked_for(gpu)
    folder = (Path.cwd() if out is None else out.absolute().parent).resolve()
    models = (_checkpoint(target), None if draft is None else _checkpoint(draft))
    made = suggest(*models, row, folder=folder, file_name=None if out is None else out.name)
    file = out or folder / made.file_name
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(made.text)
    except FileExistsError:
        raise UsageError("is there already", where=file, mend="name another: --out FILE") from None
    except OSError as error:
        raise UsageError(f"cannot be written ({error.strerror})", where=file, mend="name another: --out FILE") from error
    shown = _shown(file)
    _print(f"wrote {shown}; `toolkit plan {shown}` works at once, and before `toolkit build {shown}` it needs")
    for needed, what in made.texts.items():
        _print(f"  {_shown(folder / needed):24} {what}")


def _shown(path: Path) -> str:
    """As it is typed from here."""
    path = path.absolute()
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _checkpoint(written: str) -> Path:
    """A folder that exists, resolved; else OWNER/NAME as it is."""
    from toolkit.config.folders import meant_folder, names_a_model

    path = Path(written).expanduser()
    if path.exists():
        return path.resolve()
    if not names_a_model(Path.cwd(), written):
        near = meant_folder(Path.cwd(), written)
        mend = "" if near is None else f"did you mean {near!r}? "
        raise UsageError(
            f"no such folder, and no hub id: {written}", mend=f"{mend}Name a folder with a config.json, or OWNER/NAME."
        )
    return path


@app.command("build")
def build_command(
    config: Config,
    until: Annotated[str, typer.Option(help=f"Stop after this stage: {', '.join(STAGES)}.", metavar="STAGE")] = "validate",
    fresh: Fresh = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Try it here with small random models and the embedded engine in their place.")
    ] = False,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Pair, quantize, compile, package and validate; whatever has not changed is reused."""
    _build(config, until, fresh, overrides, rehash, as_json, rehearse=rehearse)


def _one_stage(stage: str, text: str) -> None:
    def command(
        config: Config,
        fresh: Fresh = None,
        overrides: Overrides = None,
        rehash: Rehash = False,
        as_json: Json = False,
        debug: Debug = False,
    ) -> None:
        _build(config, stage, fresh, overrides, rehash, as_json)

    app.command(stage, help=text)(command)


_one_stage("pair", "Prove that draft and target belong together.")
_one_stage("quantize", "Quantize both checkpoints, and measure what it cost.")
_one_stage("compile", "Compile both engines into engines/NAME/.")
_one_stage("package", "Write the Triton model repository triton_repo/NAME/.")


@app.command("validate")
def validate_command(
    config: Annotated[
        Path | None, typer.Argument(help="The deployment's YAML file.", metavar="CONFIG", show_default=False)
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Ask again about one divergence: a file of build/reports/NAME/replay/.", metavar="FILE"),
    ] = None,
    fresh: Fresh = None,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve the repository, measure and judge it; the report is in build/reports/NAME/."""
    if replay is not None:
        if config is not None:
            raise UsageError("--replay FILE names its deployment itself", mend=f"toolkit validate --replay {replay}")
        _replay(replay, as_json=as_json)
    elif config is None:
        raise UsageError("a CONFIG or --replay FILE is needed", mend="toolkit validate CONFIG")
    else:
        _build(config, "validate", fresh, overrides, rehash, as_json)


@app.command("tune")
def tune_command(
    config: Config,
    drafts: Annotated[
        list[Path] | None,
        typer.Option("--draft", help="Another draft checkpoint to compare. Repeatable.", metavar="DIR", show_default=False),
    ] = None,
    measure: Annotated[
        int, typer.Option(help="Also run every draft length, in so many rounds, and set it beside the predictions.", min=0)
    ] = 0,
    gpu: Annotated[
        str | None,
        typer.Option(help="Predict the costs of a GPU that is not here: H200.", metavar="NAME", show_default=False),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Compare every precision of the target with every precision of the draft.")
    ] = False,
    details: Annotated[bool, typer.Option("--details", help="Also print alpha and every draft length.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew, stored or not.")] = False,
    overrides: Overrides = None,
    rehash: Rehash = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure acceptance and cost; say which draft and draft length pay, or that none does."""
    from toolkit.assembly import tune, tune_grid
    from toolkit.pipeline.store import Store
    from toolkit.progress import displayed
    from toolkit.records import Advice, Grid, to_json

    if grid and (drafts or measure or gpu):
        raise UsageError("--grid measures the YAML's own pair", mend="leave --draft, --measure and --gpu out")
    if gpu is not None and measure:
        raise UsageError("--measure runs on this machine, and --gpu names another", mend="leave one of them out")
    loaded, workplace = _load(config, overrides), _workplace()
    with _placed(config, overrides), displayed() as display:
        store = Store(workplace.store, rehash=rehash, notice=display.notice)
        found: Advice | Grid
        if grid:
            found, folder = tune_grid(loaded, workplace, display, store, fresh=fresh)
        else:
            found, folder = tune(
                loaded, workplace, display, store, drafts=drafts or (), measured_rounds=measure, gpu=gpu, fresh=fresh
            )
    if as_json:
        _print(json.dumps(to_json(found), indent=2))
        return
    from toolkit.report.advice import print_advice, print_grid

    if isinstance(found, Grid):
        print_grid(found, _console())
    else:
        draft = None if loaded.draft is None else loaded.draft.checkpoint.name
        last = _last_report(workplace.report(loaded.name) / "report.json")
        print_advice(found, _console(), present=loaded.speculation, own_draft=draft, served=last, details=details)
    _print(f"in {folder.relative_to(Path.cwd())}/")


@app.command()
def plan(config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Say whether it can work, what will be changed in silence, what it needs, how fast it can be and what will run."""
    from toolkit.planning import plan_of

    made = plan_of(_load(config, overrides, texts=False))
    if as_json:
        from toolkit.records import to_json

        _print(json.dumps(to_json(made), indent=2))
    else:
        from rich.console import Console

        from toolkit.report.plan import print_plan

        print_plan(made, Console(width=None if sys.stdout.isatty() else PIPED_WIDTH))
    if not made.possible:
        raise typer.Exit(USAGE)


@app.command()
def explain(config: Config, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Say per stage whether it would be reused, or which parts of its key have changed."""
    from toolkit.assembly import explain_build
    from toolkit.pipeline.store import Store

    loaded, workplace = _load(config, overrides), _workplace()
    with _placed(config, overrides):
        explanations = explain_build(loaded, workplace, Store(workplace.store, notice=_say))
    if as_json:
        from toolkit.records import to_json

        _print(json.dumps(to_json(explanations), indent=2))
        return
    for one in explanations:
        state = "reused" if one.reused else "would run" if one.key is not None else "not known yet"
        key = f"  {one.key[:12]}" if one.key is not None else ""
        _print(f"{one.stage:18} {state:14}{key}")
        for reason in one.reasons:
            _print(f"{'':18} {reason}")


@app.command()
def serve(config: Config, overrides: Overrides = None, rehash: Rehash = False, debug: Debug = False) -> None:
    """Start tritonserver on the packaged repository, until Ctrl-C.

    It takes free ports on loopback; --set triton.http_port=8000 (grpc_port, metrics_port, host) fixes them.
    """
    import threading

    from toolkit.triton.server import TritonServer

    loaded = _load(config, overrides)
    with _placed(config, overrides):
        _run_stages(loaded, "package", rehash=rehash)
    repository = _workplace().repository(loaded.name)
    stop = threading.Event()
    with _signals(stop.set):
        _say(f"starting tritonserver on {repository}")
        with TritonServer(repository, loaded.triton) as server:
            bls_words = ("tensorrt_llm_bls", "stream", "max_tokens")
            llmapi_words = ("tensorrt_llm", "streaming", "sampling_param_max_tokens")
            model, stream, tokens = bls_words if loaded.triton.layout == "bls" else llmapi_words
            body = json.dumps({"text_input": "def main():", stream: False, tokens: 32})
            _print(f"http     http://{server.http_url}")
            _print(f"grpc     {server.grpc_url}")
            _print(f"metrics  {server.metrics_url}")
            if loaded.triton.decoupled:
                _print(f"curl -s http://{server.http_url}/v2/models/{model}/generate -d '{body}'")
                _print(f'toolkit generate {server.grpc_url} "def main():"')
                prompts, which = _shown(loaded.validation.prompts), "" if model == "tensorrt_llm" else f" --model {model}"
                _print(f"toolkit bench {server.grpc_url} --prompts {prompts} --metrics {server.metrics_url}{which}")
            _print("ready; Ctrl-C stops it")
            while not stop.wait(0.5):
                server.check()
            _say("stopping")
    _print("stopped")


@app.command()
def generate(
    where: Annotated[
        str, typer.Argument(help="A deployment's YAML file, or host:port of a gRPC endpoint.", metavar="CONFIG|URL")
    ],
    prompt: Annotated[str, typer.Argument(help="The text to complete.", show_default=False)],
    max_tokens: Annotated[
        int | None, typer.Option(help="Output tokens at most.", min=1, show_default="128, or the YAML's")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text.", min=0, max=2**64 - 1, show_default=False)
    ] = None,
    draft_len: Annotated[
        int | None, typer.Option(help="Draft tokens per step; 0 decodes plainly.", min=0, show_default="the YAML's")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Stream one completion to the terminal, with tokens/s and acceptance."""
    asked = {"temperature": temperature, "seed": seed, "draft_len": draft_len}
    address = _endpoint(where)
    if address is not None:
        if overrides:
            raise UsageError("--set belongs to a CONFIG, not to a running endpoint", mend="Leave it out.")
        _from_endpoint(address, prompt, max_tokens or 128, asked, as_json=as_json)
    else:
        with _placed(Path(where), overrides):
            _in_process(_load(Path(where), overrides), prompt, max_tokens, asked, as_json=as_json)


@app.command("bench")
def bench_command(
    where: Annotated[
        str | None,
        typer.Argument(help="A deployment's YAML file, or an endpoint.", metavar="CONFIG|URL", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON Lines with a `prompt` per line.", metavar="FILE", show_default="the YAML's")
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Closed loop: requests at a time. 1,2,4,8 is a sweep.", metavar="N[,N...]", show_default="1"),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second.", min=0.001, show_default=False)] = None,
    arrivals: Annotated[
        str, typer.Option(help="Of an open loop: poisson, constant, or a trace file.", metavar="KIND|FILE")
    ] = "poisson",
    against_plain: Annotated[
        bool | None,
        typer.Option(
            "--against-plain/--as-served",
            help="Measure plain decoding in turns with speculation.",
            show_default="--against-plain for a CONFIG that speculates",
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Measure this endpoint in turns with the first.", metavar="URL", show_default=False)
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests per arm and round.", min=1, show_default="one per prompt")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds at least.", min=1, show_default="1, or 3 with two arms")] = None,
    max_rounds: Annotated[
        int | None, typer.Option(help="Rounds at most.", min=1, show_default="8 with two arms, else --rounds")
    ] = None,
    precision: Annotated[
        float, typer.Option(help="Wanted half width of the speed ratio's interval, as a share.", min=0.001)
    ] = 0.05,
    max_tokens: Annotated[
        int | None, typer.Option(help="Output tokens at most.", min=1, show_default="64, or the YAML's")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    warm_up: Annotated[int, typer.Option(help="Requests per arm that are not measured.", min=0)] = 8,
    gate: Annotated[
        list[str] | None,
        typer.Option(help="A limit: ttft_p90<=200, speed>=1.2, tokens_per_s>=100. Repeatable.", metavar="LIMIT"),
    ] = None,
    goodput: Annotated[
        str | None, typer.Option(help="What makes a request good: ttft=200,tpot=25 (ms).", metavar="LIMITS", show_default=False)
    ] = None,
    protocol: Annotated[str, typer.Option(help="auto, triton-grpc, triton-http, openai-chat or openai-completions.")] = "auto",
    model: Annotated[
        str | None, typer.Option(help="The served model.", show_default="tensorrt_llm, or the first one listed")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(help="The server's Prometheus page.", metavar="URL", show_default="where it usually is")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the endpoint's API key.", metavar="NAME", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a request counts as failed.", min=0.001)] = 120.0,
    out: Annotated[Path | None, typer.Option(help="Save the run as JSON.", metavar="FILE", show_default=False)] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Judge two saved runs: is B slower than A?", metavar="A B", show_default=False),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="With --compare: how much slower B may be, as a share.", min=0.0)] = 0.05,
    seed: Annotated[int, typer.Option(help="Of arrivals, order and intervals.")] = 0,
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure any Triton or OpenAI-compatible endpoint: latency, throughput, goodput, speculation against plain."""
    if compare is not None:
        if where is not None:
            raise UsageError("--compare judges saved runs, and measures nothing", mend=f"Leave {where!r} out.")
        _compare(*compare, tolerance, as_json=as_json)
        return
    if where is None:
        raise UsageError("neither an endpoint nor --compare A B", mend="toolkit bench --help shows both.")
    asked: dict[str, Any] = {
        "protocol": protocol,
        "model": model,
        "baseline": baseline,
        "temperature": temperature,
        "concurrency": _levels(concurrency),
        "rate": rate,
        "arrivals": arrivals,
        "requests": requests,
        "rounds": rounds,
        "max_rounds": max_rounds,
        "warm_up": warm_up,
        "precision": precision,
        "goodput": goodput,
        "gates": tuple(gate or ()),
        "timeout_s": timeout,
        "api_key": _api_key(api_key_env),
        "seed": seed,
    }
    if Path(where).is_file():
        loaded = _load(Path(where), overrides)
        asked["prompts"] = prompts or loaded.validation.prompts
        asked["max_tokens"] = max_tokens or loaded.validation.max_tokens
        plain = loaded.speculation.kind != "none" and baseline is None if against_plain is None else against_plain
        with _placed(Path(where), overrides):
            run = _bench_deployment(loaded, {**asked, "against_plain": plain})
    else:
        if prompts is None or overrides:
            what = "--set belongs to a CONFIG" if overrides else "no prompts to send"
            raise UsageError(what, where=where, mend="Leave --set out." if overrides else "Give --prompts FILE.")
        asked |= {"prompts": prompts, "max_tokens": max_tokens or 64, "metrics_url": metrics}
        run = _bench_endpoint(where, {**asked, "against_plain": bool(against_plain)})
    _finish_bench(run, out, as_json=as_json)


@app.command()
def report(
    config: Config,
    overrides: Overrides = None,
    as_json: Json = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the HTML report in a browser.")] = False,
    debug: Debug = False,
) -> None:
    """Print the last report in full, or open it."""
    folder = _workplace().report(_load(config, overrides).name)
    file = folder / "report.json"
    if not file.exists():
        raise UsageError("there is no report yet", where=folder, mend=f"Make one: toolkit build {config}")
    if open_it:
        import webbrowser

        page = (folder / "report.html").absolute()
        if not webbrowser.open(page.as_uri()):
            raise UsageError("no browser could be started", mend=f"Open it yourself: {page}")
        _print(str(page))
    elif as_json:
        _print(file.read_text(encoding="utf-8").rstrip("\n"))
    else:
        from toolkit.report.render import read_report

        _print_report(read_report(file), full=True)
        _print(f"in full: {folder / 'report.html'}")


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """List what works on this machine and what is missing, each with its mend."""
    from toolkit.engines.embedded.toolchain import compiler_path
    from toolkit.plan.doctor import diagnose
    from toolkit.records import to_json
    from toolkit.triton.server import find_libpython, find_server

    def server() -> tuple[Path, Path | None]:
        install = find_server()
        return install.binary, install.wheel

    found = diagnose(Path.cwd(), find_server=server, find_libpython=find_libpython, find_compiler=compiler_path)
    if as_json:
        _print(json.dumps(to_json(found), indent=2))
    else:
        _print_diagnoses(found)
    if any(one.essential and one.status == "missing" for one in found):
        raise typer.Exit(FAILED)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from toolkit.config.schema import DeploymentConfig

    described = {"$schema": "https://json-schema.org/draft/2020-12/schema", **DeploymentConfig.model_json_schema()}
    _print(json.dumps(described, indent=2))


@app.command("version")
def version_command() -> None:
    """Print the version."""
    from toolkit import __version__

    _print(f"toolkit {__version__}")


def main() -> None:
    """Run the command line and exit."""
    # OpenMP threads that spin while they wait make everything crawl on a busy machine: on two loaded cores a calibration took
    # 136 s spinning and 16 s sleeping. OpenMP reads this when it is loaded, so it stands before every heavy import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = sys.argv[1:]
    try:
        code = app(arguments, prog_name="toolkit", standalone_mode=False) or 0
        if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            code = _interrupted(arguments)
    except ToolkitError as error:
        if "--debug" in arguments:
            raise
        _say(str(error))
        code = error.exit_code
    except TyperException as error:  # an unknown option, a missing argument
        _say(_usage_error(error))
        code = USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = _interrupted(arguments)
    except BrokenPipeError:  # the reader of our output has gone, for instance `| head`
        with contextlib.suppress(OSError):
            sys.stdout.close()
        code = 0
    except OSError as error:  # what no part of ours has put into words of its own: most of all, output that cannot be written
        if "--debug" in arguments:
            raise
        _say(f"{error.filename or 'reading or writing'}: {error.strerror or error}\n  --debug shows where it happened.")
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
        else ""
    )
    _say(f"interrupted{again}")
    return INTERRUPTED


# Behind the commands.


def _load(config: Path, overrides: list[str] | None, *, texts: bool = True) -> DeploymentConfig:
    from toolkit.config.load import load_config

    return load_config(config, overrides or (), texts=texts)


@contextlib.contextmanager
def _placed(config: Path, overrides: list[str] | None) -> Iterator[None]:
    """What the plan refuses inside the block, with the lines of the file that ask for it."""
    try:
        yield
    except PlanError as error:
        from toolkit.config.load import located

        raise PlanError(config, located(config, overrides or (), error.faults)) from error


def _workplace() -> Any:
    from toolkit.assembly import Workplace

    return Workplace(Path.cwd())


def _build(
    config: Path,
    until: str,
    fresh: list[str] | None,
    overrides: list[str] | None,
    rehash: bool,
    as_json: bool,
    *,
    rehearse: bool = False,
) -> None:
    loaded = _load(config, overrides, texts=not rehearse)
    for name in (until, *(fresh or ())):
        known = {*STAGES, *(f"{stage}/{role}" for stage in ("quantize", "compile") for role in ("target", "draft"))}
        if name not in known:
            raise UsageError(f"there is no stage {name!r}", mend=f"known: {', '.join(STAGES)}")
    with _placed(config, overrides):
        run = _rehearse_stages if rehearse else _run_stages
        built = run(loaded, until, fresh=fresh or (), rehash=rehash)
    verdict = built.report
    if as_json:
        _print(json.dumps(_as_json(loaded.name, built), indent=2))
    else:
        if verdict is not None:
            _print_report(verdict, full=False)
        for folder in built.published:
            _print(f"in {folder.relative_to(Path.cwd())}/")
        for stage, missing in built.not_executed.items():
            _print("\n  ".join([f"{stage}: not executed on a GPU:", *missing]))
        if not built.changed:
            _print("nothing changed: every stage was reused")
    if verdict is not None:
        raise typer.Exit(VERDICTS[verdict.verdict])


def _last_report(file: Path) -> ValidationReport | None:
    """None where there is none, or one of another version."""
    from toolkit.errors import StageError
    from toolkit.report.render import read_report

    with contextlib.suppress(StageError):
        return read_report(file) if file.exists() else None
    return None


def _replay(file: Path, *, as_json: bool) -> None:
    """Exit code 0 when the texts are the same now or differ by rounding, 1 when they differ beyond it."""
    from toolkit.assembly import replay_divergence
    from toolkit.records import to_json

    found, now = replay_divergence(file, _workplace())
    before, one = found.divergence, now.divergence
    if as_json:
        _print(json.dumps({"before": to_json(before), "now": to_json(now)}, indent=2))
    else:
        _print(f"prompt {before.prompt_index + 1}, {before.arm} arm, draft length {before.draft_len}")
        _print(f"then  output token {before.position + 1}: {before.kind}, {before.detail}")
        same = "both texts are those of the file" if now.as_before else "the texts are not those of the file"
        _print("now   identical" if one is None else f"now   output token {one.position + 1}: {one.kind}, {one.detail}")
        _print(f"      {same}")
    if one is not None and one.kind not in ("identical", "equivalent"):
        raise typer.Exit(4 if one.kind == "unexplained" else 1)


def _run_stages(config: DeploymentConfig, until: str, *, fresh: Any = (), rehash: bool = False) -> Built:
    from toolkit.assembly import build
    from toolkit.pipeline.store import Store
    from toolkit.progress import displayed

    workplace = _workplace()
    with displayed() as display:
        store = Store(workplace.store, rehash=rehash, notice=display.notice)
        return build(config, workplace, display, store, until=until, fresh=fresh)


def _rehearse_stages(config: DeploymentConfig, until: str, *, fresh: Any = (), rehash: bool = False) -> Built:
    """Say what is replaced, then run."""
    from toolkit.pipeline.store import Store
    from toolkit.progress import displayed
    from toolkit.rehearsing import ready, rehearse

    workplace = _workplace()
    rehearsal = ready(config, workplace)
    _say("\n  ".join(["rehearsing with stand-ins:", *rehearsal.replaced]))
    with displayed() as display:
        store = Store(workplace.store, rehash=rehash, notice=display.notice)
        return rehearse(rehearsal, workplace, display, store, until=until, fresh=fresh)


def _as_json(name: str, built: Built) -> dict[str, Any]:
    return {
        "name": name,
        "verdict": None if built.report is None else built.report.verdict,
        "changed": built.changed,
        "stages": [
            {
                "stage": stage,
                "reused": done.reused,
                "key": done.entry.key,
                "seconds": done.seconds,
                "peak_memory_bytes": done.peak_memory_bytes,
            }
            for stage, done in built.stages.items()
        ],
        "published": [str(folder) for folder in built.published],
        "not_executed": built.not_executed,
    }


def _in_process(config: DeploymentConfig, prompt: str, max_tokens: int | None, asked: dict[str, Any], *, as_json: bool) -> None:
    """Build what is missing, load both engines into this process, stream one request."""
    import time

    from toolkit.assembly import embedded, speculation_of
    from toolkit.interfaces import GenerationRequest, Sampling
    from toolkit.serving import load_runtime

    built = _run_stages(config, "tune" if config.speculation.max_draft_len == "auto" else "compile")
    engines, speculation = _workplace().engines(config.name), speculation_of(config, built.stages)
    runtime = load_runtime(
        engines / "target",
        engines / "draft" if speculation.kind == "draft_target" else None,
        threads=embedded(config).threads,
        max_draft_len=speculation.longest_draft,
        acceptance=speculation.acceptance,
        max_queue_size=1,
        ngram_size=speculation.max_matching_ngram_size if speculation.kind == "ngram" else None,
    )
    with contextlib.closing(runtime):
        request = GenerationRequest(
            request_id="generate",
            prompt_ids=tuple(runtime.codec.encode(prompt)),
            max_tokens=max_tokens or config.triton.default_max_tokens,
            sampling=Sampling(temperature=asked["temperature"], seed=asked["seed"]),
            draft_len=asked["draft_len"],
        )
        text, began = "", time.monotonic()
        for event in runtime.generate(request):
            text += event.text
            if not as_json:
                _stream(event.text)
            if event.finish_reason is not None:
                seconds = time.monotonic() - began
                if event.error is not None:
                    raise UsageError(f"the request ended with an error: {event.error}")
                stats = event.stats
                _close(
                    text,
                    event.finish_reason,
                    None if stats is None else stats.output_tokens,
                    seconds,
                    None if stats is None else stats.acceptance_rate,
                    None if stats is None else stats.acceptance_length,
                    as_json=as_json,
                )


def _endpoint(where: str) -> str | None:
    """host:port, or None where `where` is to be a file. Raises UsageError for what is neither."""
    if Path(where).exists():
        return None
    url = URL.match(where)
    if url is None and "://" in where:
        raise UsageError(f"{where} is not host:port of a gRPC endpoint", mend="`toolkit serve` prints it: 127.0.0.1:8001")
    return None if url is None else url["address"]


def _from_endpoint(address: str, prompt: str, max_tokens: int, asked: dict[str, Any], *, as_json: bool) -> None:
    """Stream one request from a running endpoint over gRPC."""
    import time

    from toolkit.client import Client, ClientError, Options, ServerUnavailable
    from toolkit.errors import StageError

    options = Options(
        max_tokens=max_tokens, temperature=asked["temperature"], seed=asked["seed"], num_draft_tokens=asked["draft_len"]
    )
    try:
        with Client(address) as client:
            text, began = "", time.monotonic()
            for chunk in client.stream(prompt, options):
                text += chunk.text
                if not as_json:
                    _stream(chunk.text)
                if chunk.finish_reason is not None:
                    figures = chunk.statistics
                    _close(
                        text,
                        chunk.finish_reason,
                        chunk.output_tokens,
                        time.monotonic() - began,
                        None if figures is None else figures.acceptance_rate,
                        None if figures is None else figures.acceptance_length,
                        as_json=as_json,
                    )
    except ServerUnavailable as error:
        mend = "host:port is that of the gRPC endpoint; `toolkit serve` prints it"
        raise StageError("generate", str(error), mend=mend) from error
    except ClientError as error:
        raise UsageError(str(error)) from error


def _levels(text: str | None) -> tuple[int, ...]:
    levels = text.split(",") if text is not None else []
    if not all(level.strip().isdecimal() and int(level) > 0 for level in levels):
        raise UsageError(f"{text!r} is no number of requests at a time", mend="Write --concurrency 4, or 1,2,4,8.")
    return tuple(int(level) for level in levels)


def _api_key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise UsageError(f"the environment has no {name}", mend="Export it, or leave --api-key-env out.")
    return None if name is None else os.environ[name]


def _bench_deployment(config: DeploymentConfig, asked: dict[str, Any]) -> BenchRun:
    """Package what is missing, serve it on free ports, measure it."""
    from toolkit.triton.server import TritonServer

    packaged = _run_stages(config, "package").stages["package"].record
    repository = _workplace().repository(config.name)
    free_ports = config.triton.model_copy(update={"http_port": 0, "grpc_port": 0, "metrics_port": 0})
    _say(f"starting tritonserver on {repository}")
    with TritonServer(repository, free_ports) as server:
        served = {"model": asked["model"] or packaged.model, "metrics_url": server.metrics_url}
        return _bench_endpoint(server.grpc_url, {**asked, **served})


def _bench_endpoint(url: str, asked: dict[str, Any]) -> BenchRun:
    from toolkit.benching import Asked, bench
    from toolkit.progress import displayed

    with displayed() as display:
        return bench(url, Asked(**asked), progress=display.started("bench"))


def _finish_bench(run: BenchRun, out: Path | None, *, as_json: bool) -> None:
    from toolkit.records import to_json

    text = json.dumps(to_json(run), separators=(",", ":"))
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the run cannot be saved: {error.strerror}", where=out) from error
    if as_json:
        _print(text)
    else:
        from toolkit.report.bench import print_run

        print_run(run, _console())
        if out is not None:
            _print(f"saved in {out}")
    raise typer.Exit(VERDICTS[run.verdict])


def _compare(a: Path, b: Path, tolerance: float, *, as_json: bool) -> None:
    from toolkit.records import to_json
    from toolkit.report.bench import print_comparison
    from toolkit.validate.compare import compare_runs, read_run

    found = compare_runs(read_run(a), read_run(b), tolerance=tolerance)
    if as_json:
        _print(json.dumps(to_json(found), indent=2))
    else:
        print_comparison(found, _console())
    raise typer.Exit(VERDICTS[found.verdict])


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)


def _stream(text: str) -> None:
    sys.stdout.write(text.encode("utf-8", "replace").decode("utf-8"))
    sys.stdout.flush()


def _close(
    text: str,
    finish_reason: str,
    tokens: int | None,
    seconds: float,
    rate: float | None,
    length: float | None,
    *,
    as_json: bool,
) -> None:
    """The line after a completion: tokens per second of the whole request, prefill included."""
    per_second = None if tokens is None or seconds <= 0 else tokens / seconds
    if as_json:
        figures = {"tokens_per_s": per_second, "acceptance_rate": rate, "acceptance_length": length}
        _print(
            json.dumps({"text": text, "finish_reason": finish_reason, "output_tokens": tokens, "seconds": seconds, **figures})
        )
        return
    facts = [f"{tokens} tokens in {seconds:.2f} s"]
    facts += [] if per_second is None else [f"{per_second:.1f} tokens/s"]
    facts += ["no speculation"] if rate is None else [f"acceptance {rate:.2f}"]
    facts += [] if length is None or rate is None else [f"{length:.2f} tokens per step"]
    sys.stdout.write("\n")
    sys.stdout.flush()
    _say(", ".join([*facts, f"ended by {finish_reason}"]))


def _print_report(found: ValidationReport, *, full: bool) -> None:
    from toolkit.report.render import print_report

    print_report(found, _console(), full=full)


def _print_diagnoses(found: Any) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "missing": "bold red"}
    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "what was found"):
        table.add_column(title, overflow="fold")
    for one in found:
        detail = Text(one.detail)
        if one.mend is not None:
            detail.append(f"\n-> {one.mend}")
        table.add_row(Text(one.status, style=styles[one.status]), one.check, detail)
    Console().print(table)


@contextlib.contextmanager
def _signals(stop: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `stop` inside the block."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(text: str) -> None:
    print(text, flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
