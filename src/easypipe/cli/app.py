"""Registers the commands, reads global options, sets up the log, turns errors into exit codes.

Users see one line of an error; --debug shows the traceback.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, get_type_hints

import typer

from easypipe.cli.arguments import examples
from easypipe.cli.cache import cache
from easypipe.cli.discover import discover
from easypipe.cli.doctor import doctor
from easypipe.cli.evaluate import evaluate
from easypipe.cli.explain import explain
from easypipe.cli.export import export
from easypipe.cli.foreign import import_foreign
from easypipe.cli.generate import generate
from easypipe.cli.init import init
from easypipe.cli.kernels import kernels
from easypipe.cli.keys import as_setting, config, print_schema
from easypipe.cli.masks import masks
from easypipe.cli.parity import parity
from easypipe.cli.plan import plan
from easypipe.cli.prepare import prepare
from easypipe.cli.preview import preview
from easypipe.cli.quickstart import quickstart
from easypipe.cli.report import report
from easypipe.cli.runs import runs
from easypipe.cli.show import console
from easypipe.cli.train import train
from easypipe.cli.verify import verify
from easypipe.core.errors import EasypipeError, naming_extra

STOPPED = 130  # 128 + SIGINT

app = typer.Typer(
    help="Prepare data and train models in JAX, from raw text to a trained model.",
    epilog="Begin with: easypipe quickstart. Every command has examples: easypipe train --help.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# (name, function, examples at the end of its --help)
COMMANDS: tuple[tuple[str, Callable[..., None], tuple[str, ...]], ...] = (
    ("quickstart", quickstart, ("quickstart", "quickstart --output-dir try --set train.steps=50")),
    ("init", init, ("init sft", "init pretrain --out configs/mine.yaml")),
    (
        "import",
        import_foreign,
        ("import axolotl lora-8b.yml --out sft.yaml", "import trl recipes/sft.yaml"),
    ),
    (
        "discover",
        discover,
        ("discover data/chat", "discover 'data/*.jsonl' --column prompt=question"),
    ),
    ("preview", preview, ("preview sft.yaml", "preview sft.yaml -n 20 --html samples.html")),
    ("masks", masks, ("masks model/tokenizer", "masks tokenizer --messages chats.jsonl")),
    ("parity", parity, ("parity sft.yaml", "parity sft.yaml --rows 1000")),
    ("plan", plan, ("plan pretrain.yaml", "plan pretrain.yaml --topology v5p:4x4x4 --no-prepare")),
    ("prepare", prepare, ("prepare pretrain.yaml", "prepare pretrain.yaml --shard 0/8")),
    ("train", train, ("train sft.yaml", "train sft.yaml --set train.optimizer.learning_rate=1e-5")),
    ("runs", runs, ("runs runs", "runs runs --json")),
    (
        "report",
        report,
        ("report runs/sft", "report runs/one runs/two --out both.html", "report runs/sft --serve"),
    ),
    ("explain", explain, ("explain sft.yaml --step 120", "explain sft.yaml --step 120 --row 3")),
    ("export", export, ("export runs/sft tuned", "export runs/sft adapters --adapters")),
    (
        "generate",
        generate,
        ("generate runs/sft 'def main'", "generate runs/sft --chat --system 'Be brief.'"),
    ),
    (
        "eval",
        evaluate,
        (
            "eval runs/sft --tasks hellaswag,gsm8k --set limit=100",
            "eval runs/sft --tasks mine --include-path tasks --out scores.json",
        ),
    ),
    ("verify", verify, ("verify runs/sft", "verify packed pretrain.yaml --repair")),
    ("doctor", doctor, ("doctor sft.yaml", "doctor --machine --folder /mnt/shared")),
    ("config", config, ("config", "config train.optimizer", "config learning_rate")),
    ("schema", print_schema, ("schema > easypipe.schema.json",)),
)
for name, command, lines in COMMANDS:
    # Typer reads the annotations three times, and would compile their source text each time.
    command.__annotations__ = get_type_hints(command, include_extras=True)
    app.command(name, epilog=examples(*lines))(command)
app.add_typer(cache, name="cache")
app.add_typer(kernels, name="kernels")


def _version(asked: bool) -> None:
    """Prints the version and exits, if asked to."""
    if asked:
        from easypipe import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Allow the config to name Python functions to call; they may also be in the "
            "current folder.",
        ),
    ] = False,
    trust_endpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--trust-endpoint",
            metavar="URL",
            help="Allow HF_TOKEN and cloud credentials to be sent to this server, if a config "
            "names it; may be repeated.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    _log(logging.DEBUG if debug else logging.INFO)
    if trust_endpoint:
        from easypipe.core import trust

        for url in trust_endpoint:
            trust.trust_endpoint(url)
    if allow_code:
        from easypipe.core.config import allowing_code

        context.with_resource(allowing_code())
        if "" not in sys.path:
            sys.path.insert(0, "")


def run(arguments: Sequence[str] | None) -> int:
    """Runs the command that the arguments name, and returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for terminals that show only ASCII
            stream.reconfigure(errors="backslashreplace")
    # These are accepted anywhere, so that they can be appended to a command that failed.
    anywhere: list[str] = []
    for flag, values in (("--allow-code", 0), ("--debug", 0), ("--trust-endpoint", 1)):
        while flag in given:
            at = given.index(flag)
            anywhere += given[at : at + 1 + values]
            del given[at : at + 1 + values]
    given = [*anywhere, *given]
    debug = "--debug" in anywhere
    try:
        with naming_extra():
            code = app(given, prog_name="easypipe", standalone_mode=False)
        if code == STOPPED:  # typer returns this after Ctrl-C
            _say("stopped; run the same command again to continue")
            _end_others(code, KeyboardInterrupt("stopped"))
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  (a panic of a library in Rust is not an Exception)
        code = _told(error, given, debug=debug)
        _end_others(code, error)
        return code


