"""`easypipe quickstart`, and the project that it writes: texts, a tokenizer, a config, a README."""

from __future__ import annotations

import ast
import hashlib
import importlib
import io
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from easypipe.cli.arguments import Overrides
from easypipe.cli.keys import SCHEMA
from easypipe.cli.show import console, say
from easypipe.cli.train import load, run_training, show_result
from easypipe.core.errors import SourceError, require

# The files of the project folder:
# data/code/*.jsonl: a row with the source of each module of the standard library.
# data/docs/*.parquet: a row for each of these modules that has docstrings, with all of them under
# their names.
# data/heldout/*.jsonl: one module in twenty of both, which is never trained on.
# quickstart.yaml, README.md.
# .project.json: committed last; after that no file here is written again, so that edits stay.


MARKER = ".project.json"
CONFIG = "quickstart.yaml"
TOKENIZER = "tokenizer"
VOCAB_SIZE = 8192

CODE_SHARDS, DOC_SHARDS = 3, 2
HELD_OUT = 20  # one module in this many is held out

# Tests, generated tables and bundled packages: text that teaches little, and that some
# distributions leave out.
_SKIPPED = {
    *(
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "lib2to3",
        "idlelib",
        "turtledemo",
        "ensurepip",
    ),
    *("encodings", "pydoc_data", "_pyrepl", "_bundled", "__phello__"),
}


@dataclass(frozen=True)
class Module:
    """A module of the standard library, with its source and its docstrings."""

    name: str
    source: str
    docs: str  # "" if it has none

    @property
    def held_out(self) -> bool:
        """Whether the module is held out; only its name decides, in every Python version."""
        return (
            int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little")
            % HELD_OUT
            == 0
        )


def write_project(folder: Path) -> bool:
    """Writes the project unless it exists; returns whether it did.

    The next call finishes one that was killed.

    Raises:
        ConfigError: `folder` holds something else.
    """
    from easypipe.core import storage

    if (folder / MARKER).exists():
        return False
    ours = {"data", CONFIG, SCHEMA.name, "README.md"}
    if folder.exists():
        foreign = sorted(
            path.name
            for path in folder.iterdir()
            if path.name not in ours and not path.name.startswith(storage.TEMPORARY)
        )
        require(
            not foreign,
            str(folder),
            f"is not empty: {', '.join(foreign[:5])}",
            "Choose another folder with --output-dir.",
        )
        storage.sweep(folder)
    modules = list(standard_library())
    train = [module for module in modules if not module.held_out]
    held = [module for module in modules if module.held_out]
    documented = [module for module in train if module.docs]
    files = {
        f"data/code/part-{i}.jsonl": _jsonl(_code(train[i::CODE_SHARDS]))
        for i in range(CODE_SHARDS)
    }
    files |= {
        f"data/docs/part-{i}.parquet": _parquet(_docs(documented[i::DOC_SHARDS]))
        for i in range(DOC_SHARDS)
    }
    files |= {
        "data/heldout/code.jsonl": _jsonl(_code(held)),
        "data/heldout/docs.jsonl": _jsonl(_docs(m for m in held if m.docs)),
    }
    files |= {name: _template(name) for name in (CONFIG, SCHEMA.name, "README.md")}
    for name, data in files.items():
        path = folder / name
        # An unchanged file keeps its modification time, by which changes are detected.
        if not (path.exists() and path.read_bytes() == data):
            storage.commit_bytes(path, data)
    storage.commit_json(
        folder / MARKER, {"files": sorted(files), "modules": len(train), "held_out": len(held)}
    )
    return True


def standard_library() -> Iterator[Module]:
    """Yields the modules of the running Python's standard library that have source, by path.

    Raises:
        SourceError: There are none.
    """
    root, found = Path(sysconfig.get_paths()["stdlib"]), 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED and not name.startswith("config-")
        )
        for name in sorted(names):
            if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                continue
            path = Path(folder) / name
            try:
                source = path.read_text(encoding="utf-8")
                tree = ast.parse(source)
            except (UnicodeDecodeError, SyntaxError):
                continue  # a few modules may have another encoding
            if source.strip():
                found += 1
                dotted = ".".join(path.relative_to(root).with_suffix("").parts)
                yield Module(
                    name=dotted, source=source, docs="\n\n".join(_docstrings(tree, dotted))
                )
    if not found:
        raise SourceError(
            at=str(root),
            problem="this Python does not include the source of its standard library",
            fix="Use another Python build.",
        )


def training_texts(folder: Path) -> Iterator[str]:
    """Yields the texts that the tokenizer is trained on: the rows of both datasets."""
    import pyarrow.parquet as pq

    for path in sorted((folder / "data/code").glob("*.jsonl")):
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]
    for path in sorted((folder / "data/docs").glob("*.parquet")):
        yield from pq.read_table(path, columns=["text"]).column("text").to_pylist()


def _docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """Yields the docstrings of a module and of its members, each under its name."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield f"{name}\n{text}"
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings(child, f"{name}.{child.name}")


def _code(modules: Sequence[Module]) -> Iterator[dict[str, str]]:
    return ({"module": module.name, "text": module.source} for module in modules)


def _docs(modules: Iterator[Module] | Sequence[Module]) -> Iterator[dict[str, str]]:
    return ({"module": module.name, "text": module.docs} for module in modules)


def _jsonl(rows: Iterator[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _parquet(rows: Iterator[dict[str, str]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink, compression="zstd")
    return sink.getvalue()


def _template(name: str) -> bytes:
    return (Path(__file__).parent / "templates" / name).read_bytes()


def quickstart(
    output_dir: Annotated[
        Path, typer.Option("--output-dir", help="The project folder to write.")
    ] = Path("easypipe-quickstart"),
    overrides: Overrides = None,
) -> None:
    """Write a small project, and train a model on it. It also trains a tokenizer; the model has a
    few million parameters. Running the same command again resumes a stopped run.
    """
    importlib.import_module("easypipe.run")  # fails without `[train]` before a file is written
    began = Path.cwd()
    folder = Path(os.path.expanduser(output_dir))
    require(
        not str(folder).startswith("~"),
        "--output-dir",
        f"there is no home folder for {folder.parts[0]}",
        "Give another folder.",
    )
    folder = folder.absolute()
    written = write_project(folder)
    say(f"project: {folder} ({'written' if written else 'found'})")
    # The paths of the config are relative to the folder, as for `easypipe train quickstart.yaml`.
    os.chdir(folder)
    try:
        train_tokenizer(folder)
        run = load(Path(CONFIG), overrides or [])
        prepared, result = run_training(run)
        say(
            f"everything is in {folder}: {CONFIG} and README.md say what to change",
        )
        show_result(run, prepared, result, 3, "def ")
    finally:
        os.chdir(began)


def train_tokenizer(folder: Path) -> None:
    """Trains the project's tokenizer unless it exists."""
    if (folder / TOKENIZER / "tokenizer.json").exists():  # written last, as one commit
        return
    from easypipe.transforms.tokenizer.bpe import train_bpe

    with console().status(f"training a byte-level BPE tokenizer with {VOCAB_SIZE:,} tokens"):
        train_bpe(training_texts(folder), VOCAB_SIZE, [], folder / TOKENIZER)
    say(f"tokenizer: {TOKENIZER}/ ({VOCAB_SIZE:,} tokens, byte-level BPE)")
