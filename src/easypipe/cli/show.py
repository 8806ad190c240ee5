"""What commands print: the training line, tables, the ledger, saved folders, pages; progress."""

from __future__ import annotations

import functools
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from easypipe.core.progress import LOG_S, Pace, ProgressLine

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.table import Table
    from rich.text import Text

    from easypipe.cli.terminal import Terminal
    from easypipe.core.ledger import Ledger
    from easypipe.core.protocols import ProgressEvent, ProgressListener
    from easypipe.core.values import Json
    from easypipe.stages.save import SaveReport
    from easypipe.train.events import TrainEvent, TrainListener


@functools.cache
def console() -> Terminal:
    """Returns the console on which everything is printed.

    Its library is imported on first use, because `--help` and completion do not need it.
    """
    from easypipe.cli.terminal import Terminal

    return Terminal()


def say(text: str | Text, style: str | None = None) -> None:
    """Prints text unchanged: nothing is highlighted, and no line is cut or wrapped."""
    console().print(text, style=style, soft_wrap=True)


def require_one(as_json: bool, html: Path | None) -> None:
    """Checks that JSON and a page are not both requested."""
    from easypipe.core.errors import require

    require(
        not as_json or html is None,
        "--json",
        "has no effect together with --html",
        "Leave one of them out.",
    )


def write_page(path: Path, page: str) -> None:
    """Writes an HTML page as one commit, and prints its path."""
    from easypipe.core.pages import commit_page

    commit_page(path, page)
    say(f"wrote {path}")


@contextmanager
def progress() -> Generator[ProgressListener, None, None]:
    """Yields a listener that shows a bar for every stage and dataset that reports progress.

    The bars appear in the order of their first reports, with counts, rate and remaining time.
    Without a terminal it prints a line every half minute.
    """
    from easypipe.cli.terminal import progress_bars

    if not console().is_terminal:
        yield ProgressLine(console().file)
        return
    bars = progress_bars(console(), "{task.fields[unit]}", "{task.fields[pace]}")
    tasks: dict[tuple[str, str], TaskID] = {}
    pace = Pace()

    def listen(event: ProgressEvent) -> None:
        key = (event.stage, event.dataset)
        if key not in tasks:
            tasks[key] = bars.add_task(
                f"{event.stage:<9} {event.dataset}", total=event.total, unit=event.unit, pace=""
            )
        bars.update(tasks[key], completed=event.done, total=event.total)
        if event.done != event.total:  # work that was already done has no rate
            bars.update(tasks[key], pace=pace.text(event))

    with bars:
        yield listen


@contextmanager
def training() -> Generator[TrainListener, None, None]:
    """Yields a listener that shows the current step, and prints each evaluation.

    Without a terminal it prints lines for the first and last step and every half minute, with the
    remaining time.
    """
    from easypipe.cli.terminal import progress_bars
    from easypipe.core.protocols import ProgressEvent

    bars = progress_bars(console(), "{task.fields[line]}")
    task: TaskID | None = None
    pace, said, live = Pace(events=50), -LOG_S, console().is_terminal

    def listen(event: TrainEvent) -> None:
        nonlocal task, said
        if task is None:
            task = bars.add_task("train", total=event.steps, line="compiling")
        if event.kind == "start" and event.step == event.steps:
            say(f"all {event.steps} steps are trained; to continue, set a larger train.steps")
        elif event.kind == "start":
            if event.step:
                say(f"training continues from step {event.step}")
            if not live:
                say("compiling: the first step takes longer")
        bars.update(task, completed=event.step)
        if event.kind == "step":
            line = training_line(event)
            bars.update(task, line=line)
            now = time.monotonic()
            at = ProgressEvent(
                stage="train", dataset="", done=event.step, total=event.steps, unit="steps"
            )
            speed = pace.text(at, now)
            held_out = "  ".join(
                f"{name} {seen['loss']:.3f} ({quality(seen)})"
                for name, seen in event.record.get("eval", {}).items()
            )
            due = now - said >= LOG_S or event.step == event.steps
            if held_out or (due and not live):
                said = now
                parts = (f"step {event.step:>5}", line, held_out and f"held out: {held_out}", speed)
                say("  ".join(filter(None, parts)))

    with bars if live else nullcontext():
        yield listen


QUALITY = (
    ("accuracy", "accuracy {:.2%}"),
    ("reward_accuracy", "reward accuracy {:.2%}"),
    ("reward_desirable", "reward of desirable answers {:.3f}"),
    ("reward_undesirable", "reward of undesirable answers {:.3f}"),
    ("ppl", "ppl {:.1f}"),
)


