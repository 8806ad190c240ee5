"""Generated pages of the site, as a mkdocs hook, and the schema and example files of configs.

Nothing is written by hand that the code already says: keys, types and defaults come from the
classes, the words from their docstrings and from the comments beside the fields. `python
docs/reference.py` writes the files that are kept: easypipe.schema.json, and those of configs/ that
`easypipe init` writes.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import io
import json
import pkgutil
import re
import sys
import textwrap
import tokenize
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pydantic
import typer.main
from pydantic.json_schema import GenerateJsonSchema
from typer.core import TyperCommand

import easypipe
from easypipe.cli import keys
from easypipe.cli.app import app
from easypipe.cli.init import Kind, config_text
from easypipe.cli.keys import SCHEMA
from easypipe.compat.classify import ClassifyConfig
from easypipe.compat.data_pipeline import DataPipelineConfig
from easypipe.core import lazy
from easypipe.core.config import is_config
from easypipe.core.values import JsonObject
from easypipe.run import RunConfig
from easypipe.stages.config import PipelineConfig

ROOT = Path(__file__).parents[1]
SHIM = "https://unpkg.com/iframe-worker/shim"
MEASURED = "measured.md"  # its recorded part is made of benchmarks/results
HELD_OUT = {  # of `eval`: rows of the data, held out
    "description": "Holds rows of `data` out.",
    "properties": {
        "from": {"const": "data"},
        "fraction": {"type": "number"},
        "seed": {"type": "integer"},
    },
    "required": ["from"],
    "additionalProperties": False,
}
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
    files.append(File.generated(config, "reference/cli.md", content=cli_page()))
    files.append(
        File.generated(
            config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        )
    )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs calls this for each page."""
    return (
        markdown.replace("<!-- results -->", results())
        if page.file.src_uri == MEASURED
        else markdown
    )


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """mkdocs calls this for each page that is written. The theme takes a script from a server, by
    which search works where pages are opened as files: we have our own copy of it."""
    return output.replace(SHIM, "../" * page.url.count("/") + "assets/iframe-worker.js")


def on_post_template(output: str, **_: Any) -> str:
    """The same for the page of what is not found."""
    return output.replace(SHIM, "/assets/iframe-worker.js")


def results() -> str:
    """The recorded results of benchmarks as tables, by their names."""
    parts = []
    for path in sorted((ROOT / "benchmarks/results").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        script = ast.parse((ROOT / f"benchmarks/{path.name}").with_suffix(".py").read_text())
        unit, machine = found["unit"], found["machine"]
        first = " ".join((ast.get_docstring(script) or "").split("\n\n")[0].split())
        parts.append(f"### {path.stem}\n\n{first}\n\n`python benchmarks/{path.stem}.py`\n")
        rows = [f"| | median, {unit} | spread | rounds |", "| --- | ---: | ---: | ---: |"]
        for name, one in found["contenders"].items():
            rounds = len(one["seconds"])
            rows.append(f"| {name} | {one['median']:,.4g} | ±{one['spread']:.0%} | {rounds} |")
        if found["contenders"]:
            parts.append("\n".join(rows) + "\n")
        rows = ["| | measured | target |", "| --- | ---: | ---: |"]
        for one in found["targets"]:
            missed = "" if one["met"] else ", missed"
            rows.append(f"| {one['what']} | {one['value']:,.4g} | {one['wanted']}{missed} |")
        parts.append("\n".join(rows) + "\n")
        versions = ", ".join(f"{name} {one}" for name, one in machine["versions"].items() if one)
        cpu = f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}"
        parts.append(f"{cpu}; {versions}.\n")
    return "\n".join(parts)


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
        prose, _ = docstring_parts(cls)
        words = key_words(cls)
        at = [f"`{path}`" for path, node in keys.paths() if cls.__name__ in keys.sections(node)]
        at = [path for path in at if not path.startswith("`eval.")]  # where they are as in `data`
        where = f"At {', '.join(at)} in a file; `{cls.__module__}`" if at else f"`{cls.__module__}`"
        parts.append(f"## {cls.__name__}\n\n{where}\n\n{prose}\n")
        rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for field in dataclasses.fields(cls):
            annotation = _annotation(cls, field)
            said = " ".join(filter(None, (words.get(field.name), _links(annotation))))
            rows.append(
                f"| `{field.name}` | {_code(annotation)} | {_default(field)} | {_cell(said)} |"
            )
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def schema() -> JsonObject:
    """The JSON Schema of config files, by pydantic; each key with its description, its type as the
    code has it (x-type) and its default (x-default; null where it is required).
    """
    roots = [RunConfig, PipelineConfig, ClassifyConfig, DataPipelineConfig]
    described = {cls.__name__: cls for cls in config_classes()}
    inputs = [(cls, "validation", pydantic.TypeAdapter(cls)) for cls in roots]
    _, made = pydantic.TypeAdapter.json_schemas(inputs, schema_generator=_WithFunctions)
    for name, section in made["$defs"].items():
        if name in described:
            _describe(section, described[name])
    made["$defs"]["RunConfig"]["properties"]["eval"]["additionalProperties"] = {
        "anyOf": [{"$ref": "#/$defs/PipelineConfig"}, HELD_OUT]
    }
    kinds = {cls: {"$ref": f"#/$defs/{cls.__name__}"} for cls in roots}

    def when(key: str, then: type, other: JsonObject) -> JsonObject:
        return {"if": {"required": [key]}, "then": kinds[then], "else": other}

    of_data = when("prompt_template", DataPipelineConfig, kinds[PipelineConfig])
    choice = when("task", ClassifyConfig, when("data", RunConfig, of_data))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **choice, **made}


