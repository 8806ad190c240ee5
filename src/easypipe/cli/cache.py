"""`easypipe cache list` and `easypipe cache clear`: their options, and what they print."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from easypipe.cli.arguments import AsJson, examples
from easypipe.cli.show import aligned, say

if TYPE_CHECKING:
    from easypipe.cache.admin import CachedDataset
    from easypipe.cache.folder import CacheFolder
    from easypipe.core.values import JsonObject

cache = typer.Typer(
    help="List and clear the token cache.",
    no_args_is_help=True,
    epilog=examples("cache list", "cache clear --older-than 30 --dry-run"),
)

Folder = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        metavar="FOLDER",
        help="The cache folder, or its URL. Default: $EASYPIPE_CACHE, else the user's cache "
        "folder.",
    ),
]


@cache.command("list", epilog=examples("cache list", "cache list --json"))
def list_(cache_dir: Folder = None, as_json: AsJson = False) -> None:
    """List the prepared datasets. For each it shows rows, tokens, size, tokenizer and age, and
    whether a process has it open.
    """
    from easypipe.cache.admin import list_cache

    found = list_cache(_folder(cache_dir))
    if as_json:
        typer.echo(
            json.dumps(
                dataclasses.asdict(found)
                | {"path": str(found.path), "datasets": [_plain(one) for one in found.datasets]}
            )
        )
        return
    lines = [("dataset", "key", "rows", "documents", "tokens", "MB", "age", "", "tokenizer")]
    for one in found.datasets:
        counts = (
            f"{one.rows:,}",
            f"{one.documents:,}",
            f"{one.tokens:,}",
            f"{one.num_bytes / 1e6:,.1f}",
            _age(one.age_s),
        )
        lines.append(
            (one.dataset, one.key[:8], *counts, "in use" if one.in_use else "", one.tokenizer)
        )
    say(
        f"{found.path}\n{aligned(lines, left=(0, 1, 7, 8))}",
    )
    leftover = (
        f", {found.leftover_bytes / 1e6:,.1f} MB of it named by no dataset"
        if found.leftover_bytes
        else ""
    )
    say(f"{found.num_bytes / 1e6:,.1f} MB in all{leftover}")


@cache.command(
    "clear", epilog=examples("cache clear --older-than 30 --dry-run", "cache clear --dataset code")
)
def clear(
    cache_dir: Folder = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            metavar="DAYS",
            help="Only datasets that were prepared at least this many days ago.",
        ),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset", metavar="NAME", help="Only datasets with this name; may be repeated."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")
    ] = False,
) -> None:
    """Remove prepared datasets, and files that no other dataset uses. Datasets that a process has
    open are kept, and nothing is removed while data is being prepared.
    """
    from easypipe.cache.admin import clear_cache

    folder = _folder(cache_dir)
    done = clear_cache(folder, older_than_days=older_than, datasets=dataset, dry_run=dry_run)
    verb = "would remove" if dry_run else "removed"
    names = f" ({', '.join(done.removed)})" if done.removed else ""
    say(
        f"{verb} {len(done.removed)} datasets{names}: {done.files:,} files, "
        f"{done.num_bytes / 1e6:,.1f} MB: {folder.at()}",
    )
    if folder.remote and done.removed:
        say(
            "readers of a bucket are unknown: a process that reads it fails, because files are "
            "missing, and must prepare again",
        )
    for name in done.kept:
        say(f"kept {name}: a reader has it open")


def _folder(given: str | None) -> CacheFolder:
    """Returns the cache at `given`, else the default one.

    Raises:
        ConfigError: The path is a file.
    """
    from easypipe.cache.location import cache_folder

    return cache_folder(given, key="--cache-dir")


def _plain(one: CachedDataset) -> JsonObject:
    """Returns the fields of a dataset without the manifest, which `easypipe verify` checks."""
    from easypipe.core.config import fields_of

    values = fields_of(one) | {"path": str(one.path)}
    return {name: value for name, value in values.items() if name != "manifest"}


def _age(seconds: float) -> str:
    """Formats an age in its largest unit."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
