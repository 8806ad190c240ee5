"""Imports go strictly down the floors of the house, heavy libraries stay in their rooms, files stay
readable, and no refusal is without a test.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import easypipe

HOUSE = Path(easypipe.__file__).parent
FLOOR = {
    "core": 0,
    "sources": 1,
    "transforms": 1,
    "plan": 1,
    "kernels": 1,
    "cache": 2,
    "loader": 3,
    "train": 3,
    "save": 4,
    "stages": 5,
    "interop": 5,
    "executors": 5,
    "discovery": 6,
    "pipeline": 7,
    "jobs": 8,
    "history": 9,
    "previews": 9,
    "run": 10,
    "compat": 11,
    "doctor": 11,
    "cli": 12,
    "__main__": 13,
}

# library -> where it may be imported: a room, or a file in a room
ROOMS = {
    "jax": (
        "loader/placement.py",
        "kernels",
        "train",
        "interop",
        "doctor/model.py",
        "doctor/devices.py",
    ),
    "jaxlib": ("loader/placement.py", "kernels", "train", "interop"),
    "flax": ("train", "interop", "doctor/model.py"),
    "optax": ("train", "interop"),
    "orbax": ("train", "interop"),
    "grain": ("interop",),  # importing it loads jax
    "torch": ("interop",),
    "datasets": ("interop",),
    "numba": ("core/jit.py", "cache/address.py"),
    "matplotlib": ("train", "cli"),
    "rich": ("cli",),
    "typer": ("cli",),
}
LONGEST = 570  # lines without docstrings: a subject is not cut in two to fit a limit

FILES = sorted(HOUSE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(HOUSE).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module or name) of every import, those inside functions and those spelled as
    strings included.
    """
    package = ["easypipe", *path.relative_to(HOUSE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else package[: len(package) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in FILES} - {"__init__"}
    assert rooms <= FLOOR.keys(), (
        f"give {sorted(rooms - FLOOR.keys())} a floor in tests/test_floors.py"
    )


def test_imports_go_down() -> None:
    wrong = []
    for path in FILES:
        here = room_of(path)
        for line, name in imports(path):
            if not name.startswith("easypipe."):
                continue
            there = name.split(".")[1]
            if there not in FLOOR or there == here or here == "__init__":
                continue
            if FLOOR[there] >= FLOOR[here]:
                wrong.append(
                    f"{path.relative_to(HOUSE)}:{line}: {here} (floor {FLOOR[here]}) sees {there} "
                    f"(floor {FLOOR[there]})"
                )
    assert not wrong, "\n".join(wrong)


def modules_of(path: Path) -> tuple[str, set[str]]:
    """The name of a file's module below easypipe, and the names of all that it imports there."""
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__"), {
        name.removeprefix("easypipe.") for _, name in imports(path) if name.startswith("easypipe.")
    }


def imported_files() -> dict[str, set[str]]:
    """The files that each file imports; where a name is imported, the file that has it."""
    found = dict(map(modules_of, FILES))
    return {
        name: {
            target
            for each in targets
            for target in (each if each in found else each.rpartition(".")[0],)
            if target in found and target != name
        }
        for name, targets in found.items()
    }


def test_no_circle_of_files() -> None:
    """Imports inside functions, for type checkers, and of names that are strings count too."""
    seen_by = imported_files()
    below: dict[str, set[str]] = {}
    for name in seen_by:
        reached: set[str] = set()
        waiting = [name]
        while waiting:
            new = seen_by[waiting.pop()] - reached
            reached |= new
            waiting += new
        below[name] = reached
    circles = {
        tuple(sorted(other for other in below[name] if name in below[other]))
        for name in below
        if name in below[name]
    }
    assert not circles, f"these files import each other: {sorted(circles)}"


def test_configs_stand_at_the_bottom() -> None:
    """A config of a stage or of training sees the rooms that only read, change and order, and
    other configs.
    """
    wrong = [
        f"{path.relative_to(HOUSE)}:{line}: {name}"
        for path in FILES
        if path.name == "config.py"
        and FLOOR[room_of(path)] > 1
        and path.parent.name != "pretrained"  # it finds the commit of a published model
        for line, name in imports(path)
        if name.startswith("easypipe.")
        and FLOOR[name.split(".")[1]] > 1
        and not name.rpartition(".")[0].endswith((".config", "_config", ".streamable"))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_front_door_imports_nothing_itself() -> None:
    """The stub of `__init__` names the homes of its exports, which are loaded when first used."""
    early = {name for _, name in imports(HOUSE / "__init__.py") if name.startswith("easypipe")}
    early -= {"easypipe.core.lazy.lazy_exports"}
    assert not early, f"import these lazily: {early}"


def test_heavy_libraries_stay_in_their_rooms() -> None:
    wrong = []
    for path in FILES:
        place = path.relative_to(HOUSE).as_posix()
        for line, name in imports(path):
            allowed = ROOMS.get(name.split(".")[0])
            if allowed is not None and not any(
                place == room or place.startswith(f"{room}/") for room in allowed
            ):
                wrong.append(f"{place}:{line}: {name} belongs in {', '.join(allowed)}")
    assert not wrong, "\n".join(wrong)


def test_files_stay_short() -> None:
    lengths = {
        path.relative_to(HOUSE).as_posix(): _lines_of_code(path.read_text(encoding="utf-8"))
        for path in FILES
    }
    long = {name: count for name, count in lengths.items() if count > LONGEST}
    assert not long, f"more than {LONGEST} lines: {long}"


def _lines_of_code(text: str) -> int:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    docs = [node.body[0] for node in nodes if ast.get_docstring(node)]
    return len(text.splitlines()) - sum((d.end_lineno or 0) - d.lineno + 1 for d in docs)


def test_nothing_is_defined_behind_the_call_of_a_program() -> None:
    """Run by `python -m`, a file ends there: what stands behind does not exist."""
    for path in HOUSE.rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if 'if __name__ == "__main__":' in lines:
            behind = lines[lines.index('if __name__ == "__main__":') + 1 :]
            assert all(not line or line.startswith(" ") for line in behind), path


# Parameters that no line reads, of functions whose callers give what all of their kind are given
UNREAD = {
    "cache/address.py": "at: address at: typing_context",
    "cli/app.py": "options: version",  # its own callback prints it
    "cli/parity.py": "parity: against",  # the one value that there is
    "kernels/loss/differentiable.py": "_sum_backward: objective _sum_backward: plan",
    "kernels/loss/tpu/kernel.py": "column_block: i column_block: k",
    "kernels/tuning/table.py": "_read_user: changed",  # a key of what is remembered
    "sources/external/token_files.py": "_separated: fields",
    "sources/formats/txt.py": "_whole: fields parse_lines: fields",
    "train/checkpoint/checkpoint.py": "_copied: into",  # memory that is given back
    "train/losses/preference.py": "_reward: config",
    "train/model/harness.py": (
        "generate_until: disable_tqdm loglikelihood: disable_tqdm "
        "loglikelihood_rolling: disable_tqdm"
    ),
    "train/optim/optimizers.py": (
        "_adam: roles _inverse_sqrt: final _inverse_sqrt: steps _sophia: roles match: params"
    ),
    "train/signals.py": "_receive: frame",
    "transforms/chat/sandbox.py": "refuse: args refuse: values",
}


def test_every_parameter_is_read() -> None:
    """An argument that is lost on its way leaves a parameter that decides nothing. Where several
    functions of one name have it, one that reads it is enough: they are one protocol.
    """
    read: dict[tuple[str, str], bool] = {}
    places: dict[tuple[str, str], str] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = {
                one.id for part in node.body for one in ast.walk(part) if isinstance(one, ast.Name)
            }
            for one in ast.iter_child_nodes(node.args):
                if isinstance(one, ast.arg) and one.arg not in ("self", "cls"):
                    key = (node.name, one.arg)
                    # without any name it is a stub, of a protocol
                    read[key] = read.get(key, False) or not names or one.arg in names
                    places[key] = path.relative_to(HOUSE).as_posix()
    unread: dict[str, list[str]] = {}
    for (function, name), is_read in sorted(read.items()):
        if not is_read and not name.startswith("_"):
            unread.setdefault(places[function, name], []).append(f"{function}: {name}")
    assert len(read) > 3000
    assert {path: " ".join(some) for path, some in unread.items()} == UNREAD


def test_there_is_one_engine() -> None:
    """Cached and streamed data have one loader, one state, one maker of windows, one of batches,
    one writer of rows.
    """
    classes: dict[str, list[str]] = {}
    calls: dict[str, list[str]] = {}
    for path in FILES:
        place = path.relative_to(HOUSE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(place)
            if isinstance(node, ast.Call):
                calls.setdefault(ast.unparse(node.func).split(".")[-1], []).append(place)
    homes = {
        "Loader": "loader/loader.py",
        "Batches": "loader/loader.py",
        "LoaderState": "loader/state.py",
        "Planner": "plan/window.py",
        "Prefetcher": "loader/prefetch.py",
        "RowWriter": "loader/rows/write.py",
    }
    for name, home in homes.items():
        assert classes[name] == [home], f"class {name} stands in {classes[name]}"
    loaders = {name for name in classes if name.endswith("Loader") and not name.startswith("_")}
    assert loaders == {"Loader", "EpochLoader", "BatchLoader"}  # the last is a protocol
    # documents are drawn and laid into rows in one place, ...
    for maker in ("Window", "pack_window", "cut_stream", "one_row_each", "draw_largest_deficit"):
        assert set(calls[maker]) <= {"plan/window.py", "plan/pack.py"}, maker
    assert set(calls["Planner"]) == {"plan/windows.py", "loader/streams/stream.py"}
    # ... tokens come into rows in one place, and rows into batches in another
    assert set(calls["write_rows"]) == {"loader/rows/write.py"}
    assert set(calls["Prefetcher"]) == {"loader/loader.py"}


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_chat_worker_loads_no_arrays() -> None:
    """It starts in a quarter of the time, and takes a quarter of the memory."""
    heavy = ("numpy", "pyarrow", "pydantic")
    code = "import sys, easypipe.transforms.chat.worker; "
    assert python(f"{code}print([one for one in {heavy} if one in sys.modules])") == "[]\n"


def test_import_is_quick_and_leaves_jax_alone() -> None:
    code = (
        "import sys, time; start = time.process_time(); import easypipe; seconds = "
        "time.process_time() - start\n"
        "assert 'jax' not in sys.modules; print(seconds)"
    )
    seconds = [float(python(code)) for _ in range(3)]
    assert min(seconds) < 0.3, seconds  # the others tell what else the machine did


@pytest.mark.parametrize(
    "statement",
    ["from easypipe import Pipeline, PipelineConfig, DatasetConfig", "import easypipe.cli"],
)
def test_preparing_data_needs_no_jax(statement: str) -> None:
    python(f"import sys; {statement}; assert 'jax' not in sys.modules, 'jax was loaded'")


# Refusals that no test reaches with their words, each with what reaches it or why nothing can.
UNTOLD = {
    "cache/mapping.py: no room for the addresses of": "test_cache.py, by what is said before it",
    "cache/ranges.py: its counts do not add up": "test_false_fields.py: the range is made again",
    "cache/writer.py: : written again, it is damaged:": "test_damage.py: its files are whole again",
    "cache/writer.py: tokenizing was stopped": "ends other workers' ranges after the error of one",
    "core/locks.py: Try again when it has ended.": "the words before it stand in tests",
    "core/storage.py: not all of": "test_remote_writes.py: retried",
    "doctor/devices.py: the sample makes no full batch": "doctor: of tiny data",
    "doctor/devices.py: , the mesh is": "doctor: of several devices",
    "doctor/machine.py: jax died": "doctor: of a broken machine",
    "doctor/machine.py: GB are free in": "doctor: of a full disk",
    "doctor/model.py: it never ends": "doctor: of held-out data",
    "doctor/processes.py: the process to be killed ended by itself, with": "doctor: of no kill",
    "loader/streams/rows.py: nothing is unchecked": "an assertion",
    "loader/streams/state.py: numbers for": "the words after it: is not a state of a stream",
    "save/saved.py: are not columns of its schema": "test_false_fields.py: of a signed lie",
    "sources/external/dicts.py: keys of objects are strings, and one is": "becomes text, no error",
    "sources/formats/forward.py: Write one row a line.": "a line of 1 GiB",
    "sources/formats/mds.py: its sizes do not add up to its bytes": "found by its hash before",
    "sources/formats/webdataset.py: a member of pickled data (": "test_shards.py, by its column",
    "train/callbacks/named.py: Train a ModelConfig.": "the words before it",
    "train/callbacks/named.py: a model that lies on one host": "of several processes",
    "train/checkpoint/checkpoint.py: the description of its arrays is missing or cut short": (
        "test_checkpoint_files.py: cut files of Orbax, whose message is its own"
    ),
    "train/checks.py: the data is not looked at": "TypeError, which len() asks for",
    "train/parallel/mesh.py: Set drop_last: true.": "of two processes",
}


def refusals() -> Iterator[tuple[str, list[str]]]:
    """(file, constant words) of every error that the package makes with words of its own, and of
    every warning.
    """
    for path in sorted(HOUSE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else getattr(node, "value", None)
            if not isinstance(call, ast.Call):
                continue
            if isinstance(node, ast.Raise):
                said = [*call.args, *(one.value for one in call.keywords)]
            elif isinstance(node, ast.Expr) and ast.unparse(call.func) in REQUIRE:
                said = call.args[1:]
            elif isinstance(node, ast.Expr) and ast.unparse(call.func) in WARN:
                said = call.args
            else:
                continue
            words = [
                " ".join(words.split())
                for part in said
                for one in ast.walk(part)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
                for words in re.split(r"%[\w.,-]*", one.value)
            ]
            if words := [one for one in words if len(one) >= 8 and " " in one]:
                yield path.relative_to(HOUSE).as_posix(), words


def what_docs_run(page: Path) -> str:
    """The blocks of a page, which tests run, and the tables of errors that tests make; a sentence
    that says the same as a refusal tests nothing.
    """
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```.*?^```$", text, flags=re.M | re.S))
    return blocks + (text if page.name in MADE else "")


MADE = ("bad_input.md",)
REQUIRE = ("require", "require_known")
WARN = ("log.warning", "logger.warning")
PIECE = 14  # letters in a row that tell one message from another


def test_words_of_every_refusal_stand_in_a_test() -> None:
    folder = Path(__file__).parent
    files = [one for one in folder.rglob("*") if one.suffix in (".py", ".json", ".txt", ".yaml")]
    said = "".join(
        one.read_text(errors="replace") for one in sorted(files) if one.name != "faults.py"
    )
    said += "".join(map(what_docs_run, sorted(folder.parent.joinpath("docs").rglob("*.md"))))
    said = re.sub(r"[\"']\s*\n\s*[rf]*[\"']", "", said)  # a text that goes on in the next line
    said = " ".join(said.split()).replace("\\", "")
    own = said.index("Refusals that no test reaches"), said.index("def refusals()")
    said = said[: own[0]] + said[own[1] :]

    def stands(words: str) -> bool:
        starts = range(0, max(len(words) - PIECE, 0) + 1, 2)
        return any(words[at : at + PIECE] in said for at in starts)

    every = list(refusals())
    assert len(every) > 1000
    untold = {f"{path}: {words[0]}" for path, words in every if not any(map(stands, words))}
    assert untold == {*UNTOLD}
