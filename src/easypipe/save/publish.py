"""Which files of saved folders go into a dataset repository, and to which paths."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping

from easypipe.core.publication import Publication, PublishedFile
from easypipe.core.remote import StorageOptions
from easypipe.save.card import MARK, CardPart, card_text, join_below, public_name
from easypipe.save.saved import MANIFEST, SavedManifest, join, read_manifest


def publication(
    folders: Mapping[str, str], repo_id: str, storage_options: StorageOptions = None
) -> Publication:
    """Returns the files of the saved `folders` for a dataset repository: shards, then manifests.

    For a tokenizer in a folder, only the name of the folder is published.

    Args:
        folders: The saved folders by dataset.
        repo_id: The repository.

    Raises:
        CacheError, MissingFileError: As in `load_saved`.
    """
    parts, shards, manifests = [], [], []
    for name, folder in folders.items():
        below = name if len(folders) > 1 else ""
        manifest = read_manifest(folder, storage_options)
        parts.append(CardPart(name=name if below else "default", folder=below, manifest=manifest))
        shards += [
            PublishedFile(
                name=join_below(below, shard.name),
                num_bytes=shard.num_bytes,
                path=join(folder, shard.name),
            )
            for shard in manifest.shards
        ]
        content = _public(manifest)
        manifests.append(
            PublishedFile(name=join_below(below, MANIFEST), num_bytes=len(content), content=content)
        )
    # "" too: a folder that one dataset was pushed to would be loaded in place of several
    places = "|".join(["", *(re.escape(f"{part.folder}/") for part in parts if part.folder)])
    shard = r"part-[0-9a-f]{8}-\d{5}-of-\d{5}\.[a-z.]+"
    return Publication(
        files=[*shards, *manifests],
        card=card_text(parts, f"hf://datasets/{repo_id}"),
        mark=MARK,
        stale=rf"({places})({shard}|{re.escape(MANIFEST)})",
        storage_options=storage_options,
    )


def _public(manifest: SavedManifest) -> bytes:
    """Returns the manifest for publication, without local paths."""
    tokens = manifest.tokens
    if tokens is not None:
        manifest = dataclasses.replace(
            manifest, tokens=dataclasses.replace(tokens, tokenizer=public_name(tokens.tokenizer))
        )
    return (json.dumps(manifest.to_json(), indent=1, sort_keys=True) + "\n").encode()
