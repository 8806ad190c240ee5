"""The files of a published model, in a folder or on the Hub: config, end tokens, safetensors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from easypipe.core.closing import Closeable
from easypipe.core.errors import MissingFileError, SourceError, StateError, near_path, raising
from easypipe.core.reachable import hub_unreachable, near_here
from easypipe.core.trust import hub_token
from easypipe.core.values import JsonObject
from easypipe.core.visible import first_of

WEIGHTS, INDEX, CONFIG, GENERATION = (
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
)
OF_TOKENS = ("model.embed_tokens.weight", "lm_head.weight")
_ROWS = 4096  # rows of a table that are read at a time for their mean
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    "tokenizer.model",
)
Shape = tuple[int, ...]
_SMALL = ["*.json", *(name for name in TOKENIZER_FILES if not name.endswith(".json"))]
# Some repositories hold the same weights again as consolidated.safetensors.
_LARGE = ["model*.safetensors"]


def model_folder(
    path_or_hub_name: str | Path, revision: str | None, *, weights: bool = True
) -> Path:
    """Returns a model's folder: the given one, or the Hub's files in the cache of its client.

    A name that looks like a path is never looked up on the Hub.

    Args:
        path_or_hub_name: The folder or Hub name.
        revision: The branch, tag or commit of a Hub repository.
        weights: Whether to download the large files too.

    Raises:
        MissingFileError: Neither the folder nor the repository exists.
        SourceError: The repository is gated or cannot be downloaded, or a folder has a revision.
    """
    name = str(path_or_hub_name)
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        if revision is not None:
            raise SourceError(
                at=name,
                problem=f"is a folder, which has no revision {revision!r}",
                fix="Leave revision out.",
            )
        return folder
    if (
        isinstance(path_or_hub_name, Path)
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    ):
        near, fix = near_path(name)
        fix = fix or "Give a folder with config.json, or a Hub name such as owner/model."
        raise MissingFileError(at=name, problem="no such folder", have=near, fix=fix)
    return _downloaded(name, revision, [*_SMALL, *(_LARGE if weights else ())])


def _downloaded(name: str, revision: str | None, patterns: list[str]) -> Path:
    """Downloads files of a Hub repository into the cache of its client.

    Raises:
        MissingFileError: The repository does not exist, or the Hub cannot be reached.
        SourceError: The repository is gated, or cannot be downloaded.
    """
    from huggingface_hub import snapshot_download  # slow to import, only needed for Hub names
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    offline, have = hub_unreachable(), None
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                token=hub_token(),
                local_files_only=offline is not None,
            )
        )
    except GatedRepoError as error:
        kind, problem = SourceError, "the Hub repository is gated"
        fix, cause = f"Accept its licence at https://huggingface.co/{name} and set HF_TOKEN.", error
    except RepositoryNotFoundError as error:
        kind, cause = MissingFileError, error
        problem = "no such folder, nor such a repository on the Hugging Face Hub, or it is private"
        have, fix = near_here(name, "Check the name, or set HF_TOKEN.")
    except LocalEntryNotFoundError as error:
        kind, cause = MissingFileError, error
        problem = "no such folder, and the Hugging Face Hub cannot be reached" + (
            f": {offline}" if offline else ""
        )
        have, fix = near_here(name, "Check the path, the network, and HF_HUB_OFFLINE.")
    # HTTP and validation errors of the Hub's client derive from these.
    except (OSError, ValueError) as error:
        kind, fix, cause = SourceError, "Check name and revision.", error
        name = name if revision is None else f"{name}@{revision}"
        problem = f"cannot be downloaded from the Hugging Face Hub: {error}"
    raise kind(at=name, problem=problem, have=have, fix=fix) from cause


def commit_of(folder: Path, path_or_hub_name: str | Path) -> str | None:
    """Returns the commit of the Hub's files in `folder`, which `model_folder` returned.

    It is None if the model was given as a folder.
    """
    return None if Path(os.path.expanduser(path_or_hub_name)).is_dir() else folder.name


def read_config(folder: Path) -> tuple[JsonObject, str]:
    """Returns config.json, as a value and as text."""
    values = read_json(folder / CONFIG)
    return values, json.dumps(values, sort_keys=True)


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Returns the tokens that end a text, by generation_config.json or else by config.json.

    Raises:
        StateError: One of the files cannot be read.
    """
    for name in (GENERATION, CONFIG):
        known = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if known is not None:
            return tuple(as_tokens(known))
    return ()


def as_tokens(given: int | Sequence[int] | None) -> list[int]:
    """Returns one token, several or none as a list."""
    return [given] if isinstance(given, int) else list(given or ())


