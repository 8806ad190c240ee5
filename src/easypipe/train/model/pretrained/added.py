"""New tokens (`model.add_tokens`): a published model's tokenizer with them, and their ids.

This file imports no jax: data is prepared with such a tokenizer too.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from easypipe.core.config import digest
from easypipe.core.errors import ConfigError, EasypipeError
from easypipe.core.storage import commit_folder, json_bytes, temporary_of
from easypipe.train.model.pretrained.files import TOKENIZER_CONFIG, TOKENIZER_FILES, read_json
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer

DEFINITION = "tokenizer.json"
_KNOW_NONE = "tokenizer.model"  # left out, because tokens cannot be added to this file here


@functools.lru_cache(maxsize=1)
def _grown(folder: Path, tokens: tuple[str, ...]) -> tuple[str, range]:
    """Returns the definition of a tokenizer with new tokens, and the ids of the new tokens.

    Raises:
        ConfigError: The folder has no tokenizer, or it has one of the tokens already.
    """
    try:
        tokenizer = load_tokenizer(str(folder))
        first = tokenizer.vocab_size
        return tokenizer.definition_with(tokens), range(first, first + len(tokens))
    except EasypipeError as error:
        problem = f"{error.at}: {error.problem}"
        raise ConfigError(
            at="model.add_tokens", problem=problem, have=error.have, fix=error.fix
        ) from error


def added_ids(folder: Path, tokens: Sequence[str]) -> range:
    """Returns the ids of new tokens, which follow those of the tokenizer in `folder`.

    Raises:
        ConfigError: The folder has no tokenizer, or it has one of the tokens already.
    """
    return _grown(folder, tuple(tokens))[1]


def tokenizer_with(folder: Path, tokens: Sequence[str], into: Path) -> Path:
    """Writes a tokenizer with new tokens as a folder in `into`, and returns that folder.

    Its name follows from its content; one that exists is not written again.

    Raises:
        ConfigError: See added_ids.
        OSError: The folder cannot be written.
    """
    definition, ids = _grown(folder, tuple(tokens))
    files = {
        name: (folder / name).read_bytes()
        for name in TOKENIZER_FILES
        if name != _KNOW_NONE and (folder / name).is_file()
    }
    files[DEFINITION] = definition.encode()
    if TOKENIZER_CONFIG in files:
        values = read_json(folder / TOKENIZER_CONFIG)
        if isinstance(decoder := values.get("added_tokens_decoder"), dict):
            known = json.loads(definition)["added_tokens"]
            new = {str(one.pop("id")): one for one in known if one["id"] in ids}
            files[TOKENIZER_CONFIG] = json_bytes(values | {"added_tokens_decoder": decoder | new})
    target = into / digest([[name, data.decode()] for name, data in sorted(files.items())])
    if not target.is_dir():
        temporary = temporary_of(target)
        temporary.mkdir()
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        try:
            commit_folder(temporary, target)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if not target.is_dir():  # another process was first
                raise
    return target
