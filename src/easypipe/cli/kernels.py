"""`easypipe kernels tune` and `easypipe kernels table`: block sizes of the loss kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.arguments import examples
from easypipe.cli.show import aligned, say

kernels = typer.Typer(
    help="Measure and show block sizes of the loss kernels.",
    no_args_is_help=True,
    epilog=examples("kernels tune --vocab 128256 --dtype bfloat16", "kernels table"),
)

Table = Annotated[
    Path | None,
    typer.Option(
        "--table",
        metavar="FILE",
        help="The table's file. Default: the user's table, which the loss kernels read.",
    ),
]


@kernels.command(
    "tune", epilog=examples("kernels tune", "kernels tune --vocab 128256 --dtype bfloat16")
)
def tune_(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per device and step.")] = 4096,
    width: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 1024,
    vocab: Annotated[
        int, typer.Option(min=1, help="Vocabulary entries of the head on one device.")
    ] = 50257,
    dtype: Annotated[str, typer.Option(help="The dtype: bfloat16 or float32.")] = "float32",
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs of each choice; the fastest is used.")
    ] = 5,
    table: Table = None,
) -> None:
    """Measure block sizes of the loss on this device. Forward and backward passes are timed, and
    the fastest block sizes are written to a table.

    Block sizes whose results differ from the reference are not timed.
    """
    from easypipe.kernels.tuning import measure as tune
    from easypipe.kernels.tuning import table as tuning

    def show(trial: tune.Trial) -> None:
        sizes = ", ".join(f"{name} {size}" for name, size in trial.blocks.items())
        took = f"{trial.ms:,.2f} ms" if trial.ms is not None else f"does not run: {trial.failure}"
        say(f"{sizes}: {took}")

    path = table or tuning.user_table()
    entry = tune.tune(tokens, width, vocab, dtype, repeats=repeats, on_trial=show)
    tuning.extend_table(path, [entry])
    sizes = ", ".join(f"{name} {size}" for name, size in entry.blocks.items())
    shape = f"tokens up to {entry.tokens:,}, width {entry.width:,}, vocabulary {entry.vocab:,}"
    line = (
        f"{entry.device}, {entry.implementation}, {entry.dtype}, {shape}: {sizes} "
        f"({entry.ms:,.2f} ms): {path}"
    )
    say(line)


@kernels.command("table", epilog=examples("kernels table"))
def table_(table: Table = None) -> None:
    """Show the measured block sizes."""
    from easypipe.kernels.tuning import table as tuning

    path = table or tuning.user_table()
    entries = tuning.read_table(path) if table or path.exists() else []
    lines = [("device", "implementation", "tokens", "width", "vocab", "dtype", "ms", "blocks")]
    for one in entries:
        sizes = " ".join(f"{name}={size}" for name, size in one.blocks.items())
        shape = f"{one.tokens:,}", f"{one.width:,}", f"{one.vocab:,}"
        lines.append((one.device, one.implementation, *shape, one.dtype, f"{one.ms:,.2f}", sizes))
    say(aligned(lines, left=(0, 1, 5, 7)))