class _WithFunctions(GenerateJsonSchema):
    """A function, which Python alone can give, is anything."""

    def callable_schema(self, schema: Any) -> JsonObject:
        return {}


def _describe(section: JsonObject, cls: type) -> None:
    prose, _ = docstring_parts(cls)
    section["description"] = " ".join(prose.split("\n\n")[0].split())
    section["additionalProperties"] = False
    properties, meanings = section["properties"], key_words(cls)
    for field in dataclasses.fields(cls):
        key = properties[field.name]
        key.pop("title", None)
        required = field.default is field.default_factory is dataclasses.MISSING
        key["description"] = meanings.get(field.name, "")
        key["x-type"] = _annotation(cls, field)
        key["x-default"] = None if required else _default_text(field)
    for alias, option in getattr(cls, "ALIASES", {}).items():
        said = {"x-type": "alias", "x-default": "None"}
        properties[alias] = {"description": f"Another name of {option}.", **said}


def key_words(cls: type) -> dict[str, str]:
    """What each key of a config class means: of one that is a section, what its class says of
    itself first.
    """
    _, words = docstring_parts(cls)
    hints = typing.get_type_hints(cls)
    nested = {
        name: " ".join(docstring_parts(kind)[0].split("\n\n")[0].split())
        for name in field_names(cls)
        for kind in (hints[name], *typing.get_args(hints[name]))
        if is_config(kind)
    }
    return {name: _sentence(said) for name, said in (nested | field_comments(cls) | words).items()}


def _sentence(said: str) -> str:
    """A text as a sentence; the name of an option, before a colon, stays as it is written."""
    first = said[:1] if re.match(r"\w+:", said) else said[:1].upper()
    return first + said[1:] + ("" if said.endswith((".", "?")) else ".")


