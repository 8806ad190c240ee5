"""`easypipe config`, `easypipe schema`; completes keys, and says which key an unknown option is.

They read easypipe.schema.json, which docs/reference.py generates from the config classes; a test
checks that the two agree.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from easypipe.cli.show import console, say
from easypipe.core.errors import ConfigError, did_you_mean
from easypipe.core.foreign_names import ours

if TYPE_CHECKING:
    from easypipe.core.values import JsonObject

SCHEMA = Path(__file__).parent / "templates" / "easypipe.schema.json"
# The classes that a config file may describe: a run, a pipeline, a run on images, and the data of
# compat.DataPipeline.
KINDS = ("RunConfig", "PipelineConfig", "ClassifyConfig", "DataPipelineConfig")


@functools.cache
def schema() -> JsonObject:
    """Returns the JSON Schema of configs."""
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


def children(node: JsonObject) -> dict[str, JsonObject]:
    """Returns the keys of a node of the schema, and of the items of its lists and mappings."""
    found: dict[str, JsonObject] = {}
    for cls in sections(node):
        found = schema()["$defs"][cls].get("properties", {}) | found
    return found


def sections(node: JsonObject) -> list[str]:
    """Returns the names of the config classes that a node, or an item of it, may be."""
    found = [node["$ref"].rpartition("/")[2]] if "$ref" in node else []
    inner = [*node.get("anyOf", ()), node.get("items"), node.get("additionalProperties")]
    for one in inner:
        found += sections(one) if isinstance(one, dict) else []
    return found


def find(path: str) -> JsonObject | None:
    """Returns the node of a key path such as `data.datasets[0].name`; None if there is no such key.

    Numbers of items, and names that the user gives in a mapping, may be left out.
    """
    parts = [part for part in re.split(r"[.\[\]]+", path) if part]
    if path.endswith("."):
        return None
    for kind in KINDS:
        node: JsonObject | None = {"$ref": f"#/$defs/{kind}"}
        for part in parts:
            assert node is not None
            below = children(node)
            held = json.dumps(node.get("anyOf", [node]))
            free = ("array" in held and part.isdecimal()) or "object" in held
            node = below.get(part) or (node if free else None)
            if node is None:
                break
        if node is not None and parts:
            return node
    return None


def paths() -> Iterator[tuple[str, JsonObject]]:
    """Yields every key path of a run, with its node, then those of a run on images."""
    seen: set[str] = set()
    for kind in ("RunConfig", "ClassifyConfig"):
        for path, node in _below({"$ref": f"#/$defs/{kind}"}, ""):
            if path not in seen:
                seen.add(path)
                yield path, node


def _below(node: JsonObject, prefix: str) -> Iterator[tuple[str, JsonObject]]:
    for name, child in children(node).items():
        yield f"{prefix}{name}", child
        yield from _below(child, f"{prefix}{name}.")


def complete_key(incomplete: str) -> list[tuple[str, str]]:
    """Returns how `--set` can be completed: keys with their meaning, or the options of a key."""
    path, equals, value = incomplete.partition("=")
    if equals:
        options = re.findall(r"'([^']*)'", (find(path) or {}).get("x-type", ""))
        return [(f"{path}={option}", "") for option in options if option.startswith(value)]
    prefix, _, begun = path.rpartition(".")
    nodes = [{"$ref": f"#/$defs/{kind}"} for kind in KINDS[:3]]
    if prefix:
        nodes = [node for node in [find(prefix)] if node is not None]
    if prefix and "items" in json.dumps(nodes) and not prefix[-1].isdecimal():
        return [(f"{prefix}.0.", "the first of the list")]
    found: dict[str, str] = {}
    for node in nodes:
        for name, child in children(node).items():
            if name.startswith(begun):
                end = "." if children(child) else "="
                whole = ".".join(filter(None, (prefix, name))) + end
                found.setdefault(whole, child.get("description", ""))
    return list(found.items())


def as_setting(option: str) -> str | None:
    """Returns how to set an unknown option as a key of a run; None if there is no such key."""
    name = option.lstrip("-").replace("-", "_")
    every = (path for path, _ in _below({"$ref": "#/$defs/RunConfig"}, ""))
    found = [path for path in every if path.rpartition(".")[2] == name]
    found.sort(key=lambda path: path.count("."))
    return f"{option} is a key of the config: --set {found[0]}=VALUE" if found else None


def config(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="[KEY]",
            help="A key path, such as train.optimizer.learning_rate, or its last part.",
            autocompletion=lambda incomplete: [
                (text.rstrip("=."), words) for text, words in complete_key(incomplete)
            ],
        ),
    ] = None,
) -> None:
    """Show the meaning, type and default of a config key. Without KEY, it lists all sections."""
    if key is None:
        for path, node in paths():
            if sections(node) and not path.startswith("eval."):  # its keys are those of data
                _show(path, node)
        return
    node = find(key)
    if node is not None:
        _show(key, node)
        for name, child in children(node).items():
            _show(f"{key}.{name}", child)
        return
    same = [(path, node) for path, node in paths() if path.endswith(f".{key}")]
    if not same:
        raise ConfigError(at=key or "''", problem="no such key", fix=_nearest(key))
    for path, node in same:
        _show(path, node)


def print_schema() -> None:
    """Print the JSON Schema of configs, for editors. They use it to complete and check files whose
    first line is: # yaml-language-server: $schema=easypipe.schema.json
    """
    typer.echo(SCHEMA.read_text(encoding="utf-8"), nl=False)


def _nearest(key: str) -> str:
    """Returns a suggestion for an unknown key."""
    every = [path for path, _ in paths()]
    last = key.rpartition(".")[2]
    names = {path.rpartition(".")[2] for path in every}
    near = ours(last) or did_you_mean(key, every) or did_you_mean(last, sorted(names))
    return near or "See all sections with: easypipe config"


def _show(path: str, node: JsonObject) -> None:
    """Prints a key with its type and default, then its meaning, wrapped to the terminal."""
    say(f"{path}: {node['x-type']}{_default(node)}", style="bold")
    said = textwrap.wrap(node["description"], max(console().width - 4, 20))
    say(textwrap.indent("\n".join(said), "    "))


def _default(node: JsonObject) -> str:
    default: Any = node["x-default"]
    return ", required" if default is None else f" = {default}"
