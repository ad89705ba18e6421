"""The `ctj` command: what can be typed, and its help. Each command imports its work when it is called."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ctj_api import __version__
from ctj_operator.cli import DEFAULT_WORK_DIR
from ctj_operator.cli.pipes import said
from ctj_operator.local.refusal import Refusal

if TYPE_CHECKING:
    from ctj_operator.local.store import Store

app = typer.Typer(
    name="ctj",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich help takes 0.7 s to import, plain help none
    pretty_exceptions_enable=False,
    help="Compiled Training Jobs: from a first try on a laptop to a sharded run, with torch.compile left on.",
    epilog="Start: ctj run examples/quickstart.yaml. Ask: ctj explain NAME. Each command's --help has examples.",
)


def _names(incomplete: str) -> list[str]:
    """Complete the jobs of the default work folder, without an import that a Tab would wait for."""
    folders = (path.parent.name for path in DEFAULT_WORK_DIR.glob("*/job.json"))
    return sorted(name for name in folders if name.startswith(incomplete) and "." not in name)


WorkDir = Annotated[Path, typer.Option("--work-dir", help="Folder that holds one folder per job.", metavar="DIR")]
Name = Annotated[
    str,
    typer.Argument(help="A job's name (metadata.name), or its folder.", metavar="NAME", autocompletion=_names),
]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: one JSON object per line.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ctj {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take options that belong to no command."""


@app.command(short_help="Train the job in FILE on this machine.")
def run(  # noqa: PLR0913, PLR0917 - one parameter per option
    file: Annotated[
        Path, typer.Argument(help="A job's YAML file, or the folder of a job to go on with.", metavar="FILE")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one value of the file; may be repeated.", metavar="PATH=VALUE"),
    ] = None,
    work_dir: WorkDir = DEFAULT_WORK_DIR,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="Compiled code, shared by all jobs.", metavar="DIR")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; an earlier run's folder is kept under another name.")
    ] = False,
    as_json: AsJson = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, as when the output is piped.")] = False,
) -> None:
    """Train the job in FILE on this machine, through every stage of its ladder.

    Ctrl-C saves a checkpoint and stops; the same command goes on from there. Typed twice, it never trains twice.

    \b
    Exit codes:
      0  succeeded
      1  failed (the first failure and its remedy are printed)
      2  bad spec or usage (every problem is printed)
      3  held by a gate (the approve command is printed)
      4  something is missing on this machine (how to get it is printed)
      130  stopped by Ctrl-C or a pause; the same command goes on

    \b
    Examples:
      ctj run examples/quickstart.yaml
      ctj run job.yaml --set spec.training.steps=40 --set spec.compile.scope=disabled
      ctj run job.yaml --json > run.jsonl
      ctj run ctj-runs/quickstart          # go on with a job from its folder
    """
    from ctj_operator.cli import places
    from ctj_operator.cli.run import Request
    from ctj_operator.cli.run import run as run_job

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    request = Request(
        file=file,
        overrides=tuple(overrides or ()),
        work_dir=work_dir,
        cache_dir=cache_dir or places.cache_dir(),
        fresh=fresh,
        json=as_json,
        plain=plain,
    )
    raise typer.Exit(run_job(request))


@app.command(short_help="Print every problem of job files.")
def validate(
    files: Annotated[list[Path], typer.Argument(help="Jobs' YAML files; - is what is piped in.", metavar="FILE...")],
    as_json: AsJson = False,
) -> None:
    """Check FILEs as the API server would; print every problem with its path, value, rule and remedy.

    \b
    Examples:
      ctj validate examples/*.yaml
      ctj validate job.yaml --json
    """
    from ctj_operator.cli.validation import validate as validate_files

    raise typer.Exit(validate_files(files, as_json=as_json))


@app.command("list", short_help="List local jobs.")
def list_jobs(work_dir: WorkDir = DEFAULT_WORK_DIR, as_json: AsJson = False) -> None:
    """List the jobs of a work folder."""
    from ctj_operator.cli import listing

    if as_json:
        print("\n".join(json.dumps(row) for row in listing.rows(work_dir)))
    else:
        print(listing.table(work_dir))


