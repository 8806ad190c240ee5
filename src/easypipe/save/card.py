"""Writes the dataset card (README.md) of saved folders, with the YAML that the Hub reads.

In the folder, the card is in files with names that begin with `_` or `.`, which readers of whole
folders skip: pandas and pyarrow read every other file as data. Only a repository on the Hub has a
README.md. The card depends only on the manifest: the same rows make the same bytes, and it contains
nothing about the machine that wrote them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import yaml

from easypipe.core import storage
from easypipe.core.remote import StorageOptions
from easypipe.core.values import JsonObject
from easypipe.core.visible import visible
from easypipe.save.saved import MANIFEST, SavedManifest, join

log = logging.getLogger("easypipe")

CARD = "_README.md"
YAML = ".huggingface.yaml"  # `datasets` reads it after README.md, if there is one
HUB_CARD = "README.md"  # easypipe 0.1 also wrote it next to the shards
# A card with this text may be replaced by the next run; a README.md without it is a user's own.
MARK = "Written by easypipe"

# The Hub's names for row counts, by their number of digits; the first is for up to three.
SIZES = (
    "n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B",
    "1B<n<10B", "10B<n<100B", "100B<n<1T", "n>1T",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CardPart:
    """One saved folder of a card.

    Attributes:
        name: The name of its config in the YAML.
        folder: Its path within the card's folder; "" if the shards are in the same folder.
        manifest: Its manifest.
    """

    name: str
    folder: str
    manifest: SavedManifest


def write_card(
    folder: str, manifest: SavedManifest, storage_options: StorageOptions = None
) -> bool:
    """Commits the card of a folder.

    A user's files are kept, and so are cards with the same content. A README.md that an earlier
    easypipe wrote is removed; if it is a user's, `datasets` uses it instead of the card.

    Returns:
        Whether anything was written.
    """
    part = CardPart(name="default", folder="", manifest=manifest)
    wanted = {CARD: card_text([part]), YAML: f"# {MARK}.\n{_yaml([part])}"}
    standing = storage.names_in(folder, storage_options)
    old = {
        name: storage.read_bytes(join(folder, name), storage_options).decode(errors="replace")
        for name in (*wanted, HUB_CARD)
        if name in standing
    }
    foreign = [name for name, text in old.items() if MARK not in text]
    for name in foreign:
        log.info("save: %s was not written by easypipe, so it is kept", join(folder, name))
    if HUB_CARD in foreign:
        del wanted[YAML]
    elif HUB_CARD in old:
        storage.remove(join(folder, HUB_CARD), storage_options)
    missing = [
        name for name, text in wanted.items() if name not in foreign and old.get(name) != text
    ]
    for name in missing:
        storage.commit_bytes(join(folder, name), wanted[name].encode(), storage_options)
    return bool(missing)


def card_text(parts: Sequence[CardPart], load_from: str = "path/to/this/folder") -> str:
    """Returns the card of one saved folder, or of several in one folder."""
    text = [f"---\n{_yaml(parts)}---\n", "# Saved rows\n"]
    text.append(
        f"{MARK}. Every figure here is in `{MANIFEST}` too, which lies beside the shards.\n"
    )
    text += [_section(part, several=len(parts) > 1) for part in parts]
    text.append(_loading(parts, load_from))
    return "\n".join(text)


def _yaml(parts: Sequence[CardPart]) -> str:
    """Returns the YAML of a card."""
    configs: list[JsonObject] = []
    infos: list[JsonObject] = []
    for part in parts:
        path = join_below(part.folder, shards_glob(part.manifest))
        configs.append(
            {"config_name": part.name, "data_files": [{"split": "train", "path": path}]}
            | ({} if configs else {"default": True})
        )
        num_bytes, num_rows = part.manifest.num_bytes, part.manifest.num_rows
        infos.append(
            {
                "config_name": part.name,
                "splits": [{"name": "train", "num_bytes": num_bytes, "num_examples": num_rows}],
                "download_size": num_bytes,
                "dataset_size": num_bytes,
            }
        )
    front = {
        "configs": configs,
        "dataset_info": infos,
        "size_categories": [size_category(sum(part.manifest.num_rows for part in parts))],
        "tags": ["easypipe"],
    }
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True)


def shards_glob(manifest: SavedManifest) -> str:
    """Returns a pattern that matches the shards of a folder and nothing else in it."""
    name = manifest.shards[0].name
    return f"{name[: name.index('-', len('part-'))]}-*{name[name.index('.') :]}"


def join_below(folder: str, name: str) -> str:
    return "/".join(part for part in (folder, name) if part)


def _section(part: CardPart, *, several: bool) -> str:
    """Returns the part of a card about one folder: facts, columns and the ledger."""
    manifest, info = part.manifest, part.manifest.tokens
    counted = info is not None or manifest.num_tokens
    facts = {
        "rows": f"{manifest.num_rows:,}",
        "tokens": f"{manifest.num_tokens:,}" if counted else "none: the rows are not tokenized",
        "files": f"{len(manifest.shards):,} {manifest.format}, compression {manifest.compression}",
        "bytes": f"{manifest.num_bytes:,}",
        "fingerprint": f"`{manifest.fingerprint}`",
    }
    if info is not None:
        slots = "one document"
        if info.seq_length is not None:
            slots = f"{info.seq_length:,} slots of packed documents"
        facts |= {
            "tokenizer": f"{public_name(info.tokenizer)}, vocabulary of {info.vocab_size:,}",
            "tokenizer fingerprint": f"`{info.tokenizer_fingerprint}`",
            "EOS, padding": f"{info.eos_token_id}, {info.pad_token_id}",
            "a row is": slots,
        }
    balance = [
        [
            *(str(entry[key]) for key in ("stage", "dataset", "unit")),
            *(", ".join(f"{k} {n:,}" for k, n in entry[side].items()) for side in ("in", "out")),
        ]
        for entry in manifest.ledger["entries"]
    ]
    columns = [(f"`{field.name}`", f"`{field.type}`") for field in manifest.schema]
    return "\n".join(
        [
            *([f"## {part.name}\n"] if several else []),
            _table(("", ""), facts.items()),
            _table(("column", "type"), columns),
            "Where every row and token went:\n",
            _table(("stage", "dataset", "unit", "in", "out"), balance),
        ]
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([visible(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in cells
    )


def _loading(parts: Sequence[CardPart], load_from: str) -> str:
    """Returns the part of a card that says how to load the rows."""
    at = [join_below(load_from, part.folder) for part in parts]
    calls = "\n".join(f'source = easypipe.load_saved("{place}")' for place in at)
    words = "or as `data_files` of an `easypipe.DatasetConfig`; nothing is tokenized again.\n"
    return f"## Loading it\n\n```python\nimport easypipe\n\n{calls}\n```\n\n{words}"


def public_name(tokenizer: str) -> str:
    """Returns a tokenizer's name for publication: only the last part of a folder."""
    local = tokenizer.startswith(("/", "~", ".")) or "\\" in tokenizer or tokenizer.count("/") > 1
    return tokenizer.rstrip("/\\").replace("\\", "/").rpartition("/")[2] if local else tokenizer


def size_category(rows: int) -> str:
    """Returns the Hub's name for a number of rows."""
    return SIZES[min(max(len(str(rows)) - 3, 0), len(SIZES) - 1)]