def quality(seen: Json, unknown: str = "no ppl") -> str:
    """Returns the quality that is shown with a loss, as text.

    It is the accuracy of a classifier, the share of pairs whose preferred answer won, the mean
    reward of answers without pairs, or the perplexity of tokens; `unknown` if there is none
    that is a finite number.
    """
    known = (words.format(seen[key]) for key, words in QUALITY if seen.get(key) is not None)
    return next(known, unknown)


def training_line(event: TrainEvent) -> str:
    """Returns the numbers of a step as one line.

    They are loss, quality, gradient norm, learning rate, images or non-padding tokens per second,
    MFU if the device's peak is known, and the share of time spent waiting for data.
    """
    r = event.record
    parts = ["skipped: not finite" if r["loss"] is None else f"loss {r['loss']:.4f}"]
    parts += filter(None, [quality(r, unknown="")])
    for key, text in (
        ("grad_norm", "grad {:.2f}"),
        ("learning_rate", "lr {:.2e}"),
        ("tokens_per_second", f"{{:,.0f}} {'images' if 'accuracy' in r else 'tok'}/s"),
        ("mfu", "MFU {:.1%}"),
        ("data_wait", "wait {:.1%}"),
    ):
        if r.get(key) is not None:
            parts.append(text.format(r[key]))
    return "  ".join(parts)


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Returns lines in aligned columns, never cut to the width of a terminal.

    Columns numbered in `left` are aligned to the left, the others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    to = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    return "\n".join(
        "  ".join(put(v, w) for put, v, w in zip(to, line, widths, strict=True)).rstrip()
        for line in lines
    )


def ledger_table(ledger: Ledger) -> Table:
    """Returns the table of a ledger."""
    from rich.table import Table

    table = Table(title="Ledger: where every row and token went", title_justify="left")
    for column in ("stage", "dataset", "unit"):
        table.add_column(column, overflow="fold")  # a name is never cut
    table.add_column("in", justify="right")
    table.add_column("out")
    for entry in ledger.entries:
        came = f"{sum(entry.into.values()):,}"
        if len(entry.into) > 1:
            came = " + ".join(f"{name} {count:,}" for name, count in entry.into.items())
        went = ", ".join(f"{name} {count:,}" for name, count in entry.out.items())
        table.add_row(entry.stage, entry.dataset, entry.unit, came, went)
    return table


def show_report(report: SaveReport) -> None:
    """Prints the ledger, what was measured, and where the files are."""
    if report.ledger.entries:
        console().print(ledger_table(report.ledger))
    facts = report.ledger.facts
    for name in [
        key.removesuffix(".seconds")
        for key in facts
        if key.startswith("tokenize.") and key.endswith(".seconds")
    ]:
        seconds, rate = facts[f"{name}.seconds"], facts.get(f"{name}.megabytes_per_second")
        found = f", {facts.get(f'{name}.ranges_reused', 0):,} ranges found finished"
        rate_text = found if rate is None else f", {rate:,.1f} MB/s"
        encoder = facts.get(f"{name}.encoder", "?")
        if encoder or rate is None:  # otherwise the data was already tokenized
            by = f", by {encoder}" if encoder else ""
            say(f"{name.replace('.', ' ', 1)}: {seconds:.2f} s{rate_text}{by}")
        if cut := facts.get(f"{name}.files_cut"):
            what = (
                f"{cut:,} file{'s' if cut > 1 else ''} without an end mark; how many rows are "
                "missing is not known"
            )
            say(f"{name.replace('.', ' ', 1)}: {what}")
    for name in [
        key.removesuffix(".fill")
        for key in facts
        if key.startswith("pack.") and key.endswith(".fill")
    ]:
        rows, fill = facts[f"{name}.rows"], facts[f"{name}.fill"]
        filled = f"{fill:.2%} of their slots filled" if rows else "nothing would be trained"
        say(f"{name.replace('.', ' ', 1)}: {rows:,} rows, {filled}")
    for folder in report.folders:
        state = "up to date" if folder.up_to_date else f"{folder.seconds:.2f} s"
        if folder.resumed_shards and not folder.up_to_date:
            state += f", {folder.resumed_shards} shards found finished"
        mb = folder.num_bytes / 1e6
        say(
            f"saved {folder.dataset}: {folder.num_rows:,} rows in {folder.num_shards} "
            f"{folder.format} shards, "
            f"{mb:,.1f} MB ({state}): {folder.path}",
        )
    for pushed in report.pushed:
        state = "up to date" if pushed.up_to_date else f"{pushed.seconds:.2f} s"
        say(
            f"pushed {pushed.num_files} files, {pushed.num_bytes / 1e6:,.1f} MB ({state}): "
            f"{pushed.url}",
        )