@app.command(short_help="Follow a job that another ctj run trains.")
def watch(
    name: Name,
    work_dir: WorkDir = DEFAULT_WORK_DIR,
    as_json: AsJson = False,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, as when the output is piped.")] = False,
) -> None:
    """Follow a job that another `ctj run` trains; Ctrl-C only ends the looking."""
    from ctj_operator.cli import listing

    raise typer.Exit(listing.watch(_job(name, work_dir), json=as_json, plain=plain))


@app.command(short_help="Say why a job is where it is, and what to do.")
def explain(name: Name, work_dir: WorkDir = DEFAULT_WORK_DIR) -> None:
    """Say why a job is where it is: conditions, gates with values, remedies, first failure, what to do next."""
    from ctj_operator.cli.explain import explain as explain_job

    print(explain_job(_job(name, work_dir)))


@app.command(short_help="Write a job's report page.")
def report(name: Name, work_dir: WorkDir = DEFAULT_WORK_DIR) -> None:
    """Write the job's report page (one self-contained HTML file) and print where it is."""
    from ctj_operator.cli.summary import write_report

    print(write_report(_job(name, work_dir)))


@app.command(short_help="Print what the trainers printed.")
def logs(
    name: Name,
    rank: Annotated[int | None, typer.Option("--rank", help="Only this rank's lines.", min=0)] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", help="Default: the newest.", min=1)] = None,
    work_dir: WorkDir = DEFAULT_WORK_DIR,
) -> None:
    """Print what the trainers of an attempt printed.

    \b
    Examples:
      ctj logs quickstart --rank 1
      ctj logs quickstart --attempt 2
    """
    from ctj_operator.cli.logs import lines

    for line in lines(_job(name, work_dir), attempt=attempt, rank=rank):
        print(line)


@app.command(short_help="Let a held job go on.")
def approve(name: Name, work_dir: WorkDir = DEFAULT_WORK_DIR) -> None:
    """Let a held job go on although a gate failed; the evidence stays in its status."""
    _ask("approve", name, work_dir)


@app.command(short_help="Go back to the last good stage.")
def rollback(name: Name, work_dir: WorkDir = DEFAULT_WORK_DIR) -> None:
    """Go back to the last good stage and its checkpoint, and finish there."""
    _ask("rollback", name, work_dir)


@app.command(short_help="Stop using compiled code.")
def eager(name: Name, work_dir: WorkDir = DEFAULT_WORK_DIR) -> None:
    """Stop using compiled code, at the next step on every rank, without losing one."""
    _ask("eager", name, work_dir)


@app.command("retry-compile", short_help="Compile again in a job that runs eager.")
def retry_compile(name: Name, work_dir: WorkDir = DEFAULT_WORK_DIR) -> None:
    """Compile (and compare) again in a job that runs eager."""
    _ask("retry-compile", name, work_dir)


@app.command(short_help="Give a failed or held job new budgets.")
def retry(name: Name, work_dir: WorkDir = DEFAULT_WORK_DIR) -> None:
    """Give a failed or held job new budgets, from its last checkpoint."""
    _ask("retry", name, work_dir)


@app.command(short_help="Save a checkpoint and stop.")
def pause(name: Name, work_dir: WorkDir = DEFAULT_WORK_DIR) -> None:
    """Save a checkpoint and stop until resumed."""
    _ask("pause", name, work_dir)


@app.command(short_help="End a pause.")
def resume(name: Name, work_dir: WorkDir = DEFAULT_WORK_DIR) -> None:
    """End a pause."""
    _ask("resume", name, work_dir)


_JobFile = Annotated[
    Path | None, typer.Option("-f", "--file", help="A job's YAML file: its recipe, precision, ladder.", metavar="FILE")
]


