"""The generated pages of the site, as a mkdocs hook: every config class with its keys, every public
name with its docstring.

Nothing is written by hand that the code already says: keys, types and defaults come from the
classes, the words from their docstrings and from the comments beside the fields.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import io
import pkgutil
import re
import sys
import textwrap
import tokenize
import typing
from pathlib import Path
from typing import Any

import easypipe
from easypipe.core import lazy
from easypipe.core.config import is_config

ROOT = Path(__file__).parents[1]
ROOMS = (
    "run",
    "pipeline",
    "compat",
    "stages",
    "sources",
    "transforms",
    "plan",
    "cache",
    "loader",
    "save",
    "discovery",
    "train",
    "kernels",
    "core",
)


def on_files(files: Any, config: Any) -> Any:
    """mkdocs calls this before it reads the pages."""
    # here, so that the tests import this file without mkdocs
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference/config.md", content=config_page()))
    files.append(File.generated(config, "reference/options.md", content=options_page()))
    files.append(File.generated(config, "reference/api.md", content=api_page()))
    files.append(
        File.generated(
            config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        )
    )
    return files


@functools.cache
def config_classes() -> list[type]:
    """Every `@config` class of the package, in the order of the rooms."""
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(easypipe.__path__, "easypipe."):
        # needs what may not be installed, and configures nothing
        if module.name.startswith("easypipe.interop."):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if (
                is_config(value)
                and value.__module__ == module.name
                and not value.__name__.startswith("_")
            ):
                found[f"{module.name}.{value.__name__}"] = value
    return sorted(found.values(), key=lambda cls: (_room(cls.__module__), cls.__module__))


def config_page() -> str:
    parts = [
        "# Configuration\n",
        "Every key of every configuration class, generated from the code. All classes are frozen, "
        "take keyword arguments only, and refuse\n"
        "unknown keys and wrong types with the path of the key. In YAML the nesting is the same: "
        "see [the pipeline](../pipeline.md).\n",
    ]
    for cls in config_classes():
        prose, words = docstring_parts(cls)
        words = field_comments(cls) | words
        parts.append(f"## {cls.__name__}\n\n`{cls.__module__}`\n\n{prose}\n")
        rows = ["| key | type | default | |", "| --- | --- | --- | --- |"]
        for field in dataclasses.fields(cls):
            annotation = _annotation(cls, field)
            said = words.get(field.name) or _links(annotation)
            rows.append(
                f"| `{field.name}` | {_code(annotation)} | {_default(field)} | {_cell(said)} |"
            )
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def options_page() -> str:
    """From tests/option_effects.py and its neighbours for runs and faces, which the tests hold to
    the classes.
    """
    parts = [
        "# What every option does\n",
        "Of every option of a pipeline: what can be observed of it, what it means where tokens are "
        "cached, and what with\n"
        "`streaming=True`. Each line names a test of that effect, and an option without one fails "
        "the tests.\n"
        "[Configuration](config.md) has types, defaults and the rules in full; those of "
        "[training](#runconfig) and of\n"
        "[the faces](#datapipelineconfig) come last.\n",
    ]
    for cls, options in _effects("option_effects").items():
        rows = ["| option | effect | cached | streaming |", "| --- | --- | --- | --- |"]
        for option, entry in options.items():
            rows.append(
                f"| `{option}` | {entry.effect.replace('+', ', ')} | {_cell(entry.cached)} | "
                f"{_cell(entry.streaming)} |"
            )
        parts.append(f"## {cls}\n\n" + "\n".join(rows) + "\n")
    for cls, options in (
        _effects("train_option_effects") | _effects("compat_option_effects")
    ).items():
        rows = ["| option | effect | |", "| --- | --- | --- |"]
        rows += [
            f"| `{option}` | {entry.effect.replace('+', ', ')} | {_cell(entry.cached)} |"
            for option, entry in options.items()
        ]
        parts.append(f"## {cls}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _effects(module: str) -> dict[str, Any]:
    """The table of tests/<module>.py: class -> option -> Effect."""
    folder = str(ROOT / "tests")
    if folder not in sys.path:  # one table imports the other
        sys.path.append(folder)
    return importlib.import_module(module).OPTIONS


def api_page() -> str:
    parts = [
        "# Python API\n",
        "What `from easypipe import ...` offers, generated from docstrings.\n",
    ]
    homes: dict[str, list[str]] = {}
    for name, home in sorted(lazy.homes(str(easypipe.__file__)).items()):
        homes.setdefault(home, []).append(name)
    for home in sorted(homes, key=_room):
        parts.append(f"## {home.removeprefix('easypipe.')}\n")
        parts += [
            f"::: {home}.{_real_name(home, name)}\n    options:\n      heading_level: 3\n"
            for name in homes[home]
        ]
    return "\n".join(parts)


def _links(annotation: str) -> str:
    """Where the keys of a nested config are explained."""
    names = {cls.__name__ for cls in config_classes()}
    return ", ".join(
        f"[{word}](#{word.lower()})" for word in re.findall(r"\w+", annotation) if word in names
    )


def field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def docstring_parts(cls: type) -> tuple[str, dict[str, str]]:
    """The prose of a class docstring, and what its `field: words` (or `field, field: words`) lines
    say, continuation lines included.
    """
    names = set(field_names(cls))
    prose: list[str] = []
    words: dict[str, str] = {}
    current: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        head = re.match(r"(\w+(?:, \w+)*): (.+)", line)
        if head and set(head[1].split(", ")) <= names:
            current = head[1].split(", ")
            words |= dict.fromkeys(current, head[2])
        elif current and line.startswith("    "):
            words |= {name: f"{words[name]} {line.strip()}" for name in current}
        else:
            # the sentence goes on without indentation: it was prose that begins with a key
            if current and line.strip():
                prose.append(f"{', '.join(current)}: {words[current[0]]}")
                words = {name: said for name, said in words.items() if name not in current}
            current = []
            prose.append(line)
    return "\n".join(prose).strip(), words


def field_comments(cls: type) -> dict[str, str]:
    """Field name -> the comment at the end of its line, else the whole-line comments right above
    it.
    """
    source = textwrap.dedent(inspect.getsource(cls))
    comments = {
        token.start[0]: (token.start[1], token.string.lstrip("# ").strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    found = {}
    for node in body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if node.end_lineno in comments:
            words = [comments[node.end_lineno][1]]
            line = node.end_lineno + 1
            while (
                line in comments
                and lines[line - 1].lstrip().startswith("#")
                and comments[line][0] == comments[node.end_lineno][0]
            ):
                # a comment that goes on below, aligned with its beginning
                words.append(comments[line][1])
                line += 1
        else:
            words, line = [], node.lineno - 1
            while line in comments and lines[line - 1].lstrip().startswith("#"):
                words.insert(0, comments[line][1])
                line -= 1
        if words:
            found[node.target.id] = " ".join(words)
    return found


def _real_name(home: str, name: str) -> str:
    """An alias is documented where the class it stands for is."""
    value = getattr(importlib.import_module(home), name)
    return getattr(value, "__name__", name) if getattr(value, "__module__", home) == home else name


def _room(module: str) -> int:
    room = [*module.split("."), "core"][1]
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def _annotation(cls: type, field: dataclasses.Field[Any]) -> str:
    annotation = cls.__annotations__.get(field.name, field.type)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    hint = typing.get_type_hints(cls)[field.name]
    if typing.get_origin(hint) is typing.Literal and "Literal" not in text:
        text = str(hint)  # an alias of the module: its options say more than its name
    return re.sub(r"\b(?:[a-z_]+\.)+([A-Z]\w*)", r"\1", text)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _code(repr(field.default))
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        return _code(f"{type(value).__name__}()" if is_config(type(value)) else repr(value))
    return "*required*"


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
