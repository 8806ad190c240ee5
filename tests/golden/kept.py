"""A token cache and a saved folder that the commit made which kept these digests: they must open,
or be refused by name.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from easypipe import Pipeline, TokenCache, load_saved
from easypipe.core.errors import EasypipeError
from golden.batches import SAVED, chain
from golden.cases import golden, is_to_be_kept
from golden.data import config
from golden.digests import digest, message

HERE = Path(__file__).parent / "saved"


@golden()
def saved_folder(folder: Path) -> Any:
    archive = HERE / "folder.zip"
    if is_to_be_kept(archive):
        chain(SAVED["saved_packed"](folder / "first")).build()
        shutil.make_archive(str(archive.with_suffix("")), "zip", folder / "first" / "out")
    shutil.unpack_archive(archive, folder / "out")
    source = load_saved(folder / "out")
    return {
        Path(info.name).name: digest(source.read(shard, 0, info.num_rows))
        for shard, info in enumerate(source.shards)
    }


@golden()
def token_cache(folder: Path) -> Any:
    """Its documents; a later format may refuse it, with the message that is kept in its place."""
    archive = HERE / "cache.zip"
    if is_to_be_kept(archive):
        Pipeline(config(folder / "first")).source().tokenize().ledger()
        shutil.make_archive(str(archive.with_suffix("")), "zip", folder / "first" / "cache")
    shutil.unpack_archive(archive, folder / "cache")
    found = {}
    for manifest in sorted((folder / "cache").glob("manifests/*.json")):
        try:
            cache = TokenCache(manifest)
            found[f"{cache.num_docs} documents"] = digest(
                [cache.tokens(doc).tolist() for doc in range(cache.num_docs)]
            )
        except EasypipeError as error:
            found[manifest.name] = message(error, folder)
    return found
