"""The dataset card of a saved folder: what people want to know, and the YAML that the Hub and
`datasets` read.

In the folder it stands in files that readers of whole folders pass over, since their names begin
with `_` or `.`: pandas and pyarrow take every other file for data. Only a repository on the Hub has
a README.md. The card follows from the manifest alone: the same rows give the same bytes, and
nothing of the machine that wrote them stands in it.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from easypipe.core import storage
from easypipe.save.saved import MANIFEST, SavedManifest, join

log = logging.getLogger("easypipe")

CARD = "_README.md"
YAML = ".huggingface.yaml"  # `datasets` reads it where there is no README.md, or after that
HUB_CARD = "README.md"  # of easypipe 0.1, beside the shards too
# in a card that may be replaced by the next run; without it a README.md is somebody's own
MARK = "Written by easypipe"

# The Hub's own words for row counts: upper end, name.
_SIZES = [
    (10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"), (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B"), (10**12, "100B<n<1T"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CardPart:
    """One saved folder of a card. folder: below the card's own, "" where the shards lie beside
    it.
    """

    name: str
    folder: str
    manifest: SavedManifest


def write_card(
    folder: str, manifest: SavedManifest, storage_options: dict[str, Any] | None = None
) -> bool:
    """Commits the card of a folder. Files of somebody's own stay, as do those that already say
    this. Returns whether it wrote.

    A README.md that an earlier easypipe wrote is removed; where it is somebody's own, `datasets` is
    left to what that says.
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
        log.info("save: %s is not easypipe's, it stays as it is", join(folder, name))
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
    """The card of one saved folder or of several below one root."""
    text = [f"---\n{_yaml(parts)}---\n", "# Saved rows\n"]
    text.append(
        f"{MARK}. Every figure here is in `{MANIFEST}` too, which lies beside the shards.\n"
    )
    text += [_section(part, several=len(parts) > 1) for part in parts]
    text.append(_loading(parts, load_from))
    return "\n".join(text)


def _yaml(parts: Sequence[CardPart]) -> str:
    front = {
        "configs": [_config(part, default=i == 0) for i, part in enumerate(parts)],
        "dataset_info": [_info(part) for part in parts],
        "size_categories": [size_category(sum(part.manifest.num_rows for part in parts))],
        "tags": ["easypipe"],
    }
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True)


def _config(part: CardPart, *, default: bool) -> dict[str, Any]:
    known = {
        "config_name": part.name,
        "data_files": [
            {"split": "train", "path": join_below(part.folder, shards_glob(part.manifest))}
        ],
    }
    return known | ({"default": True} if default else {})


def _info(part: CardPart) -> dict[str, Any]:
    num_bytes = sum(shard.num_bytes for shard in part.manifest.shards)
    split = {"name": "train", "num_bytes": num_bytes, "num_examples": part.manifest.num_rows}
    return {
        "config_name": part.name,
        "splits": [split],
        "download_size": num_bytes,
        "dataset_size": num_bytes,
    }


def shards_glob(manifest: SavedManifest) -> str:
    """What matches the shards of a folder and nothing else in it."""
    name = manifest.shards[0].name
    return f"{name[: name.index('-', len('part-'))]}-*{name[name.index('.') :]}"


def join_below(folder: str, name: str) -> str:
    return "/".join(part for part in (folder, name) if part)


def _section(part: CardPart, *, several: bool) -> str:
    manifest = part.manifest
    tokens = sum(shard.num_tokens for shard in manifest.shards)
    facts = [
        ("rows", f"{manifest.num_rows:,}"),
        (
            "tokens",
            f"{tokens:,}"
            if manifest.tokens is not None or tokens
            else "none: the rows are not tokenized",
        ),
        (
            "files",
            f"{len(manifest.shards):,} {manifest.format}, compression {manifest.compression}",
        ),
        ("bytes", f"{sum(shard.num_bytes for shard in manifest.shards):,}"),
        ("fingerprint", f"`{manifest.fingerprint}`"),
    ]
    if manifest.tokens is not None:
        info = manifest.tokens
        facts += [
            ("tokenizer", f"{public_name(info.tokenizer)}, vocabulary of {info.vocab_size:,}"),
            ("tokenizer fingerprint", f"`{info.tokenizer_fingerprint}`"),
            ("EOS, padding", f"{info.eos_token_id}, {info.pad_token_id}"),
            (
                "a row is",
                "one document"
                if info.seq_length is None
                else f"{info.seq_length:,} slots of packed documents",
            ),
        ]
    lines = [f"## {part.name}\n"] if several else []
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts), ""]
    lines += [
        "| column | type |",
        "| --- | --- |",
        *(f"| `{field.name}` | `{field.type}` |" for field in manifest.schema),
        "",
    ]
    return "\n".join([*lines, _ledger(manifest.ledger)])


def _ledger(ledger: Mapping[str, Any]) -> str:
    lines = [
        "Where every row and token went:\n",
        "| stage | dataset | unit | in | out |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in ledger["entries"]:
        into, out = (
            ", ".join(f"{name} {count:,}" for name, count in entry[side].items())
            for side in ("in", "out")
        )
        lines.append(
            f"| {entry['stage']} | {entry['dataset']} | {entry['unit']} | {into} | {out} |"
        )
    return "\n".join(lines) + "\n"


def _loading(parts: Sequence[CardPart], load_from: str) -> str:
    at = [join_below(load_from, part.folder) for part in parts]
    calls = "\n".join(f'source = easypipe.load_saved("{place}")' for place in at)
    words = "or as `data_files` of an `easypipe.DatasetConfig`; nothing is tokenized again.\n"
    return f"## Loading it\n\n```python\nimport easypipe\n\n{calls}\n```\n\n{words}"


def public_name(tokenizer: str) -> str:
    """A tokenizer's name as it may be published: an id stays, of a folder only its last part."""
    local = tokenizer.startswith(("/", "~", ".")) or "\\" in tokenizer or tokenizer.count("/") > 1
    return tokenizer.rstrip("/\\").replace("\\", "/").rpartition("/")[2] if local else tokenizer


def size_category(rows: int) -> str:
    """The Hub's words for so many rows."""
    i = bisect.bisect_right([end for end, _ in _SIZES], rows)
    return _SIZES[i][1] if i < len(_SIZES) else "n>1T"