class WeightFiles(Closeable):
    """The tensors of a model's folder, by name.

    Only headers are read until a part of a tensor is asked for. Use it as a context manager.

    Raises:
        MissingFileError: There are no safetensors files.
        StateError: A file is damaged, or the index does not fit the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, again = folder, "Download it again."
        if (folder / INDEX).is_file():
            index = read_json(folder / INDEX).get("weight_map")
            if not isinstance(index, dict):
                raise StateError(
                    at=str(folder / INDEX),
                    problem="has no weight_map",
                    fix="Download the folder again.",
                )
            files = sorted({str(file) for file in index.values()})
        else:
            index, files = {}, [WEIGHTS]
        for file in files:
            if Path(file).name != file:
                raise StateError(
                    at=str(folder / INDEX),
                    problem=f"{file!r} is not a file of this folder",
                    fix="Download the folder again.",
                )
            if not (folder / file).is_file():
                pickles = (
                    "Convert its .bin files to safetensors: they are pickles, which can run code, "
                    "and are not read."
                )
                fix = pickles if any(folder.glob("*.bin")) else "Download the folder again."
                raise MissingFileError(at=str(folder / file), problem="no such file", fix=fix)
        self._of: dict[str, tuple[str, safe_open]] = {}
        with contextlib.ExitStack() as opening:
            for file in files:
                with reading(folder / file):
                    handle = opening.enter_context(safe_open(folder / file, framework="numpy"))
                self._of |= dict.fromkeys(handle.keys(), (file, handle))
            missing = [name for name, file in index.items() if self._of.get(name, ("",))[0] != file]
            if missing:
                raise StateError(
                    at=str(folder / INDEX),
                    problem="names tensors that its files do not hold: "
                    + first_of(sorted(missing)),
                    fix=again,
                )
            self._stack = opening.pop_all()

    def close(self) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name][1].get_slice(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """Reads `part` of a tensor, and only these bytes, as a NumPy array in the file's dtype.

        Raises:
            StateError: The part cannot be read.
        """
        file, handle = self._of[name]
        # TypeError: NumPy does not have the dtype.
        unreadable = (SafetensorError, OSError, TypeError)
        at = f"{self.folder / file}: {name}"
        with raising(StateError, at, "cannot be read", on=unreadable):
            return handle.get_slice(name)[part]


class GrownFiles(WeightFiles):
    """WeightFiles in which embeddings and head have rows for new tokens.

    A new row is the mean of the rows of all tokens before them (Hewitt, "Initializing new word
    embeddings", 2021).

    Args:
        folder: The folder of the model.
        vocab_size: The number of rows.
        added: The ids of the new tokens.
    """

    def __init__(self, folder: Path, vocab_size: int, added: range) -> None:
        super().__init__(folder)
        self._vocab_size, self._added = vocab_size, added
        self._means: dict[str, np.ndarray] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        shape = super().shape(name)
        return (self._vocab_size, *shape[1:]) if name in OF_TOKENS else shape

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        if name not in OF_TOKENS:
            return super().read(name, part)
        rows, columns = part
        have = super().shape(name)[0]
        # For rows that are all new, the table's last one is read, for its width and dtype.
        first = min(rows.start, have - 1)
        old = super().read(name, (slice(first, min(rows.stop, have)), columns))
        ids = np.arange(rows.start, rows.stop)
        found = np.zeros((len(ids), old.shape[1]), old.dtype)
        found[: len(old)] = old
        new = (ids >= have) | ((ids >= self._added.start) & (ids < self._added.stop))
        found[new] = self.mean(name)[columns]
        return found

    def mean(self, name: str) -> np.ndarray:
        """Returns the mean of the rows of all tokens except the new ones: Float64[columns]."""
        if name not in self._means:
            count = min(self._added.start, super().shape(name)[0])
            parts = (slice(i, min(i + _ROWS, count)) for i in range(0, count, _ROWS))
            read = super().read
            sums = (read(name, (part, slice(None))).astype(np.float64).sum(0) for part in parts)
            self._means[name] = np.asarray(sum(sums)) / count
        return self._means[name]


def reading(file: Path) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager for reading a safetensors file.

    Raises:
        StateError: In its `with` block, the file is damaged.
    """
    problem, unreadable = "is not a whole safetensors file", (SafetensorError, OSError)
    return raising(StateError, file, problem, "Download it again.", unreadable)


def unlike(wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Returns the names of missing and unexpected tensors, and descriptions of wrong shapes."""
    return {
        "missing": [name for name in wanted if name not in found],
        "unexpected": sorted(found.keys() - wanted.keys()),
        "wrong": [
            f"{name} is {list(found[name])}, not {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ],
    }


def in_words(kinds: Mapping[str, list[str]]) -> str:
    """Formats what `unlike` returned, without the empty kinds."""
    return "; ".join(f"{kind}: {first_of(names)}" for kind, names in kinds.items() if names)


def read_json(path: Path) -> JsonObject:
    """Reads a JSON file that holds an object.

    Raises:
        MissingFileError: The file does not exist.
        StateError: It is not JSON, or not an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(
            at=str(path),
            problem="no such file",
            fix="Give the folder of a model in the manner of transformers.",
        ) from error
    except (OSError, ValueError) as error:
        problem = f"cannot be read as JSON: {error}"
        raise StateError(at=str(path), problem=problem, fix="Download the folder again.") from error
    if not isinstance(values, dict):
        raise StateError(
            at=str(path), problem="is not a JSON object", fix="Download the folder again."
        )
    return values