def options_page() -> str:
    """From tests/option_effects.py and its neighbours for runs and faces, which the tests hold to
    the classes.
    """
    parts = [
        "# What every option does\n",
        "This page says for every option of a pipeline what can be observed of it, what it means "
        "where tokens are cached,\n"
        "and what with `streaming=True`. `tests/option_effects.py` names a test of each; without "
        "one, an option fails the tests.\n"
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


def cli_page() -> str:
    """Every command with its arguments and options, from typer."""
    parts = [
        "# Command line\n",
        "Every command, as `easypipe COMMAND --help` shows it. `python -m easypipe` is the same "
        "command. `easypipe --install-completion` lets the shell complete commands, config files "
        "and the keys of `--set`.\n",
        _options(typer.main.get_command(app)),
    ]
    for name, command in cli_commands().items():
        words = " ".join((command.help or "").split())
        lines = (command.epilog or "").splitlines()[2:]
        examples = "\n".join(line.strip() for line in lines)
        parts.append(f"## easypipe {name}\n\n{words}\n\n```console\n{examples}\n```\n")
        parts.append(_options(command))
    return "\n".join(parts)


def cli_commands() -> dict[str, TyperCommand]:
    """Each command by what is typed for it."""
    found: dict[str, TyperCommand] = {}
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", {})
        found |= {f"{name} {sub}": one for sub, one in inner.items()} or {name: command}
    return found


def _options(command: TyperCommand) -> str:
    hints = typing.get_type_hints(command.callback)
    rows = ["| argument or option | type | default | meaning |", "| --- | --- | --- | --- |"]
    for one in command.params:
        if one.name == "help":
            continue
        names = ", ".join(f"`{name}`" for name in one.opts + one.secondary_opts)
        shown = names if one.opts[0].startswith("-") else _code(str(one.metavar or one.name))
        kind = _code(_type_text(hints.get(one.name, bool)))
        default = "*required*" if one.required else _code(str(one.default))
        said = _cell(one.help or "")
        rows.append(f"| {shown} | {kind} | {default} | {said} |")
    return "\n".join(rows) + "\n" if len(rows) > 2 else ""


def _type_text(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(one.value for one in hint)
    return re.sub(r"\b(?:[a-z_]+\.)+([A-Z]\w*)", r"\1", inspect.formatannotation(hint))


def _links(annotation: str) -> str:
    """Where the keys of a nested config are explained."""
    names = {cls.__name__ for cls in config_classes()}
    return ", ".join(
        f"[{word}](#{word.lower()})" for word in re.findall(r"\w+", annotation) if word in names
    )


def field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def docstring_parts(cls: type) -> tuple[str, dict[str, str]]:
    """The prose of a class docstring, and the meaning of each field under `Args:`.

    A meaning goes to the next field or blank line.
    """
    text = inspect.cleandoc(cls.__doc__ or "")
    names = "|".join(map(re.escape, field_names(cls)))
    field = re.compile(
        rf"(?:^(?: {{4}})?|(?<=\. ))((?:{names})(?:, (?:{names}))*):\s+", re.MULTILINE
    )
    prose: list[str] = []
    words: dict[str, str] = {}
    for paragraph in text.split("\n\n"):
        before, *found = field.split(paragraph)
        prose.append(before.removesuffix("Args:\n").strip())
        for heads, said in zip(found[::2], found[1::2], strict=True):
            words |= dict.fromkeys(heads.split(", "), " ".join(said.split()))
    return "\n\n".join(filter(None, prose)), words


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
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if "Literal" not in text and any(typing.get_origin(one) is typing.Literal for one in kinds):
        # an alias of the module: its options say more than its name
        text = " | ".join("None" if one is type(None) else str(one) for one in kinds)
    return re.sub(r"\b(?:[a-z_]+\.)+([A-Z]\w*)", r"\1", text).replace("ListOf[", "list[")


def _default(field: dataclasses.Field[Any]) -> str:
    required = field.default is field.default_factory is dataclasses.MISSING
    return "*required*" if required else _code(_default_text(field))


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is dataclasses.MISSING:
        return repr(field.default)
    value = field.default_factory()
    return f"{type(value).__name__}()" if is_config(type(value)) else repr(value)


def _code(text: str) -> str:
    return f"`{text}`"


def _cell(text: str) -> str:
    """Python-Markdown needs no escape of a pipe in code, and would show it."""
    parts = re.split(r"(`[^`]*`)", text.replace("\n", " "))
    return "".join(part if part[:1] == "`" else part.replace("|", "\\|") for part in parts)


def kept_files() -> dict[Path, str]:
    """The files that are made from the code and kept beside it, with their text."""
    return {SCHEMA: json.dumps(schema(), indent=1) + "\n"} | {
        ROOT / "configs" / f"{kind.value}.yaml": config_text(kind.value) for kind in Kind
    }


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")
    for path, text in kept_files().items():
        path.write_text(text, encoding="utf-8")