@app.command(short_help="Check a recipe or a script before it trains.")
def check(
    target: Annotated[
        str,
        typer.Argument(help="A recipe (name or module:function) or a script (FILE.py).", metavar="RECIPE|SCRIPT.py"),
    ] = "",
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML or JSON: the recipe's config.", metavar="FILE")
    ] = None,
    job: _JobFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what in a model or a script breaks compiled distributed training, where, and what to write instead.

    A recipe's model is built and run on one small batch, on the CPU, without generating code. A script is read,
    never run. Rules: DDP (all-reduce only in backward, shapes across ranks, unused parameters, no_sync), FSDP (every
    parameter managed, gathered, sharded again), AMP (nested autocast, fixed dtypes, scaler order), static graphs
    (branches, loops, shapes and assertions on data, parameters made at run time, export), hooks that would be traced,
    dtype and device mismatches, numbers read from tensors in layers. Each finding names module or parameter, file and
    line.

    \b
    Exit codes:
      0  no rule is violated
      1  violations (each is printed with its remedy)
      2  bad usage, recipe or config
      4  the trainer is not installed here

    \b
    Examples:
      ctj check -f examples/quickstart.yaml
      ctj check my_package.recipe:build --config config.yaml
      ctj check train.py --json
    """
    from rich.console import Console

    from ctj_operator.cli import checks

    if not target and job is None:
        raise Refusal("name a recipe or a script, or a job with -f; see ctj check --help")
    answer = checks.check(target, config=config, job=job)
    _tell(answer, as_json=as_json, show=lambda: checks.show(answer, Console()))
    raise typer.Exit(checks.exit_code(answer))


@app.command(short_help="Say what is wrong with this machine or a job, from the known lists.")
def doctor(
    target: Annotated[
        str,
        typer.Argument(help="As for ctj check; may be left out.", metavar="[RECIPE|SCRIPT.py]"),
    ] = "",
    job: _JobFile = None,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Run compile alone, prepare and offload alone, and both; say what breaks.")
    ] = False,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="Compiled code, shared by all jobs.", metavar="DIR")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer the troubleshooting lists, one line per item: compile with Accelerate, offload, regional, enablement.

    Looks at the machine (compiler, Triton, cache folder, variables, versions, the order test) and, with a job, a recipe
    or a script, at that too, as `ctj check` does. With --isolate each form runs in a process of its own: "offload alone
    fine, compile alone fine, together broken" is then said with its cure.

    \b
    Exit codes:
      0  nothing is wrong
      1  violations
      2  bad usage, recipe or config
      4  something is missing on this machine

    \b
    Examples:
      ctj doctor
      ctj doctor -f job.yaml
      ctj doctor --isolate my_package.recipe:build
    """
    from rich.console import Console

    from ctj_operator.cli import checks, places

    if isolate:
        answer = checks.isolate(target, job=job)
    else:
        answer = checks.doctor(target, job=job, cache=cache_dir or places.cache_dir())
    _tell(answer, as_json=as_json, show=lambda: checks.show(answer, Console()))
    raise typer.Exit(checks.exit_code(answer))


def _tell(answer: dict[str, object], *, as_json: bool, show: Callable[[], None]) -> None:
    if as_json:
        print(json.dumps(answer))
    else:
        show()


@app.command(short_help="Show hardware profiles, and what this machine resolves to.")
def profiles(
    device: Annotated[
        str, typer.Option("--device", help="A device of the table instead of what is here.", metavar="NAME")
    ] = "",
    profile: Annotated[str, typer.Option("--profile", help="default or published.", metavar="SET")] = "default",
    as_json: AsJson = False,
) -> None:
    """Show the hardware profiles, what hardware is here, and what becomes of each flag with the installed torch.

    \b
    Examples:
      ctj profiles
      ctj profiles --profile published --device h100
      CTJ_PROFILES_FILE=ours.yaml ctj profiles --json
    """
    from rich.console import Console

    from ctj_operator.cli.profiles import ask, show

    answer = ask(profile=profile, device=device)
    if as_json:
        print(json.dumps(answer))
    else:
        show(answer, Console())


def _job(name: str, work_dir: Path) -> "Store":
    from ctj_operator.cli.places import find_job

    return find_job(name, work_dir)


def _ask(verb: str, name: str, work_dir: Path) -> None:
    from ctj_operator.cli.verbs import ask

    print(ask(_job(name, work_dir), verb))


def main() -> None:
    """Run the command line: expected troubles are one message on stderr, never a traceback."""
    # `ctj logs x | head`: the kernel ends us quietly, as it ends other tools. `ctj run` must outlive its pipe.
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app()
    except Refusal as error:
        print(f"ctj: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    finally:
        said()
        signal.signal(signal.SIGPIPE, before)


if __name__ == "__main__":
    main()