def _has_others() -> bool:
    """Returns whether the run has more processes than this one."""
    if "easypipe.train.parallel.distributed" not in sys.modules:
        return False
    from easypipe.train.parallel.distributed import several

    return several()


def _end_others(code: int, error: BaseException) -> None:
    """Ends the other processes of a multi-process run, which cannot go on without this one."""
    if _has_others():
        from easypipe.train.parallel.distributed import leave

        leave(code, error)


def _told(error: BaseException, given: Sequence[str], *, debug: bool) -> int:
    """Prints an error, and returns its exit code.

    With `debug` it raises the error instead.
    """
    if isinstance(error, EasypipeError):
        if debug:
            raise error
        _say(str(error))
        # Only errors with notes have the attribute.
        for note in getattr(error, "__notes__", ()):
            # jax adds this note to every error that passes through it.
            if "JAX has removed its internal frames" not in note:
                _say(f"  {note}")
        return error.exit_code
    show = getattr(error, "show", None)  # a usage error of the command line itself
    if show is not None and not debug:
        show()
        _say_how_to_set(str(error), given)
        return int(getattr(error, "exit_code", 2))
    if debug:
        raise error
    if isinstance(error, BrokenPipeError):  # the reader of the output has closed it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (flushed at the exit)
        return 1
    if isinstance(error, OSError) and error.errno is not None:
        what = "the path" if isinstance(error, FileNotFoundError) else "space and permissions"
        _say(f"{error.filename or 'output'}: {error.strerror}. Check {what}.")
        return 1
    device = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    if isinstance(error, MemoryError) or device:
        _say("memory ran out. Give the process more, or less to do at a time.")
        return 1
    if re.search(r"\bGloo\b|\bNCCL\b|UNAVAILABLE|heartbeat", str(error)) and _has_others():
        _say(
            "another process of the run has ended or cannot be reached: see what it printed, then "
            "run the same command in all of them again: they continue from the last checkpoint. "
            f"({str(error).splitlines()[0]})"
        )
        return 1
    _say(
        f"{type(error).__name__}: {error}. This is a bug in easypipe; run again with "
        "--debug, and report what it prints."
    )
    return 1


def _say_how_to_set(problem: str, given: Sequence[str]) -> None:
    """Prints how to set a config key that was given as an unknown option, or as a second key after
    one `--set`.
    """
    option = re.match("No such option: (--[a-z_-]+)", problem)
    behind = re.search(r"unexpected extra argument\(s\) \(([\w.]+=\S*)", problem.replace("'", ""))
    called = next((command for name, command, _ in COMMANDS if name in given), None)
    if called is None or "overrides" not in called.__annotations__:
        return
    if option is not None and (told := as_setting(option[1])) is not None:
        _say(told)
    if behind is not None:
        _say(f"each key needs its own --set: --set {behind[1].rstrip(')')}")


def _say(text: str) -> None:
    """Prints a line on stderr."""
    from easypipe.cli.terminal import Terminal

    Terminal(stderr=True, soft_wrap=True).print(f"easypipe: {text}")


def _log(level: int) -> None:
    """Sends the package's log to the terminal."""
    from rich.logging import RichHandler

    from easypipe.cli.terminal import Terminal

    logger = logging.getLogger("easypipe")
    logger.setLevel(level)
    # The log uses the console of the progress bars; otherwise its lines would break them.
    terminal = console() if console().is_terminal else Terminal(stderr=True)
    handler = RichHandler(level, terminal, show_time=False, show_path=False, markup=False)
    logger.handlers = [handler]
    logger.propagate = False  # libraries may add handlers to the root logger
