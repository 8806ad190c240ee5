"""New tokens (`model.add_tokens`): the tokenizer of a published model with them, and their ids.

No jax here: data is prepared with such a tokenizer too.
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
_KNOW_NONE = "tokenizer.model"  # a file of tokens to which none can be added here: left out


@functools.lru_cache(maxsize=1)
def _grown(folder: Path, tokens: tuple[str, ...]) -> tuple[str, range]:
    """The definition of a tokenizer with new tokens, and their ids."""
    try:
        tokenizer = load_tokenizer(str(folder))
        first = tokenizer.vocab_size
        return tokenizer.definition_with(tokens), range(first, first + len(tokens))
    except EasypipeError as error:
        raise ConfigError(at="model.add_tokens", problem=str(error), fix=error.fix) from error


def added_ids(folder: Path, tokens: Sequence[str]) -> range:
    """The ids of new tokens behind those of the tokenizer in `folder`.

    Raises ConfigError where there is no tokenizer, and for a token that it has.
    """
    return _grown(folder, tuple(tokens))[1]


def tokenizer_with(folder: Path, tokens: Sequence[str], into: Path) -> Path:
    """The folder of the tokenizer in `folder` with new tokens; written into `into` under a name
    that follows from its content, unless it is there.

    Raises what added_ids raises, and OSError.
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
