"""Finds and reads a tokenizer's files, here or on the Hub; also its chat template and end tokens.

A name that looks like a path is a path: it is never looked up on the Hub, and a missing one is an
error.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from easypipe.core.errors import TokenizerError, near_path, raising
from easypipe.core.reachable import hub_unreachable, near_here
from easypipe.core.trust import hub_token

logger = logging.getLogger("easypipe")

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILE_ENDINGS = (".json", ".model", ".tiktoken", ".txt")


SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FURTHER = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


Json = Any  # the values in tokenizer_config.json; they are checked before they are used
Options = Mapping[str, Json]


class DeclaredToken(NamedTuple):
    """A token that tokenizer_config.json declares.

    Attributes:
        content: Its string.
        number: Its id, if the file says it.
        special: Whether it is a special token.
        flags: Options of `tokenizers.AddedToken`.
    """

    content: str
    number: int | None
    special: bool
    flags: tuple[tuple[str, bool], ...]


class TokenizerFiles(NamedTuple):
    """The contents of a tokenizer's files.

    Attributes:
        definition: The text of tokenizer.json.
        options: What tokenizer_config.json holds, such as the named special tokens.
        origin: Where the files were found.
    """

    definition: str
    options: Options
    origin: str


def find_tokenizer(name_or_path: str) -> TokenizerFiles:
    """Reads the files of a tokenizer from a path or the Hub.

    Raises:
        TokenizerError: Nothing is found, or what is found is not a tokenizer.json.
    """
    path = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(path):
        return _from_folder(path)
    if os.path.isfile(path):
        if path.suffix != ".json":
            raise TokenizerError(
                at=name_or_path,
                problem=f"a {path.suffix or 'nameless'} file is not a tokenizer.json",
                fix="Convert it with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
            )
        return _read(path, path.parent)
    if _looks_like_path(name_or_path):
        raise _missing_path(name_or_path)
    return _from_hub(name_or_path)


def content_of(token: Json) -> Json:
    """Returns the string of a token; some files put it into an object."""
    return token.get("content") if isinstance(token, dict) else token


def declared_tokens(options: Options) -> tuple[DeclaredToken, ...]:
    """Returns the tokens of `added_tokens_decoder` by id, then the named special tokens."""
    given = options.get("added_tokens_decoder")
    numbered: Options = given if isinstance(given, dict) else {}
    numbers = sorted(int(key) for key in numbered if key.isdecimal())
    found = [_declared(numbered[str(number)], number) for number in numbers]
    further = [
        token for key in _FURTHER if isinstance(options.get(key), list) for token in options[key]
    ]
    found += [
        _declared(token, None)
        for token in [*(options.get(name) for name in SPECIAL_NAMES), *further]
    ]
    kept: dict[str, DeclaredToken] = {}
    for token in found:
        if token is not None:
            kept.setdefault(token.content, token)
    return tuple(kept.values())


def _declared(token: Json, number: int | None) -> DeclaredToken | None:
    content = content_of(token)
    if not isinstance(content, str) or not content:
        return None
    said = token if isinstance(token, dict) else {}
    special = number is None or bool(said.get("special"))
    return DeclaredToken(
        content, number, special, tuple((flag, bool(said[flag])) for flag in _FLAGS if flag in said)
    )


def find_chat_template(name_or_path: str) -> tuple[str, str | None, str]:
    """Reads a tokenizer's chat template from chat_template.jinja or tokenizer_config.json.

    Returns:
        (template, another one for rows with tools or None, where it was found).

    Raises:
        TokenizerError: The tokenizer has no chat template.
    """
    own = _beside(name_or_path, "chat_template.jinja")
    config = _beside(name_or_path, "tokenizer_config.json")
    options = _options(config)
    if own is not None and os.path.isfile(own):
        with raising(
            TokenizerError,
            own,
            "cannot be read",
            "Give a Jinja template in UTF-8.",
            (OSError, UnicodeDecodeError),
        ):
            return own.read_text(encoding="utf-8"), None, str(own)
    template = options.get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        template = {
            item.get("name"): item.get("template") for item in template if isinstance(item, dict)
        }
    tool_use = None
    if isinstance(template, dict):
        template, tool_use = template.get("default"), template.get("tool_use")
    if not isinstance(template, str):
        raise TokenizerError(
            at=name_or_path,
            problem="the tokenizer has no chat template",
            fix="Put a chat_template.jinja beside tokenizer.json, or set chat_template of the "
            "dataset to a .jinja file or a built-in one: chatml, plain, zephyr or alpaca.",
        )
    return (
        template,
        tool_use if isinstance(tool_use, str) else None,
        f"{name_or_path}, tokenizer_config.json",
    )


def find_end_tokens(name_or_path: str) -> tuple[int, ...]:
    """Reads from generation_config.json, next to a tokenizer, which tokens end a model's text.

    Returns () if the file does not exist, or, with a warning, if the Hub cannot be asked for it.

    Raises:
        TokenizerError: The file is not a JSON object.
    """
    try:
        path = _beside(name_or_path, "generation_config.json")
    except TokenizerError as error:
        logger.warning(
            "%s: its chat template alone says what ends an answer: %s", name_or_path, error
        )
        return ()
    given = _options(path).get("eos_token_id")
    return tuple(
        one for one in (given if isinstance(given, list) else [given]) if isinstance(one, int)
    )


def _beside(name_or_path: str, file: str) -> Path | None:
    """Returns the path of a file next to a tokenizer; None if a Hub repository lacks it."""
    path = Path(os.path.expanduser(name_or_path))
    if os.path.exists(path) or _looks_like_path(name_or_path):
        return (path if os.path.isdir(path) else path.parent) / file
    return _optional_from_hub(name_or_path, file)


def _looks_like_path(name: str) -> bool:
    if (
        name.startswith(("/", "./", "../", "~"))
        or name in (".", "..")
        or "\\" in name
        or name.endswith(_FILE_ENDINGS)
    ):
        return True
    return _REPOSITORY.fullmatch(name) is None


def _missing_path(name: str) -> TokenizerError:
    near, fix = near_path(name)
    fix = fix or "Give a tokenizer.json, a folder that holds one, or a Hub name such as 'gpt2'."
    return TokenizerError(at=name, problem="no such file or folder", have=near, fix=fix)


def _from_folder(folder: Path) -> TokenizerFiles:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            at=str(folder),
            problem="the folder holds no tokenizer.json",
            have=sorted(p.name for p in folder.iterdir())[:20],
            fix="Convert the tokenizer with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
        )
    return _read(path, folder)


def _read(path: Path, folder: Path) -> TokenizerFiles:
    with raising(
        TokenizerError,
        path,
        "cannot be read",
        "Give a tokenizer.json in UTF-8.",
        (OSError, UnicodeDecodeError),
    ):
        # The file has megabytes, and reading it as text would search for line ends.
        definition = _decoded(path.read_bytes())
    return TokenizerFiles(definition, _options(folder / "tokenizer_config.json"), str(path))


_kept: tuple[bytes, str] = b"", ""


def _decoded(raw: bytes) -> str:
    """Decodes the bytes of a file, and keeps the last text.

    Returning the same object again saves milliseconds of hashing in caches whose key it is.
    """
    global _kept
    kept = _kept
    if kept[0] != raw:
        _kept = kept = raw, raw.decode()
    return kept[1]


def _options(path: Path | None) -> Options:
    """Reads a JSON object, such as tokenizer_config.json; {} if there is no file."""
    if path is None or not os.path.isfile(path):
        return {}
    with raising(
        TokenizerError,
        path,
        "not JSON",
        "Correct the file, or delete it.",
        (OSError, ValueError, RecursionError),
    ):
        values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise TokenizerError(
            at=str(path), problem="not a JSON object", fix="Correct the file, or delete it."
        )
    return values


def _from_hub(name: str) -> TokenizerFiles:
    """Downloads a tokenizer from the Hub; its TokenizerError says the cause and what helps."""
    from huggingface_hub import hf_hub_download  # slow to import, and only needed for names
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    told = {  # the most specific first, since some are subclasses of others
        GatedRepoError: (
            "the Hub repository is gated",
            f"Accept its terms on https://huggingface.co/{name}, then set HF_TOKEN to a token that "
            "may read it.",
        ),
        RepositoryNotFoundError: (
            "no such file or folder, nor such a repository on the Hugging Face Hub, or it is "
            "private",
            "Check the name; for a private repository set HF_TOKEN to a token that may read it.",
        ),
        LocalEntryNotFoundError: (
            "no such file or folder, and the Hugging Face Hub cannot be reached: {why}",
            "Check the network (and HF_HUB_OFFLINE, HF_ENDPOINT), give a local tokenizer.json "
            f"(hf download {name} --local-dir FOLDER on a machine with a network), or, for a "
            "private or gated repository, set HF_TOKEN.",
        ),
        EntryNotFoundError: (
            "the Hub repository holds no tokenizer.json",
            "Convert it with transformers: "
            "AutoTokenizer.from_pretrained(name).save_pretrained(folder), then give the folder.",
        ),
        # HTTP and validation errors of the Hub client derive from these
        (OSError, ValueError): (
            "cannot be downloaded from the Hugging Face Hub: {why}",
            "Give a local tokenizer.json, or, for a private or gated repository, set HF_TOKEN.",
        ),
    }
    offline = hub_unreachable()
    try:
        path = Path(
            hf_hub_download(
                name, "tokenizer.json", token=hub_token(), local_files_only=offline is not None
            )
        )
    except (OSError, ValueError, EntryNotFoundError) as error:
        problem, fix = next(said for kind, said in told.items() if isinstance(error, kind))
        problem = problem.replace("{why}", offline or _root(error))
        have = None
        if isinstance(error, RepositoryNotFoundError | LocalEntryNotFoundError):
            have, fix = near_here(name, fix)
        raise TokenizerError(at=name, problem=problem, have=have, fix=fix) from None
    config = _optional_from_hub(name, "tokenizer_config.json")
    return TokenizerFiles(_read(path, path.parent).definition, _options(config), f"hub:{name}")


def _optional_from_hub(name: str, file: str) -> Path | None:
    """Downloads a file of a repository; returns None if the repository does not have it."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        offline = hub_unreachable() is not None
        return Path(hf_hub_download(name, file, token=hub_token(), local_files_only=offline))
    except (OSError, ValueError, EntryNotFoundError) as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        known = try_to_load_from_cache(name, file)
        # offline, and the Hub said earlier that the file does not exist
        if known is not None and not isinstance(known, str):
            return None
        raise TokenizerError(
            at=name,
            problem=f"{file} cannot be downloaded from the Hugging Face Hub: {_root(error)}",
            fix="Check the network, try again.",
        ) from None


def _root(error: BaseException) -> str:
    """Returns the first cause of an error, without any access token in its message."""
    from huggingface_hub import get_token

    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    token = get_token()
    text = text.replace(token, "***") if token else text
    return re.sub(r"hf_[A-Za-z0-9]{8,}", "***", text)
