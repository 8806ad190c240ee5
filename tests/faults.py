"""Fault trials: does the suite notice when the code is wrong?

    python tests/faults.py                 # puts every fault in, one after another, and runs the tests that must fail
    python tests/faults.py remote mix      # those whose name or file holds one of the words
    python tests/faults.py --jobs 4        # four at once

Each fault is one change of one file, put into a copy of `src`. It dies where a test of its room
fails, and lives where all pass; exit code 1 where more than `MAY_LIVE` live. At the end the tests
that failed run on the copy as it is, where they have to pass: else nothing is known of their
faults. `nox -s faults` runs them all (tests/test_faults.py asserts that each still fits the code).

Each trial is a fork of a process that has imported the libraries, but nothing of easypipe.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "easypipe"
MAY_LIVE = 0
LONGEST_S = 600  # of the tests of one trial; a fault that hangs has died
QUICK = "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=faults"
LIBRARIES = (  # what most tests import
    "conftest",  # what it asks of jax is asked before jax is imported
    "datasets",
    "flax.nnx",
    "fsspec.implementations.http",
    "google.cloud.storage",
    "hypothesis.extra.numpy",
    "jax.experimental.pallas.tpu",
    "jaxtyping",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "numba",
    "optax",
    "pydantic.dataclasses",
    "orbax.checkpoint",
    "pyarrow.dataset",
    "pyarrow.json",
    "pyarrow.parquet",
    "rich.progress",
    "tokenizers",
    "transformers",
    "typer.testing",
)


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in `file`, becomes `new`; `tests` are pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return len(self.places.findall((PACKAGE / self.file).read_text(encoding="utf-8"))) == 1

    @property
    def places(self) -> re.Pattern[str]:
        """Matches `old` however a formatter breaks its lines."""
        body = self.old.strip()
        indent, end = self.old.split(body) if body else (self.old, "")
        pattern = "".join(
            r"\s+" if part.isspace() else re.escape(part)
            for part in re.split(r"(\s+)", body)
            if part
        )
        pattern = re.sub(r"(\\[(\[{])", r"\1\\s*", pattern)
        pattern = re.sub(r"(\\[)\]}])", r",?\\s*\1", pattern)
        return re.compile(re.escape(indent) + pattern + re.escape(end))

    def put_into(self, whole: str) -> str:
        """Returns the text of its file with the fault in it."""
        return self.places.sub(lambda _: self.new, whole)


def fault(name: str, file: str, tests: str, old: str, new: str) -> Fault:
    return Fault(name, file, old, new, tuple(shlex.split(tests)))


# fmt: off
FAULTS = [
    # Faults that once lived
    fault("secrets of storage_options are told", "core/remote.py", "tests/sources/test_remote.py -k secret",
          "{*secrets_of(options), *_secrets_of_url(url)}", "{*_secrets_of_url(url)}"),
    fault("secrets of signed URLs are told", "core/remote.py", "tests/sources/test_remote.py -k secret",
          "{*secrets_of(options), *_secrets_of_url(url)}", "{*secrets_of(options)}"),
    fault("a committed file is not synced", "core/storage.py", "tests/core/test_storage.py", "                sync(temporary)\n", "                pass\n"),
    fault("its folder is not synced", "core/storage.py", "tests/core/test_storage.py", "                    sync(local.parent)\n", "                    pass\n"),
    fault("dropout is left on in evaluation", "train/step.py", "tests/train/test_step.py -k dropout",
          "model.set_attributes(deterministic=True,", "model.set_attributes("),
    fault("a checkpoint in doubt is taken for the good one", "train/trainer.py", "tests/train/test_watch.py -k in_doubt",
          "if calendar and not guard.in_doubt:", "if calendar:"),
    fault("a row group entered in its middle gives rows from its start", "sources/formats/parquet.py",
          "tests/sources/test_formats.py -k 'row_group or parquet'",
          "place.held.slice(max(a - place.position, 0), ", "place.held.slice(0, "),
    fault("a token file with another number of documents is opened", "cache/reader.py", "tests/sources/test_cache.py",
          "if batch.num_rows != part.docs or not", "if not"),
    fault("a cache is reused when max_bad_rows is lowered", "cache/writer.py",
          "tests/stages/test_tokenize.py tests/stages/test_cache_writer.py -k 'bad_rows or budget'",
          "FORMAT, keys, self.on_error, self.max_bad_rows)", "FORMAT, keys, self.on_error)"),
    fault("a resume takes another pad token", "loader/rows/planned.py", "tests/loader/test_rows.py -k pads",
          "for c in self.caches], eos, self.pad_token_id)", "for c in self.caches], eos)"),
    fault("a plan over fewer documents than the cache has", "loader/rows/planned.py", "tests/loader/test_rows.py -k fewer",
          "if dataset.num_docs != cache.num_docs:", "if dataset.num_docs > cache.num_docs:"),
    fault("documents of exactly seq_length weigh 1 token", "plan/pack.py", "tests/plan/test_windows.py -k weigh",
          "placed[placed > pack.seq_length] = 0", "placed[placed >= pack.seq_length] = 0"),
    fault("trained turns may overlap", "transforms/chat/aligned.py", "tests/transforms/test_spans.py -k overlap",
          'raise UnprovenError("trained turns overlap")', "pass"),
    fault("a namespace takes private names", "transforms/chat/sandbox.py", "tests/transforms/test_chat.py -k namespace",
          'if isinstance(name, str) and name.startswith("_"):', "if False:"),
    fault("weights are rounded down", "plan/mix.py", "tests/plan/test_mix.py -k near",
          "(2 * part * room + total) // (2 * total)", "(part * room) // total"),
    fault("a sweep removes what a living process writes", "core/storage.py", "tests/core/test_storage.py",
          "pid.isdigit() and not _alive(int(pid))", "pid.isdigit()"),
    fault("uploads to GCS have no checksum", "core/storage.py", "tests/core/test_remote_writes.py",
          '{"consistency": "md5"} if "gs" in fs.protocol else {}', "{}"),
    fault("evaluation's time counts into tokens per second", "train/trainer.py", "tests/train/test_meter.py -k time_of",
          "                self.meter.restart()\n            self._write(record)", "            self._write(record)"),
    fault("the time of a look counts into tokens per second", "train/trainer.py", "tests/train/test_meter.py -k time_of",
          'self.trainer.emit("look", step, state=self.state)\n                self.meter.restart()', 'self.trainer.emit("look", step, state=self.state)'),
    fault("a checkpoint of another format is read", "train/checkpoint/checkpoint.py",
          "tests/train/test_watch.py -k another_format",
          'not isinstance(saved, dict) or saved.get("format") != FORMAT', "not isinstance(saved, dict)"),
    fault("every shuffle block has one permutation", "loader/order.py",
          "tests/loader/test_lengths.py tests/loader/test_loader.py -k 'block or shuffle'",
          "fold(self._shuffle_key, block))", "self._shuffle_key)"),
    fault("grouped batches have one order in every window", "loader/order.py", "tests/loader/test_lengths.py -k less_padding",
          "fold(self._group_key, window))", "self._group_key)"),
    fault("wrong row numbers pass verify", "cache/verify.py", "tests/stages/test_verify.py -k row_numbers",
          "(np.diff(rows) >= 0).all())", "True)"),
    fault("row numbers of another range pass verify", "cache/verify.py", "tests/stages/test_verify.py -k row_numbers",
          "part.start <= rows[0] and rows[-1] < part.stop and", ""),
    # Rooms that are rebuilt next: core
    fault("a range of a stored file that comes short is taken", "core/ranged.py", "tests/core/test_storage.py -k range",
          "_TOO_MUCH.format(stop - start))\n    if len(data) != stop - start:", "_TOO_MUCH.format(stop - start))\n    if False:"),
    fault("an object of GCS is unpacked", "core/ranged.py", "tests/sources/test_remote.py -k stored_packed",
          "auto_decompress=False", "auto_decompress=True"),
    fault("what killed processes left stays in folders that nobody sweeps", "core/storage.py",
          "tests/core/test_storage.py -k first_commit",
          "_sweep(folder.iterdir())", "_sweep([])"),
    fault("new folders are not synced into those above", "core/storage.py",
          "tests/core/test_storage.py -k new_folders",
          "sync(made.parent)", "pass"),
    fault("a file under the name of another is believed", "core/checked.py",
          "tests/core/test_checked.py -k name_of_another",
          "!= _name(path):", "== path:"),
    fault("a token file of other rows is used again", "cache/writer.py",
          "tests/stages/test_cache_writer.py -k without_a_name",
          "if whole and _leaks(said, piece, rejects):", "if False:"),
    fault("a listing shows what is being written", "core/storage.py", "tests/core/test_storage.py -k range",
          "if name and not name.startswith(TEMPORARY))", "if name)"),
    fault("who created a file and lost the answer has lost", "core/storage.py", "tests/core/test_remote_writes.py -k wins",
          "return read_bytes(path, storage_options) == data", "return False"),
    fault("files of a committed folder are not synced", "core/storage.py", "tests/train/test_checkpoint_files.py -k synced",
          "            sync(Path(folder, file))\n", "            pass\n"),
    fault("Retry-After is not waited for", "core/remote.py", "tests/sources/test_remote.py -k how_long",
          "return max(wait, _asked_by(error))", "return wait"),
    fault("a file that changed on a server is read on", "core/ranged.py", "tests/sources/test_remote.py -k changed",
          'raise ChangedError("the server says that the file is another now")', "pass"),
    fault("an object that is another now is read on", "core/ranged.py", "tests/sources/test_remote.py -k anew",
          'raise ChangedError("the store says that the object is another now")', "pass"),
    fault("a server without ranges gives the first bytes", "core/ranged.py", "tests/sources/test_remote.py -k without_ranges",
          "piece[max(0, skipped - at) : skipped + stop - start - at]", "piece[: skipped + stop - start - at]"),
    fault("a stalled request is waited for as long as the policy says", "core/remote.py", "tests/sources/test_remote.py -k stall",
          "if len(self._last) >= KNOWN:", "if False:"),
    fault("a key that stands twice in YAML is taken", "core/safe_yaml.py", "tests/core/test_config.py", "if key in seen:", "if False:"),
    fault("digests follow the order of keys", "core/config.py", "tests/core/test_config.py -k digest", "        sort_keys=True,\n", ""),
    fault("an alias wins over the option that it stands for", "core/config.py", "tests/core/test_config.py -k alias",
          "if alias in changes and head not in changes:", "if alias in changes:"),
    fault("the least value is too small", "core/config.py", "tests/core/test_config.py -k least",
          "value is None or value >= least,", "value is None or value > least,"),
    fault("what is 0 is nothing of an object", "core/values.py", "tests/core/test_protocols.py -k nothing",
          "(value for value in found if value is not None)", "(value for value in found if value)"),
    fault("a manifest of other tokens stays in the bucket", "cache/folder.py", "tests/stages/test_remote_cache.py -k first_manifest",
          "if read_manifest(path, self.options).parts == manifest.parts:", "if read_manifest(path, self.options):"),
    fault("the hint of another plan is kept", "loader/state.py", "tests/loader/test_changed.py -k there_is_now",
          '{"sources", "plan"} & set(changed)', '{"sources"} & set(changed)'),
    fault("a changed run keeps the words of the old config", "loader/state.py", "tests/loader/test_changed.py -k there_is_now",
          "components=components, config=config, hint=hint", "components=components, hint=hint"),
    fault("a function named inside of a list is called", "core/config.py", "tests/stages/test_formats.py -k need_the_flag",
          'require_harmless(value, f"{at}[{i}]")', "continue"),
    fault("books with too much on the right side close", "core/ledger.py", "tests/core/test_ledger.py",
          "if entry.leak:", "if entry.leak > 0:"),
    fault("the facts of a ledger are lost when it is joined", "core/ledger.py", "tests/core/test_ledger.py",
          "        self.facts |= other.facts\n", ""),
    fault("a lock on a file that was removed meanwhile counts", "core/locks.py", "tests/stages/test_cache_admin.py -k removed_before",
          "if os.path.samefile(path, descriptor):", "if True:"),
    fault("two prepare the same dataset at once", "core/locks.py", "tests/stages/test_cache_admin.py -k prepares_alone",
          "alone = try_hold(path, exclusive=True)", "alone = try_hold(path, exclusive=False)"),
    # sources
    fault("files in hidden folders are data", "sources/refs.py", "tests/sources/test_files.py -k paths_globs",
          'if not any(part.startswith((".", "_")) for part in parts) and', 'if not parts[-1].startswith((".", "_")) and'),
    fault("records of arrays keep their comma", "sources/formats/records.py", "tests/sources/test_json.py -k arrays",
          "starts[wanted] + found.layout.lead", "starts[wanted]"),
    fault("an index is believed of a file with fewer records", "sources/formats/records.py", "tests/sources/test_indexes.py -k fewer_records",
          "if count != stop - row:", "if count > stop - row:"),
    fault("the index of one layout serves another", "sources/formats/records.py", "tests/sources/test_indexes.py -k each_choice",
          "whole.digest, layout.key)", "whole.digest)"),
    fault("a byte order mark is part of the first line", "sources/formats/jsonlines.py", "tests/sources/test_json.py -k byte_order",
          "start = len(BOM) if head.startswith(BOM) else 0", "start = 0"),
    fault("a blank line has the number of its piece", "sources/formats/jsonlines.py", "tests/sources/test_indexes.py -k blank_line",
          "np.flatnonzero(flags == BLANK) + piece.row", "np.flatnonzero(flags == BLANK)"),
    fault("a bad CSV record is named by the next one's row", "sources/formats/csv.py", "tests/sources/test_bad_input.py -k csv",
          "bad.append((int(row.number) - 1,", "bad.append((int(row.number),"),
    fault("packed TSV is cut at commas", "sources/formats/csv.py", "tests/sources/test_indexes.py -k tsv",
          "(os.path.splitext(stem)[1] if ending in COMPRESSIONS else ending)", "ending"),
    fault("a place in one row group serves another", "sources/formats/parquet.py", "tests/sources/test_formats.py -k 'row_group or parquet'",
          "p.group == group and ", ""),
    fault("a range of Arrow batches begins at the file's start", "sources/formats/arrow.py",
          "tests/sources/test_formats.py -k 'stateless and (feather or stream) and not streams'",
          "table.slice(start - int(batches.first_row[first]), stop - start)", "table.slice(start, stop - start)"),
    fault("batches of a stream forget its dictionaries", "sources/formats/arrow.py",
          "tests/sources/test_formats.py -k 'stateless and dictionary_stream'",
          "holds(field.type, pa.types.is_dictionary)", "False"),
    fault("a token file that grew is opened", "cache/mapping.py", "tests/sources/test_cache.py -k damage_is",
          "if found != size:", "if found < size:"),
    fault("a manifest under the key of another is believed", "cache/manifest.py", "tests/sources/test_blocks.py -k key_of_another",
          'if found.key != str(path).rpartition("/")[2].removesuffix(".json"):', 'if not found.key:'),
    fault("the document behind the last one has a length", "cache/reader.py", "tests/sources/test_cache.py -k exist",
          "docs.max() >= self.num_docs)", "docs.max() > self.num_docs)"),
    fault("the last block of a document is not checked", "cache/blocks.py", "tests/sources/test_blocks.py -k noted",
          "((start + num_bytes - 1) >> SHIFT) + 1)", "((start + num_bytes - 1) >> SHIFT))"),
    fault("a token file of another name is believed", "cache/writer.py",
          "tests/stages/test_cache_writer.py -k another_text",
          'if (name := said.get("file", file)) != file:', "if (name := file) != file:"),
    fault("blocks behind one that nobody reads on to are checked", "cache/blocks.py", "tests/sources/test_blocks.py -k reads_on",
          "if block and flags[block - 1]:", "if block:"),
    fault("a piece that fills a row is cut", "transforms/chat/turns.py", "tests/stages/test_split_turns.py -k exactly",
          "if size > room and self._count > 1:", "if size >= room and self._count > 1:"),
    fault("fields of a type within a type end it", "transforms/columns/types.py", "tests/transforms/test_columns.py -k as_text",
          'if letter == "," and not depth:', 'if letter == ",":'),
    fault("all blocks of the old buffer have one order", "compat/datasets.py", "tests/compat/test_document_001.py -k of_its_own",
          "fold(key, block)).tolist()", "key).tolist()"),
    fault("extensions of Numba are loaded without its lock", "core/jit.py", "tests/core/test_jit.py -k extension",
          "            init_all()\n", ""),
    fault("masks are not checked", "cache/blocks.py", "tests/sources/test_blocks.py -k noted",
          "count = note(checked, file, mask, length, part, todo, count)", "pass"),
    fault("percent of a split are rounded down", "sources/splits.py", "tests/sources/test_splits.py",
          "round(num_rows * int(bound[:-1]) / 100)", "num_rows * int(bound[:-1]) // 100"),
    fault("a bound before the first row is none", "sources/splits.py", "tests/sources/test_splits.py -k without_rows",
          "return min(max(row + num_rows if bound.startswith(\"-\") else row, 0), num_rows)",
          "return min(row + num_rows if bound.startswith(\"-\") else row, num_rows)"),
    fault("bad rows of a part have the numbers of the file", "sources/splits.py", "tests/sources/test_splits.py -k named",
          "tuple(replace(reject, row=reject.row - first) for reject in rejects)", "tuple(rejects)"),
    fault("cuts of a part are those of the file", "sources/splits.py", "tests/sources/test_splits.py -k cut_where",
          "(cut - a for cut in shard.cuts if a < cut < b)", "(cut for cut in shard.cuts if a < cut < b)"),
    fault("parts of one file with other beginnings are alike", "sources/splits.py", "tests/sources/test_splits.py -k elsewhere",
          "return digest(whole, first) if first else whole", "return whole"),
    fault("a file entered in the middle of a block gives its bytes from there", "sources/formats/streams.py",
          "tests/sources/test_indexes.py -k restarts", "self._take(first * BLOCK_BYTES - restart.plain)", "pass"),
    # transforms
    fault("pieces of a text do not overlap", "transforms/tokenizer/lengths.py", "tests/transforms/test_lengths.py -k split",
          "low = stop - policy.overlap", "low = stop"),
    fault("an answer that just fits is cut", "transforms/tokenizer/lengths.py", "tests/transforms/test_lengths.py -k trim_prompt",
          "if high - answer <= room:", "if high - answer < room:"),
    fault("the first item is not an item from the end", "transforms/columns/columns.py", "tests/transforms/test_columns.py -k extract",
          "lengths >= -position", "lengths > -position"),
    fault("the order of columns decides what is held out", "transforms/columns/hold_out.py", "tests/stages/test_hold_out.py -k order",
          "tuple(sorted(names))", "tuple(names)"),
    fault("what stands for null is not part of the identity", "transforms/columns/columns.py", "tests/transforms/test_fingerprints.py",
          'digest("combine", self.into, self.template, self.null_as)', 'digest("combine", self.into, self.template)'),
    fault("special tokens behind a text are not counted", "transforms/tokenizer/tokenizer.py", "tests/transforms/test_tokenizer.py -k both_sides",
          "before + len(self._suffix), cut", "before, cut"),
    fault("EOS makes a text longer than max_length", "transforms/tokenizer/masked.py", "tests/transforms/test_masked.py",
          "sizes + room < limit", "sizes + room <= limit"),
    fault("a first token alone is a target", "transforms/tokenizer/masked.py", "tests/transforms/test_masked.py -k first_token",
          "    seen[starts[filled]] = 0\n", ""),
    fault("examples in front of a row are trained", "transforms/prompt/formats.py", "tests/transforms/test_prompts.py -k few_shot",
          "{**message, FLAG: False}", "{**message}"),
    fault("a row is drawn as its own example", "transforms/prompt/few_shot.py", "tests/transforms/test_prompts.py -k few_shot",
          "if self._keys[i] != own]", "]"),
    # plan
    fault("passes of an epoch are those of the first", "plan/order.py", "tests/plan/test_order.py",
          "_child(keys[i], epoch + turn)", "_child(keys[i], turn)"),
    fault("the short block is looked for one place early", "plan/order.py", "tests/plan/test_order.py -k blocks",
          "short_at + tail - start", "short_at - start"),
    fault("draws are released by a looser bound", "plan/mix.py", "tests/plan/test_mix.py -k bound_at_every",
          "slack = np.int64(2 * alive - 2)", "slack = np.int64(2 * alive)"),
    fault("a draw of many tokens grants as few as one", "plan/mix.py", "tests/plan/test_schedule.py -k tokens",
          "grant = tokens if by_size else np.int64(0)", "grant = np.int64(by_size)"),
    fault("a document that just fits an open row opens another", "plan/pack.py", "tests/plan/test_pack.py -k oracle",
          "word if word >= need else _NO_ROW", "word if word > need else _NO_ROW"),
    fault("a ramp reaches its point a step late", "plan/mix_schedule.py", "tests/plan/test_schedule.py -k 'shares_follow'",
          "Fraction(step - here, there - here)", "Fraction(step - here, there - here + 1)"),
    fault("weights of unpacked rows change late", "plan/feed.py", "tests/plan/test_schedule.py -k training_step",
          "docs = min(docs, stage.rows)", "pass"),
    fault("a window ends as far behind a change of weights as its estimate says", "plan/window.py",
          "tests/plan/test_schedule.py -k late", "rows <= stage.most", "rows <= 1 << 62"),
    fault("windows are cut where deficits of tokens are those of documents", "plan/window.py", "tests/plan/test_windows.py tests/plan/test_schedule.py",
          "tokens = total[begin + counts] - total[begin]", "pass"),
    fault("books of a part of a window count all of it", "plan/windows.py", "tests/plan/test_windows.py -k stats",
          "self._count(partly, stop_row - partly.first_row, counters)", "self._count(partly, partly.num_rows, counters)"),
    # stages
    fault("a range whose token file is damaged is taken as done", "cache/writer.py", "tests/stages/test_cache_writer.py -k gone",
          "return not part.file or self._folder.holds(part.file, part.num_bytes, part.checksum)", "return True"),
    fault("tokens of another recipe are found by their text", "cache/writer.py",
          "tests/stages/test_cache_writer.py -k other_options",
          'digest("tokens", piece.recipe, text)', 'digest("tokens", text)'),
    fault("the last bad row of the budget is one too many", "cache/bad_rows.py", "tests/stages/test_cache_writer.py -k budget",
          "allowed - self.bad", "allowed - self.bad - 1"),
    fault("rows that are padded with other tokens are alike", "stages/pack/stage.py", "tests/stages/test_mix_pack.py -k padded_with",
          "[self.eos_token_id, self.pad_token_id, *more]", "[self.eos_token_id, *more]"),
    fault("a MiB is a million bytes", "save/config.py", "tests/stages/test_save.py -k 'test_sizes'",
          "base = 1024 if found[3] else 1000", "base = 1000"),
    fault("rejects that stand for many rows count once", "save/write_folder.py", "tests/stages/test_save.py -k text_can_be_saved",
          "rejected[reject.reason] += reject.count", "rejected[reject.reason] += 1"),
    fault("shards of a resumed save forget rejected rows", "save/saved.py", "tests/stages/test_save.py -k text_can_be_saved",
          "return self.num_rows + sum(self.rejected.values())", "return self.num_rows"),
    fault("checkpoints of a plan are kept without their number", "stages/mix/mixture.py", "tests/stages/test_mix_pack.py -k found_later",
          "if len(known) <= self._remembered.get(plan.fingerprint, 0):", "if self._remembered.get(plan.fingerprint):"),
    fault("pairs have one segment in the books", "stages/reports/ledger.py", "tests/stages/test_pair_rows.py",
          "part.segments * (2 if mixture.paired else 1)", "part.segments"),
    # loader
    fault("the vocabulary of a mixture is its smallest", "stages/mix/mixture.py", "tests/stages/test_mix_pack.py -k tokenizer",
          "return max( 1 << 32 if (info", "return min( 1 << 32 if (info"),
    fault("caps of passes are not in the identity of a mixture", "stages/mix/mixture.py", "tests/stages/test_mix_schedule.py -k capped",
          "one.unit, one.max_epochs, one.order)", "one.unit, one.order)"),
    fault("a place in a row group serves other columns", "sources/formats/parquet.py", "tests/sources/test_formats.py -k row_group",
          "p.group == group and p.columns == columns and p.position <= a", "p.group == group and p.position <= a"),
    fault("num_rows is not in the identity of lines read forward", "sources/formats/forward.py",
          "tests/loader/test_streaming.py -k first_lines", "more = [] if self.num_rows is None else [self.num_rows]", "more = []"),
    fault("a last line without its end is not counted", "sources/formats/forward.py",
          "tests/loader/test_streaming.py -k first_lines", "left -= open_line", "pass"),
    fault("007 is a number", "sources/partitions.py", "tests/sources/test_objects.py -k folders",
          "and str(int(text or \"\")) == text", "and True"),
    fault("joined rows have the identity of others", "loader/rows/planned.py", "tests/loader/test_rows.py -k ends_of_documents",
          '(("joined", self.joined), ("train_continued", self.train_continued))', '(("train_continued", self.train_continued),)'),
    fault("an added EOS is always a target", "loader/rows/gather.py", "tests/loader/test_rows.py -k added_eos",
          "flags[begin + copied - 1] if found[3, at] > 0 else 1", "1"),
    fault("columns lie at odd places", "loader/collate.py", "tests/loader/test_collate.py -k aligned",
          "-(-column // 16) * 16", "-(-column // 4) * 4"),
    fault("the last shuffle block draws rows that are not there", "loader/order.py", "tests/loader/test_loader.py -k shuffle_buffer",
          "length = reader.available(block * size, (block + 1) * size)", "length = size"),
    fault("batches after a change count from the first row", "loader/steps.py", "tests/loader/test_steps.py -k loop",
          "self.begin.row - self.start(self.begin.batch)", "self.begin.row"),
    fault("one allowed change allows the others", "loader/state.py", "tests/loader/test_changed.py -k other_data",
          "if not set(changed) <= set(allow_changed):", "if not set(changed) & set(allow_changed):"),
    fault("an error of a thread becomes the end of the data", "loader/prefetch.py", "tests/loader/test_prefetch.py -k error",
          "            self._failure = error\n", ""),
    fault("a state of a stream that was cut short is read", "loader/streams/state.py",
          "tests/loader/test_streaming_options.py -k everything_in_it",
          "    if shift:\n", "    if False:\n"),
    fault("truncated documents weigh all their tokens in a stream", "plan/pack.py",
          "tests/loader/test_streaming_options.py -k weigh_what",
          "placed = np.minimum(placed, pack.seq_length)", "pass"),
    fault("a stream reads every pass in one order", "loader/streams/feed.py", "tests/loader/test_streaming_ends.py -k every_pass_deals",
          "child(self._key, epoch)", "self._key"),
    fault("bad rows beyond those that are named are free", "stages/load/stage.py", "tests/loader/test_streaming_options.py -k beyond_those",
          "num_bad=0 if self.max_bad_rows is None else len(bad)", "num_bad=0 if self.max_bad_rows is None else len(bad[:NAMED_ROWS])"),
    fault("a stream goes on with another pad token", "stages/load/stage.py", "tests/loader/test_streaming_options.py -k another_pad",
          '"tokenizer": digest(prints, spec.eos, pad),', '"tokenizer": digest(prints, spec.eos),'),
    fault("a dataset that is not to be kept is kept", "cache/location.py", "tests/stages/test_formats.py -k without_a_cache",
          "enabled = keep is not False and (", "enabled = keep is not False or ("),
    fault("documents read again for a state are not in the books", "loader/streams/feed.py",
          "tests/loader/test_streaming_runs.py -k read_again",
          'self["drawn", "again"] += skipped', "pass"),
    # train
    fault("a step whose gradient is not finite moves the state", "train/step.py", "tests/train/test_step.py -k not_finite",
          'jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])', 'jnp.isfinite(metrics["loss"])'),
    fault("smoothing adds to the loss", "train/losses/loss.py", "tests/train/test_own_models.py -k logits",
          "(1 - label_smoothing) * nll_BS", "nll_BS"),
    fault("the first class behind the vocabulary is a label", "train/losses/loss.py", "tests/train/test_own_models.py -k logits",
          "(labels_BS >= vocab)", "(labels_BS > vocab)"),
    fault("the latest of equal checkpoints is the best", "train/checkpoint/manager.py", "tests/train/test_checkpoint_manager.py -k best",
          "(self._sign * self._seen[step], step)", "(self._sign * self._seen[step], -step)"),
    fault("files of a checkpoint are compared by size alone", "train/checkpoint/files.py",
          "tests/train/test_checkpoint_files.py -k flipped",
          "if stamp != list(expected[name]):", "if stamp[0] != expected[name][0]:"),
    fault("biases decay", "train/optim/optimizers.py", "tests/train/test_optim.py -k paper",
          'config.numbers()["weight_decay"] if is_matrix else 0.0', 'config.numbers()["weight_decay"]'),
    fault("the cool-down begins a step late", "train/optim/optimizers.py", "tests/train/test_optimizers.py -k schedules_have_their_formula",
          "borders.append(steps - cooling)", "borders.append(steps - cooling + 1)"),
    # kernels
    fault("the last tile's moved columns count twice", "kernels/loss/chunked.py", "tests/kernels/test_loss.py -k strict_tiles",
          "return self.first_column(j) + jnp.arange(self.B) >= j * self.B", "return self.first_column(j) + jnp.arange(self.B) >= 0"),
    fault("tokens of the last chunk count twice", "kernels/loss/chunked.py", "tests/kernels/test_loss.py -k head_gradient",
          "jnp.where(fresh_C, weights_C, 0.0)", "weights_C"),
    fault("a label just beyond a shard picks a logit", "kernels/loss/chunked.py", "tests/kernels/test_sharded.py",
          "(labels < logits.shape[1])", "(labels <= logits.shape[1])"),
    fault("bias gradients of devices are not summed", "kernels/loss/sharded.py", "tests/kernels/test_sharded.py",
          "(jax.lax.psum(d_bias, summed) if summed else d_bias)", "d_bias"),
    fault("tokens are cut at cheap places that are far away", "cache/ranges.py", "tests/stages/test_cache_writer.py -k cover_every",
          "at + (step + 1) // 2 <= near <= at + step + step // 2", "at < near <= at + step + step // 2"),
    fault("a system message counts for every exchange of a piece", "transforms/chat/turns.py", "tests/stages/test_split_turns.py -k hold_as_many",
          "self._again = max(0, (sum(each) - self._size) // (len(each) - 1))", "self._again = 0"),
    fault("a loss under a mesh is traced for every platform", "kernels/loss/choice.py", "tests/kernels/test_options.py -k traced_for",
          "if jax.sharding.get_abstract_mesh().abstract_device is not None:", "if False:"),
    fault("a call does not end with what opens its result", "transforms/chat/aligned.py", "tests/transforms/test_chat.py -k closes_as_text",
          "if called and endless and not known.opened.match(found[0])", "if False"),
    fault("a turn that has ended takes what opens the next one", "transforms/chat/aligned.py", "tests/transforms/test_chat.py -k opens_the_next_message",
          "stops = known.ends.isdisjoint(known.token.findall(gap, 0, end))", "stops = True"),
    fault("a model does not stop at what opens a result", "transforms/chat/render.py", "tests/train/test_export.py -k ends_a_turn",
          "if last and (opens or", "if last and ("),
    fault("lm-eval's own tasks are read for those of a folder", "train/model/harness.py", "tests/train/test_harness.py -k configured",
          "with_own=not alone", "with_own=True"),
    fault("what the model writes is looked for behind any header", "transforms/chat/aligned.py", "tests/transforms/test_chat.py -k another_header",
          "if gap.endswith(stops.opening + lead)", "if gap.endswith(lead)"),
    fault("a pair is refused for its second answer", "stages/tokenize/encoders.py", "tests/stages/test_pair_rows.py -k lengths_hold",
          "for side in reversed(documents) for reject in side.rejects", "for side in documents for reject in side.rejects"),
    fault("tokens cut from rows that become no document are counted", "stages/tokenize/token_rows.py", "tests/transforms/test_lengths.py -k budgets_cut",
          "cut = np.where(np.isin(texts.rows, rows), texts.lost, 0)", "cut = texts.lost"),
    fault("EOS of one document closes the next", "stages/tokenize/token_rows.py", "tests/stages/test_tokenize.py -k closes_no_other",
          "return closed | (longer &", "return closed | (True &"),
    fault("EOS of a document that a window cuts counts again", "loader/streams/stream.py", "tests/loader/test_streaming_runs.py -k one_stream_in_order",
          "again = int(start > placed)", "again = 0"),
    # of faults drawn at random over sources, transforms, train, config, cli and compat
    fault("an export names no pad token", "train/model/pretrained/save.py", "tests/train/test_export.py -k every_special",
          'names = "bos_token_id", "eos_token_id", "pad_token_id"', 'names = "bos_token_id", "eos_token_id"'),
    fault("a template worker that ended keeps its place", "transforms/chat/pool.py", "tests/transforms/test_chat.py -k leaves_its_place",
          "            _alive.discard(self)\n", "            pass\n"),
    fault("template workers import files of the folder that they start in", "transforms/chat/pool.py",
          "tests/transforms/test_chat.py -k imports_nothing", '[sys.executable, "-P", "-m", WORKER', '[sys.executable, "-m", WORKER'),
    fault("batch_size beside a loader is ignored", "compat/trainer.py", "tests/compat/test_training_config.py -k beside_a_loader",
          "_check_none(seq_length=seq_length, batch_size=batch_size)", "_check_none(seq_length=seq_length)"),
    fault("hybrid puts all axes but data across hosts", "train/parallel/mesh.py", "tests/train/test_step.py -k hybrid_parts",
          "within, across, devices, process_is_granule", "across, within, devices, process_is_granule"),
    fault("a conversation that begins with a call is refused", "transforms/chat/aligned.py", "tests/test_golden.py -k masks-tools",
          "if i and not first:", "if not first:"),
    fault("what frames a masked document is trained", "transforms/tokenizer/ragged.py", "tests/transforms/test_ragged.py",
          "else np.zeros(len(ids), np.uint8)", "else np.ones(len(ids), np.uint8)"),
    fault("one element more than there is room for", "sources/formats/scanners.py", "tests/sources/test_scanners.py -k elements",
          "    while count < len(starts):\n        i = skip_space(data, i, n)\n        consumed = i",
          "    while count <= len(starts):\n        i = skip_space(data, i, n)\n        consumed = i"),
    fault("import --force does not overwrite", "cli/foreign.py", "tests/interop/test_foreign.py",
          "out is None or force or not out.exists()", "out is None or not out.exists()"),
    # drawn at random over plan, loader, cache, stages, save and core
    fault("the mean document leaves out the first", "stages/reports/shares.py", "tests/stages/test_shares.py -k mean",
          "for a in range(0, dataset.num_docs, _LENGTHS)", "for a in range(1, dataset.num_docs, _LENGTHS)"),
    fault("row 0 of no rows is before the first", "plan/windows.py", "tests/plan/test_windows.py -k behind_the_last",
          'if row >= 0 else "rows count from 0"', 'if row >= 1 else "rows count from 0"'),
    fault("arrays of one shape have one fingerprint", "loader/rows/stored.py", "tests/loader/test_row_identities.py -k content",
          "hasher.update(memoryview(buffer))", "pass"),
    fault("EOS and padding change places in an identity", "loader/rows/planned.py", "tests/loader/test_row_identities.py -k saved_states",
          "[c.tokenizer_fingerprint for c in self.caches], eos, self.pad_token_id",
          "[c.tokenizer_fingerprint for c in self.caches], self.pad_token_id, eos"),
    fault("no rows are cut before the first", "save/sizes.py", "tests/stages/test_save.py -k equal_bytes",
          "np.maximum(np.minimum(spread, rows[-1] - num_shards + ranks), 0)",
          "np.minimum(spread, rows[-1] - num_shards + ranks)"),
    fault("texts of streams that others hold are lost", "loader/streams/rows.py", "tests/loader/test_streaming_options.py -k gathers",
          "other[i : i + room].decode()", "other[i:i].decode()"),
    fault("one axis takes all devices", "loader/placement.py", "tests/loader/test_placement.py -k others_leave",
          "count // fixed if size == -1", "count if size == -1"),
    fault("shards of nobody have the first config", "stages/build_record.py", "tests/stages/test_build_record.py -k known_by",
          'fits[0] if len(fits) == 1 else "unknown"', "fits[0]"),
    fault("a piece of an audit begins elsewhere", "stages/tokenize/token_rows.py", "tests/stages/test_audit.py -k named_by",
          "(text[:a] & 0xC0) != 0x80", "(text[:a] & 0xC0) == 0x80"),
    fault("rows are numbered in 32 bits", "core/schema.py", "tests/transforms/test_columns.py -k beyond_32",
          "schema.append(pa.field(ROW_NUMBER, pa.int64()))", "schema.append(pa.field(ROW_NUMBER, pa.int32()))"),
    fault("a text longer than a step of the reference never ends", "transforms/tokenizer/tokenizer.py",
          "tests/transforms/test_steps.py -k reference", "stop = max(row + 1, full)", "stop = max(row, full)"),
    fault("a day is printed in one form", "transforms/chat/sandbox.py", "tests/transforms/test_chat.py -k form_that",
          "fromisoformat(date).strftime(format)", 'fromisoformat(date).strftime("%d %b %Y")'),
    fault("a column of nulls is not text to fill in", "transforms/prompt/fill_in_the_middle.py",
          "tests/transforms/test_fill_in_the_middle.py -k without_any", "is_text(kind) or pa.types.is_null(kind),", "is_text(kind),"),
    fault("links that nobody reads are told", "sources/files.py", "tests/sources/test_files.py -k links_that",
          'if name[0] not in "._" and os.path.islink', "if os.path.islink"),
    fault("discover numbers rows from 1", "discovery/findings.py", "tests/stages/test_discover.py -k test_command",
          "for i, row in enumerate(part.sample)", "for i, row in enumerate(part.sample, 1)"),
    fault("discover --json has no notes", "discovery/findings.py", "tests/stages/test_discover.py -k test_command",
          '            "notes": list(self.notes),\n        }', "        }"),
    fault("the refusals of train_continued are exchanged", "stages/pack/config.py", "tests/stages/test_prompt_rows.py -k keep_their_masks",
          "                if self.concat\n                else f\"oversize", "                if not self.concat\n                else f\"oversize"),
    fault("one more skipped document is told as none", "train/report/page.py", "tests/train/test_report.py -k first_documents",
          "if len(found) > 5 else", "if len(found) > 6 else"),
    fault("the likeliest token is drawn out by its own odds", "train/model/generate.py", "tests/train/test_generate.py -k its_own_odds",
          "+ jnp.log(drawn.min_p)\n        logits = jnp.where(logits < least,", "+ jnp.log(drawn.min_p)\n        logits = jnp.where(logits <= least,"),
    fault("every process writes what one does", "train/callbacks/named.py", "tests/train/test_named_callbacks.py -k first_process",
          "    if process == 0:\n        makers |=", "    if True:\n        makers |="),
    fault("the doctor takes a file that is gone for whole", "doctor/machine.py", "tests/test_doctor.py -k 'faulty_machine and renaming'",
          'seen.append(f"no file ({error.strerror})")', "pass"),
    fault("the doctor does not see positions that go on", "doctor/data.py", "tests/test_doctor.py -k not_well",
          "first[starts] = starts\n", "first[starts[:1]] = starts[:1]\n"),
    fault("rows of a part keep the numbers of the whole", "sources/splits.py", "tests/sources/test_splits.py -k bad_row",
          "batch.column(at).to_numpy() - first", "batch.column(at).to_numpy()"),
    fault("a text that begins with BOS is asked with two", "train/model/harness.py", "tests/train/test_harness.py -k begins_once",
          "return (ids[:1], ids[1:]) if own else ([self.prefix], ids)", "return ([self.prefix], ids)"),
    fault("export --check names the wrong one of two that refuse", "interop/exported.py", "tests/interop/test_exported.py -k who_refuses",
          'which = "transformers" if found is None else', 'which = "transformers" if own is None else'),
    fault("an array that holds only spaces is broken", "sources/formats/scanners.py", "tests/sources/test_scanners.py -k spaces_of",
          "        i += 1\n        i = skip_space(data, i, n)\n        if opening", "        i += 1\n        if opening"),
    fault("values of rows are spread as tokens are", "train/parallel/mesh.py", "tests/train/test_step.py -k values_of_rows",
          '["sequence"] * (value.ndim > axis + 1)', '["sequence"] * (value.ndim > axis)'),
    fault("a file of the Hub's cache may be longer than it is", "sources/hub/repo.py", "tests/sources/test_hub.py -k clients_cache_are",
          "if status.st_size != file.num_bytes:", "if status.st_size < file.num_bytes:"),
    fault("texts of a loader are shuffled though nobody asked", "compat/loaders.py", "tests/compat/test_loaders.py -k like_length",
          "OrderConfig(shuffle=options.shuffle)", "OrderConfig()"),
    fault("a run that goes on forgets how long rows were", "train/trainer.py", "tests/train/test_trainer.py -k not_run_again",
          "        trainer.seen = trainer.seen.longer(Seen.recorded(saved).max_length)\n", ""),
    fault("steps that were not finite count on behind a roll-back", "train/spike_guard.py", "tests/train/test_watch.py -k guard_judges",
          "        self._bad = self._nonfinite = 0\n", "        self._bad = 0\n"),
    fault("all adapters begin alike", "train/model/lora.py", "tests/train/test_lora.py -k first_values",
          'fold(seed, "lora", name) % 2**32', 'fold(seed, "lora") % 2**32'),
    fault("lines are not on the disk when a checkpoint counts on them", "train/metrics/log.py", "tests/train/test_watch.py -k lines_are",
          "            os.fsync(self._file.fileno())\n", "            self._file.flush()\n"),
    fault("samples are not on the disk when a checkpoint counts on them", "train/callbacks/named.py", "tests/train/test_samples.py -k on_the_disk",
          '"samples": samples})\n        self._lines.sync()\n', '"samples": samples})\n'),
    fault("half a pair is a pair", "train/losses/preference.py", "tests/train/test_preference.py -k half_a_pair",
          "is_pair = (counts_BN[:, 1::2] > 0) & (counts_BN[:, 2::2] > 0)", "is_pair = (counts_BN[:, 1::2] > 0) | (counts_BN[:, 2::2] > 0)"),
    fault("answers of which other tokens are trained are looked up as one", "train/losses/cached_reference.py", "tests/train/test_preference.py -k asked_before",
          '_mixed(salt, batch["input_ids"], batch["labels"], places)', '_mixed(salt, batch["input_ids"], places)'),
    fault("held-out labels count once whatever they weigh", "train/engine.py", "tests/train/test_trainer.py -k several_held",
          "counts = [out.num_targets if out.weight_sum is None else out.weight_sum for out in outs]", "counts = [out.num_targets for out in outs]"),
    fault("micro-batches draw the same dropout", "train/step.py", "tests/train/test_step.py -k dropout_draws",
          "more, added, rest = gradients(state.params, rest, micro)", "more, added, rest = gradients(state.params, state.rest, micro)"),
    fault("a roll-back tells the documents of the next batch", "train/trainer.py", "tests/train/test_watch.py -k documents_are",
          "_documents(self.trainer.train, batch - 1)", "_documents(self.trainer.train, batch)"),
    fault("rates are of a step less than their window", "train/metrics/meter.py", "tests/train/test_meter.py -k sums_over",
          "zip(self._marks[-1], self._marks[0], strict=True)", "zip(self._marks[-1], self._marks[1], strict=True)"),
    fault("a run on other devices begins no entry of versions", "train/record.py", "tests/train/test_run_folder.py -k begins_an_entry",
          '        "devices": jax.device_count(),\n', ""),
    fault("a repetition penalty counts the last token of the prompt alone", "train/model/generate.py", "tests/train/test_generate.py -k penalty",
          "            row[np.asarray(prompt)] = True\n", "            row[np.asarray(prompt[-1:])] = True\n"),
    fault("adapters cost as many FLOPs a slot as they do a token", "train/engine.py", "tests/train/test_meter.py -k either_count",
          "float(palm + more * slots)", "float(palm + more * tokens)"),
    fault("a table of kernels that was written again is not read", "kernels/tuning/table.py", "tests/kernels/test_tuning.py -k serves",
          "    return _read_user(path, changed)\n", "    return _read_user(path, 0 * changed)\n"),
    fault("a decoder is padded on the side of its encoder", "compat/collators.py", "tests/compat/test_collators.py -k first_slot",
          'replace(rule, max_length=self.max_target_length, padding_side="right")', "replace(rule, max_length=self.max_target_length)"),
    fault("streams that leave rows out are alike", "compat/datasets.py", "tests/compat/test_document_001.py -k in_its_fingerprint",
          "shuffled, self.skip_errors)", "shuffled)"),
    fault("a stream is divided over ranks twice", "compat/loaders.py", "tests/compat/test_document_001.py -k one_rank",
          "dataclasses.replace(options, rank=0, world_size=1),", "options,"),
    fault("passes in order count as shuffled ones", "compat/data_pipeline.py", "tests/compat/test_epochs.py -k yaml",
          "counted_by(self._passes, (split, shuffle))", "counted_by(self._passes, (split, True))"),
    fault("a stop string in the prompt ends the text", "train/model/writing.py", "tests/train/test_export.py -k up_to_its_stop",
          "cuts = (text.find(end, before) for", "cuts = (text.find(end) for"),
    fault("a manifest of another state is up to date where it is as long", "interop/hub.py", "tests/interop/test_hub.py -k is_pushed",
          "repo.read(file.name) == file.content for file in files if file.content is not None", "True for file in files if file.content is not None"),
    fault("files that were not opened have no rows", "discovery/inspection.py", "tests/stages/test_discover.py -k not_left_out",
          "    if known and len(files) == len(group):\n", "    if known:\n"),
    fault("a preview asks for the cache's options", "previews/samples.py", "tests/test_preview.py -k elsewhere_keeps",
          '        "cache": None,\n', ""),
    fault("held-out batches grow as those of training do", "run.py", "tests/stages/test_hold_out.py -k however",
          "accumulation_steps=1, batch_size_schedule=(), **once", "accumulation_steps=1, **once"),
    fault("parts of one size are apart whatever their seed", "jobs.py", "tests/stages/test_hold_out.py -k both_have",
          "(apart.fraction, apart.seed) == (other.fraction, other.seed)", "apart.fraction == other.fraction"),
    fault("a save that is switched off is planned", "pipeline.py", "tests/test_plan_report.py -k unmixed",
          "self._config.save is not None and self._config.save.enabled", "self._config.save is not None"),
    fault("Ray's progress counts tasks as ranges", "executors/ray.py", "tests/executors/test_ray.py -k tiny",
          "                done[task.dataset] += len(task.part)\n", "                done[task.dataset] += 1\n"),
    # a batch of thirty that was chosen by reading the data rooms, without a look at their tests
    fault("listings that a client remembers are believed", "core/storage.py", "tests/core/test_storage.py -k another_process_has",
          "        fs.invalidate_cache()  # stores remember listings; another process may have written since\n", ""),
    fault("a reader keeps others away", "core/locks.py", "tests/sources/test_cache.py -k many_may",
          "hold(path, exclusive=False, what=what, timeout_s=60.0)", "hold(path, exclusive=True, what=what, timeout_s=60.0)"),
    fault("a port that is written out makes another server", "core/trust.py", "tests/core/test_trust.py -k however_they",
          'parts.port or (443 if parts.scheme == "https" else 80)', "parts.port or 0"),
    fault("the last stage of a ramp goes beyond its point", "plan/mix_schedule.py", "tests/plan/test_schedule.py -k stage_ends",
          "border = min(border, here + ((step - here) // stage + 1) * stage)", "border = here + ((step - here) // stage + 1) * stage"),
    fault("a row that cannot be expanded is another", "transforms/columns/functions.py", "tests/transforms/test_columns.py -k own_place",
          "failed.append(Reject(row=number * most, reason=reason, detail=detail))\n            continue\n        if len(several) > most:",
          "failed.append(Reject(row=number, reason=reason, detail=detail))\n            continue\n        if len(several) > most:"),
    fault("lines of text and of JSON have one fingerprint", "sources/formats/forward.py", "tests/loader/test_streaming.py -k read_forward_is",
          "            READER_VERSION,\n            self.kind,\n            columns,", "            READER_VERSION,\n            columns,"),
    fault("a first line that is long is looked at in part", "sources/formats/forward.py", "tests/loader/test_streaming.py -k however_long",
          "            num_bytes *= 4\n", "            num_bytes *= 4\n            break\n"),
    fault("a file that was written again is read on", "sources/files.py", "tests/sources/test_files.py -k written_again",
          "if status.st_size != here.num_bytes or str(status.st_mtime_ns) != here.identity:", "if status.st_size != here.num_bytes:"),
    fault("pieces of rows are rows where nobody counts those", "stages/load/stage.py", "tests/transforms/test_lengths.py -k 'streaming_reads and split'",
          'made = batch.num_rows - found.counts.lengths.get("pieces", 0)', "made = batch.num_rows"),
    fault("shards of an unfinished run stay", "save/folder.py", "tests/stages/test_save.py -k left_unfinished",
          "        old |= {name for name in names if name.startswith(prefix_of(claim.fingerprint))}\n", "        pass\n"),
    fault("files that nobody reads stay mapped", "cache/mapping.py", "tests/sources/test_cache.py -k come_and_go",
          "            owner._drop(key[1])\n", "            pass\n"),
    fault("the file that was read last goes first", "cache/mapping.py", "tests/sources/test_cache.py -k come_and_go",
          "held.append(entry)\n                    _open.move_to_end((self._number, i))", "held.append(entry)"),
    fault("caches that were closed take room", "cache/mapping.py", "tests/sources/test_cache.py -k make_room",
          "        _standing -= files\n", "        pass\n"),
    fault("ranges without documents are opened", "cache/reader.py", "tests/sources/test_cache.py -k between_others",
          "[part for part in self.manifest.parts if part.docs]", "list(self.manifest.parts)"),
    fault("steps of muon are smaller the longer a matrix is", "train/optim/optimizers.py", "tests/train/test_optimizers.py -k as_large_as",
          "u * (0.2 * max(u.shape[-2:]) ** 0.5)", "u * (0.2 * min(u.shape[-2:]) ** 0.5)"),
    fault("a run that goes on behind its end has no patience left", "train/callbacks/named.py", "tests/train/test_named_callbacks.py -k follows_its",
          "        if self.since >= self.config.patience:\n            self.since = 0\n", ""),
    fault("a tensor that fills a file begins another", "train/model/pretrained/save.py", "tests/train/test_hf.py -k larger_than",
          "+ tensor.num_bytes > max_shard_bytes", "+ tensor.num_bytes >= max_shard_bytes"),
    fault("held-out pairs are trained as two texts", "run.py", "tests/train/test_preference.py -k nothing_else_is",
          '        _check_pairs(run, f"eval.{name}", pipeline)\n', ""),
    fault("an export may end at more tokens than its run", "interop/exported.py", "tests/interop/test_exported.py -k another_way",
          "if not own <= ends <= own | {*as_tokens(began_with)}:", "if not own <= ends:"),
    fault("a seed that was drawn is not recorded", "run.py", "tests/train/test_loader_options.py -k no_seed",
          "    run = dataclasses.replace(\n        run, data=dataclasses.replace(run.data, seed=prepared.data.get_context().seed)\n    )\n", ""),
    fault("rows that are held out of several datasets are drawn for ever", "jobs.py", "tests/stages/test_hold_out.py -k however",
          '        made["mix"] = {"stop_strategy": "all_exhausted"}\n', '        made["mix"] = {}\n'),
    fault("any change of a run begins other data", "history.py", "tests/train/test_changed_run.py -k data_alone",
          '        if any(key.startswith(OF_DATA) for key in one["changed"])\n', '        if one["changed"]\n'),
    fault("of equal remainders the last comes first", "plan/mix_schedule.py", "tests/plan/test_schedule.py -k apportioned",
          "key=lambda i: (-remainders[i], i)", "key=lambda i: (-remainders[i], -i)"),
    fault("tokens of a manifest that cannot be read are leftovers", "cache/admin.py", "tests/stages/test_cache_admin.py -k nobody_can_read",
          "    if any(one.manifest is None for one in staying):\n        everything = False\n", ""),
    fault("verify knows no unfinished folder", "save/verify.py", "tests/stages/test_save.py -k left_unfinished",
          "    if saved.MANIFEST in below or RUN in below:\n", "    if saved.MANIFEST in below:\n"),
    fault("patterns enter hidden folders", "sources/files.py", "tests/sources/test_files.py -k dot_unless",
          '            folders[:] = [name for name in folders if not name.startswith(".")]\n', ""),
    fault("tokens that ranges share are counted twice", "cache/admin.py", "tests/stages/test_cache_admin.py -k counted_once",
          "sum({part.file: part.num_bytes for part in m.parts}.values())", "sum(part.num_bytes for part in m.parts)"),
    # a third batch, over all rooms
    fault("copies of a loader of several passes end after one", "loader/epochs.py", "tests/compat/test_epochs.py -k one_iteration",
          "        other._together = self._together\n", ""),
    fault("shards have one identity whatever columns are read", "transforms/columns/base.py", "tests/transforms/test_fingerprints.py",
          'return digest("transformed", self.transform.fingerprint, own, self._columns)', 'return digest("transformed", self.transform.fingerprint, own)'),
    fault("what lies below says nothing of caching", "transforms/columns/base.py", "tests/transforms/test_fingerprints.py",
          "cacheable=self.transform.cacheable and below.cacheable,", "cacheable=self.transform.cacheable,"),
    fault("an object is known by all that its store tells", "sources/files.py", "tests/sources/test_files.py -k known_by",
          'for key in ("mtime", "LastModified",', 'for key in ("LastModified",'),
    fault("masked rows of other shares are one", "compat/masking.py", "tests/compat/test_recipes.py",
          "            self.probability,\n            words,", "            words,"),
    fault("own functions for text beside images are one", "compat/vision.py", "tests/compat/test_recipes.py",
          "recipe_of(self.text) or describe_collator(self.text)", "recipe_of(self.text)"),
    fault("runs of other losses are one", "train/checkpoint/resume.py", "tests/train/test_run_identity.py",
          '"optimizer", "loss", "steps", "seed"', '"optimizer", "steps", "seed"'),
    fault("runs of other seeds are one", "train/checkpoint/resume.py", "tests/train/test_run_identity.py",
          '"steps", "seed", "accumulate_steps")', '"steps", "accumulate_steps")'),
    fault("the doctor compares no masks", "doctor/data.py", "tests/test_doctor.py -k other_masks",
          "if LOSS_MASK in kept.schema.names and not kept", "if False and not kept"),
    fault("a process without rows is well", "doctor/processes.py", "tests/test_doctor.py -k without_rows",
          "if len(own) < len(rows) // PROCESSES:", "if len(own) < 0:"),
    fault("files of the past are well", "doctor/machine.py", "tests/test_doctor.py -k faulty",
          "if abs(ahead) > SKEW_S:", "if ahead > SKEW_S:"),
    fault("a loader that ends early is well", "doctor/data.py", "tests/test_doctor.py -k ends_where",
          '                raise Failed(f"stopped after batch {stop}: it ends before batch {n}")\n', "                break\n"),
    fault("a batch divides where its micro-batches do not", "loader/placement.py", "tests/loader/test_placement.py -k eight",
          "if self._micro_size % ways:", "if batch_size % ways:"),
    fault("saved folders remember what came after them", "pipeline.py", "tests/stages/test_build_record.py -k stages_before",
          "            chain = Chain(self._chain(stage), self._context)\n            for folder", "            chain = Chain(self._chain(last.stage), self._context)\n            for folder"),
    fault("rows far behind a pass are fewer than none", "loader/rows/ranks.py", "tests/loader/test_row_identities.py -k behind_the_last",
          "return max(0, self._own(there) - start)", "return self._own(there) - start"),
    fault("text beside lists of any insides is JSON", "sources/external/dicts.py", "tests/sources/test_memory.py -k holds_both",
          "    if is_json(merged) and not all(", "    if False and not all("),
    fault("lists beside objects are JSON", "sources/external/dicts.py", "tests/sources/test_memory.py -k holds_both",
          "t.is_nested(kind) and lists[0] == lists[1]:", "t.is_nested(kind):"),
    fault("thinned curves lose their ends", "train/report/numbers.py", "tests/train/test_report.py -k its_ends",
          "kept = {0, len(steps) - 1}", "kept = set[int]()"),
    fault("line ends count as they are written", "cli/explain.py", "tests/test_explain.py -k as_many_characters",
          "max(0, left - len(words))", "max(0, left - len(part))"),
    fault("what is shown whole ends in dots", "cli/explain.py", "tests/test_explain.py -k as_many_characters",
          "cut = 0 < characters < sum(", "cut = 0 < characters <= sum("),
    fault("what is missing of held-out data is not refused", "cli/prepare.py", "tests/cli/test_parts.py -k several_machines",
          "    for each in (pipeline, *others.values()):\n        for dataset,", "    for each in (pipeline,):\n        for dataset,"),
    fault("images of other columns are one", "compat/classify.py", "tests/compat/test_classify.py -k copy_of_its_own",
          "source.fingerprint, self._columns)", "source.fingerprint)"),
    fault("files of another common type have one identity", "sources/base.py", "tests/sources/test_files.py -k become_others",
          "            self.files[shard].digest,\n            schema,\n", "            self.files[shard].digest,\n"),
    fault("a listing of before is believed", "sources/files.py", "tests/core/test_storage.py -k another_process_has",
          "    fs.invalidate_cache()\n", ""),
    fault("room of tokens that did not come stays taken", "cache/remote.py", "tests/stages/test_remote_cache.py -k did_not_come",
          "                    self._staging.grow(-sum(absent.size for _, absent in coming) * BLOCK)\n", ""),
    fault("validation is read as often as training", "compat/data_module.py", "tests/compat/test_epochs.py -k however_training",
          "drop_last=False, num_epochs=1, group", "drop_last=False, group"),
    fault("iterators of Grain share a loader", "interop/grain.py", "tests/interop/test_grain.py -k their_own_ways",
          "self._loader = loader.copy()\n        self._batches: Any", "self._loader = loader\n        self._batches: Any"),
    fault("the last image alone in its batch is left out", "compat/classify.py", "tests/compat/test_classify.py -k to_the_last",
          "for start in range(0, rows, ROWS_AT_A_TIME):", "for start in range(0, max(rows - 1, 1), ROWS_AT_A_TIME):"),
    fault("packed JSON has the day in it", "save/shard_writer.py", "tests/stages/test_save.py -k same_bytes_whenever",
          "compresslevel=6, mtime=0", "compresslevel=6"),
    fault("the time of going back counts into tokens per second", "train/trainer.py", "tests/train/test_watch.py -k going_back_is",
          '        self.trainer.emit("rollback", step, {"to": good})\n        self.meter.restart()\n',
          '        self.trainer.emit("rollback", step, {"to": good})\n'),
    # a fourth batch
    fault("each block is a request", "cache/remote.py", "tests/stages/test_remote_cache.py -k one_request",
          "np.diff(blocks) > 1)", "np.diff(blocks) >= 1)"),
    fault("what was staged last goes last, whatever was read", "cache/remote.py", "tests/stages/test_remote_cache.py -k for_longest",
          "            self._parts.move_to_end(part.base)\n", ""),
    fault("patterns of a bucket match its folders", "sources/files.py", "tests/sources/test_files.py -k url_globs",
          'for key, info in found.items() if info.get("type") != "directory"}', 'for key, info in found.items()}'),
    fault("batches that Grain asks for lie on devices", "interop/grain.py", "tests/interop/test_grain.py -k behind_load",
          "partition_spec=None, prefetch_to_device=False", "partition_spec=None"),
    fault("the first evaluation of a run is its last", "cli/runs.py", "tests/cli/test_terminal.py -k runs_are",
          'last.get("eval") or evals', 'evals or last.get("eval", {})'),
    fault("runs are looked for in runs", "cli/runs.py", "tests/cli/test_terminal.py -k runs_are", "            names.clear()\n", ""),
    fault("no limit of open files is too low", "doctor/machine.py", "tests/test_doctor.py -k no_limit",
          "if not endless and files < OPEN_FILES:", "if files < OPEN_FILES:"),
    fault("an answer of the user's is a prompt", "discovery/proposal.py", "tests/stages/test_discover.py -k without_their",
          "for message in talk[:-1] if isinstance(talk, list)", "for message in talk if isinstance(talk, list)"),
    fault("the oldest samples stand first", "train/report/page.py", "tests/train/test_report.py -k newest",
          "for line in reversed(read_metrics(path))", "for line in read_metrics(path)"),
    fault("turns that EOS ends are joined", "transforms/chat/turns.py", "tests/transforms/test_trained_turns.py -k eos_ends",
          "if one.end == OPEN and whole.text.startswith(said):", "if whole.text.startswith(said):"),
    fault("a file that is not there is on the Hub", "compat/data_pipeline.py", "tests/compat/test_document_000.py -k no_path",
          "            or bool(Path(self.name).suffix)\n", ""),
    fault("tokens with other ends are of one tokenizer", "compat/small_transformer.py", "tests/transforms/test_fingerprints.py -k whose",
          "str(version), known, list(ends)", "str(version), known"),
    # a fifth batch, drawn by chance from all lines
    fault("of a block only tokens count as memory", "loader/rows/stored.py", "tests/loader/test_stored.py -k block_holds",
          "*self.values.values(), *beside)", "*beside)"),
    fault("no text has the last byte that UTF-8 begins with", "transforms/tokenizer/lost.py", "tests/transforms/test_lost.py -k every_byte",
          "            0x100000,\n", ""),
    fault("who encoded is not told", "cache/writer.py", "tests/stages/test_cache_writer.py -k measured_is",
          '        facts["encoder"] = ", ".join(sorted(self._encoders))\n', ""),
    fault("a closed pool takes work", "loader/prefetch.py", "tests/test_refusals.py -k pool",
          '                raise RuntimeError("the pool is closed")\n', "                pass\n"),
    fault("a run that goes on forgets its best checkpoints", "train/callbacks/named.py", "tests/train/test_callback_states.py -k best",
          '        self.ranking = [(int(step), float(value)) for step, value in state["ranking"]]\n', "        pass\n"),
    fault("a run that goes on begins another in its service", "train/callbacks/trackers.py", "tests/train/test_callback_states.py -k wandb",
          '        self.id = state["id"]\n', "        pass\n"),
    fault("a stream begins behind a document of one token", "loader/rows/targets.py", "tests/loader/test_rows.py -k one_token",
          "np.argmax(window.length > 0)", "np.argmax(window.length > 1)"),
    fault("a mixture has masks where all of its datasets have", "stages/mix/mixture.py", "tests/stages/test_mix_pack.py -k one_of_its",
          "return any(LOSS_MASK in", "return all(LOSS_MASK in"),
    fault("a stop that all agreed on ends the others", "train/signals.py", "tests/train/test_processes.py -k agreed_on",
          "    in_all = True\n", ""),
    fault("the process that holds the store of keys leaves at once", "train/parallel/distributed.py", "tests/train/test_processes.py -k ends_all",
          "        time.sleep(2 * GRACE + 1)\n", "        pass\n"),
    fault("an error in the command line is kept from the others", "cli/app.py", "tests/train/test_processes.py -k ends_all",
          "        _end_others(code, error)\n        return code\n", "        return code\n"),
    fault("verdicts on gigatoken are looked up late", "stages/tokenize/encoders.py", "tests/stages/test_cache_writer.py -k backend_that_errs",
          "        tokenizer.remember_in(memo)  # before anything asks which backend encodes\n", ""),
    fault("the environment wins over what is configured", "train/parallel/distributed.py", "tests/train/test_processes.py -k not_whole",
          "if value is None and variable in variables:", "if variable in variables:"),
    fault("rows that come forward are begun again for every batch", "loader/rows/items.py", "tests/loader/test_row_identities.py -k for_once",
          "if self._items is None or row < self._first:", "if self._items is None or row <= self._first:"),
    fault("samples begin with nothing", "train/model/writing.py", "tests/cli/test_commands.py -k train_and_its",
          "self._tokenizer.reference_encode(prompt) or self._begin", "self._begin"),
    fault("a special string is counted where none was looked for", "cache/manifest.py", "tests/sources/test_cache.py -k every_count",
          "    special: int = 0", "    special: int = 1"),
    fault("a paragraph separator is shown as it is", "core/visible.py", "tests/core/test_errors.py -k hides",
          '"Cs", "Zl", "Zp")', '"Cs", "Zl")'),
    fault("types of extensions are not plain ones", "core/schema.py", "tests/sources/test_schemas.py -k plain_one",
          "        return plain_type(kind.storage_type, leaf)\n", "        pass\n"),
    fault("a cut document changes places in its window", "plan/window.py", "tests/plan/test_windows.py -k is_cut_stays",
          "here.size - last]", "here.size + last]"),
    fault("prompts of other Jinja templates have one identity", "transforms/prompt/formats.py", "tests/stages/test_encoding_keys.py -k jinja",
          "list(self.columns), self._spec]", "list(self.columns)]"),
    fault("a manifest that says what its files do not is not repaired", "cache/verify.py", "tests/stages/test_false_fields.py",
          "yield Problem(at=at, what=what, file=str(folder.manifest(m.key)))", "yield Problem(at=at, what=what)"),
    # A third draw by chance
    fault("a source that declares nothing has no unit", "core/protocols.py", "tests/core/test_protocols.py -k declares_nothing",
          'return inner.unit if isinstance(inner, Source) else "records"', "return inner.unit"),
    fault("what is not a URL ends in a ValueError", "core/trust.py", "tests/core/test_trust.py -k no_url", 'return "", "", 0', 'return "", ""'),
    fault("what is not a URL is a server that is trusted", "core/trust.py", "tests/core/test_trust.py -k no_url",
          "return bool(origin[1]) and origin in map(_origin, trusted)", "return origin in map(_origin, trusted)"),
    fault("an example of a command is left out", "cli/app.py", "tests/cli/test_terminal.py -k examples",
          '("preview sft.yaml", "preview sft.yaml -n 20 --html samples.html")', '("preview sft.yaml",)'),
    fault("what is known of tokens is counted three times in VMEM", "kernels/loss/tpu/blocks.py", "tests/kernels/test_tuning.py -k counts_as",
          "+ 2 * PER_TOKEN * blocks.own_tokens", "+ 3 * PER_TOKEN * blocks.own_tokens"),
    fault("steps of a schedule may be the same", "plan/mix_schedule.py", "tests/plan/test_schedule.py -k made_by_nobody",
          "return all(a < b for a, b in itertools.pairwise(steps))", "return all(a <= b for a, b in itertools.pairwise(steps))"),
    fault("a clock may be ten seconds off", "doctor/machine.py", "tests/test_doctor.py -k how_much", "SKEW_S = 5.0", "SKEW_S = 10.0"),
    fault("an exported folder keeps what its modes were found by", "train/model/pretrained/save.py", "tests/train/test_export.py -k says_what_ends",
          "    probe.unlink()\n", ""),
    fault("shards of several rows for one have the cuts of one", "transforms/columns/base.py", "tests/transforms/test_columns.py -k says_so_of_every",
          "cuts=tuple(cut * k for cut in shard.cuts),", ""),
    fault("an option of the command line goes nowhere", "cli/masks.py", "tests/test_floors.py -k every_parameter",
          "special_tokens=special_token,", ""),
    fault("a page does not say why the data is not known", "cli/plan.py", "tests/train/test_plan_step.py -k what_is_not_known",
          '_show([compiled, data or f"not known: {missing}"], as_json, html)', "_show([compiled, data], as_json, html)"),
    fault("a block of keys begins behind them", "kernels/attention/triton.py", "tests/train/test_attention.py -k outside",
          "block = pl.BlockSpec((None, rows, None, width), lambda i, b, k: (b, i, k, 0))",
          "block = pl.BlockSpec((None, rows, None, width), lambda i, b, k: (b, i, k, 1))"),
    fault("adapters that are not there are called damaged", "train/model/pretrained/peft.py", "tests/train/test_finetune.py -k adapters_go",
          'raise MissingFileError(at=str(file), problem="no such file", fix=fix)', "pass"),
    fault("one undecided part of several is none", "cli/discover.py", "tests/stages/test_discover.py -k any_part",
          "if any(isinstance(made, ConfigError) for made in proposals)", "if all(isinstance(made, ConfigError) for made in proposals)"),
    fault("what plans is said to read", "loader/loader.py", "tests/loader/test_loader.py -k which_stage",
          'stage = "plan" if self.rows.by_number else "read"', 'stage = "read"'),
    fault("young tokens of what is cleared stay in a bucket", "cache/admin.py", "tests/stages/test_cache_admin.py -k in_a_bucket",
          " or name.removeprefix(\"tokens/\") in tokens", ""),
    fault("an option takes files that are not there", "cli/masks.py", "tests/test_golden.py -k exports-commands",
          "exists=True", "exists=False"),
    fault("a published folder without a tokenizer has one", "cli/writing.py", "tests/train/test_export.py -k without_a_tokenizer",
          'str(folder) if (folder / "tokenizer.json").is_file() else None', "str(folder)"),
    fault("rows of a tokenizer of another length are the same", "compat/registry.py", "tests/compat/test_recipes.py -k encoding",
          "length = self._tokenizer.config.max_length", "pass"),
    fault("a mesh of one's own is not that of the checks", "run.py", "tests/train/test_mesh_runs.py -k own_goes",
          "refuse, run, run.model if model is None else model, mesh=mesh, **trainer", "refuse, run, run.model if model is None else model, **trainer"),
    fault("a plan of nothing is told", "history.py", "tests/train/test_changed_run.py -k cannot_be_known",
          "if not reports:", "if False:"),
    fault("a model goes into no empty folder", "train/model/pretrained/save.py", "tests/train/test_export.py -k new_folder",
          "not target.exists() or (target.is_dir() and not any(target.iterdir()))", "not target.exists()"),
    fault("handlers of signals stay behind a run", "train/signals.py", "tests/train/test_trainer.py -k handlers",
          """def __exit__(self, *_: object) -> None:
        self._give_back()""", """def __exit__(self, *_: object) -> None:
        pass"""),
    fault("a loss that is unknown is neither carried nor left", "interop/foreign/rules.py", "tests/test_golden.py -k foreign",
          'key.leave(f"{value!r} is not a loss of train.preference")', "pass"),
    fault("a row of axolotl's keys says its opposite", "interop/foreign/tools.py", "tests/test_golden.py -k foreign",
          """"shuffle_merged_datasets": always(""", """"shuffle_merged_datasets": off("""),
    fault("a key of theirs becomes another of ours", "interop/foreign/tools.py", "tests/test_golden.py -k foreign",
          """to("train.optimizer.beta2")""", """to("train.optimizer.beta1")"""),
    fault("a foreign key is called what it is not", "core/foreign_names.py", "tests/core/test_foreign_names.py",
          """"model.remat": "gradient_checkpointing",
    "model.dtype": "bf16 fp16 torch_dtype",""", """"model.remat": "fp16 torch_dtype",
    "model.dtype": "bf16 gradient_checkpointing","""),
    fault("decayed weights where theirs has none", "interop/foreign/finish.py", "tests/test_golden.py -k foreign",
          """{"weight_decay": 0.0, "beta2": 0.999}""", """{"beta2": 0.999}"""),
    fault("text that theirs parts into rows is cut off", "interop/foreign/finish.py", "tests/interop/test_foreign.py -k too_long",
          """given.get("stage") == "pt" and""", """given.get("stage") == "sft" and"""),
    fault("a preference without options makes no pairs", "interop/foreign/finish.py", "tests/interop/test_foreign.py -k spell_out",
          """if "preference" in made.config["train"]:""", """if made.part("train.preference"):"""),
    fault("adapters of half the scale", "interop/foreign/finish.py", "tests/interop/test_foreign.py -k leave_out",
          """2 * options["rank"]""", """options["rank"]"""),
    fault("prompts that were to be trained are not", "interop/foreign/datasets.py", "tests/interop/test_foreign.py -k prompts_are_trained",
          'key.made.dataset["train_on"] = "all"', "pass"),
    # Put in by hand, with meaning
    fault("a reference has dropout", "train/losses/preference.py", "tests/train/test_preference.py -k no_dropout",
          "deterministic=True, use_running_average=True, raise_if_not_found=False", "use_running_average=True, raise_if_not_found=False"),
    fault("a micro-batch without targets makes the gradient NaN", "train/step.py", "tests/train/test_own_losses.py -k adds_no_gradient",
          "if loss.of_means and micro:", "if False:"),
    fault("the baseline of KTO is trained", "train/losses/unpaired.py", "tests/train/test_unpaired.py -k no_part_of",
          "kl = jax.lax.stop_gradient(jnp.maximum(kl / jnp.maximum(count, 1), 0.0))", "kl = jnp.maximum(kl / jnp.maximum(count, 1), 0.0)"),
    fault("answers in the template of a second dataset never stop", "stages/tokenize/documents.py", "tests/stages/test_prompt_rows.py -k any_dataset_ends",
          "stops = dict.fromkeys(number for turns in found.values() for number in turns.stop_token_ids)", "stops = dict.fromkeys(next(iter(found.values())).stop_token_ids)"),
    fault("a row that is cut has a label behind its end", "doctor/model.py", "tests/test_doctor.py -k is_cut_has",
          "    best[LABELS][:, -1] = IGNORE\n", ""),
    fault("a run goes back to a checkpoint that is gone", "train/spike_guard.py", "tests/train/test_watch.py -k is_gone",
          "if state is None or (self.good and self.good not in saved):", "if state is None:"),
    fault("a damaged MDS shard is read at the second try", "sources/formats/mds.py", "tests/sources/test_shards.py -k index_is_checked",
          "            made = {name: HASHES[name]() for name in told if name in HASHES}", "            self._hashed.add(file.path)\n            made = {name: HASHES[name]() for name in told if name in HASHES}"),
    fault("of nearly alike columns one is taken", "transforms/columns/kinds.py", "tests/transforms/test_kinds.py -k nearly_as",
          "if score >= LIKE and best - score < NEAR", "if score >= LIKE and best == score"),
    fault("a stream's budget names its first bad row", "loader/streams/rows.py", "tests/loader/test_streaming_options.py -k one_too_many",
          "which = most - self._bad[i] + loaded.num_bad", "which = 0"),
    fault("a run that failed is told as finished", "train/callbacks/trackers.py", "tests/train/test_callback_states.py -k service_is_told",
          "def on_exception(self, event: TrainEvent) -> None:\n        self._close(failed=True)", "def on_exception(self, event: TrainEvent) -> None:\n        self._close(failed=False)"),
    fault("behind a BOS the last token of an overlap is trained twice", "transforms/tokenizer/lengths.py", "tests/transforms/test_lengths.py -k token_in_front",
          "known = head + lengths.policy.overlap if number else 0", "known = lengths.policy.overlap if number else 0"),
    fault("tokens of an old .idx are those of a new one", "sources/external/token_files.py", "tests/sources/test_tokens.py -k fingerprints_follow",
          "own = [*super()._options(), digest(self._layout), None if index is None else index.digest]", "own = [*super()._options(), digest(self._layout)]"),
    fault("members of a row in another order give other bytes", "sources/formats/webdataset.py", "tests/sources/test_shards.py -k any_order",
          "        wanted.sort()  # as they lie in the file\n", ""),
    fault("a host that ends in localhost is this machine", "core/trust.py", "tests/core/test_trust.py -k looks_like",
          'return host == "localhost" or', 'return host.endswith("localhost") or'),
    fault("tokens go before the manifests that name them", "cache/admin.py", "tests/stages/test_cache_admin.py -k manifests_go",
          "for some in (first, [name for name in names if name not in set(first)]):", "for some in ([name for name in names if name not in set(first)], first):"),
    fault("a thread keeps a batch that was taken", "loader/prefetch.py", "tests/loader/test_prefetch.py -k that_was_taken",
          "        del outcome\n", "        pass\n"),
    fault("loss weights stand where there is no label", "loader/collate.py", "tests/loader/test_collate.py -k where_labels_do",
          "    shifted[labels == IGNORE] = 0\n", ""),
    fault("a short read gives bytes behind its range", "sources/files.py", "tests/sources/test_files.py -k short_read",
          "stop - start - len(data), start", "stop - start, start"),
    fault("a part is charged what the whole may have", "cache/writer.py", "tests/stages/test_cache_writer.py -k not_charged",
          "budget = ErrorBudget(self.dataset, self.encoder.label, self.on_error, None)", "budget = ErrorBudget(self.dataset, self.encoder.label, self.on_error, self.max_bad_rows)"),
    fault("schedule_free has no clip_norm", "train/optim/optimizers.py", "tests/train/test_optimizers.py -k sees_clipped",
          "chain = optax.chain(*clip, _averaging(numbers, schedule, whole))", "chain = optax.chain(_averaging(numbers, schedule, whole))"),
    fault("padding is masked and predicted", "compat/masking.py", "tests/compat/test_collators.py -k not_attended",
          "& ~self.special[ids] & attended", "& ~self.special[ids]"),
    fault("a card has the FLOP/s of another", "train/metrics/devices.py", "tests/train/test_meter.py -k longest_name",
          "return _DEVICES[max(fitting, key=len)] if fitting else None", "return _DEVICES[fitting[0]] if fitting else None"),
    fault("a manifest names a quarantine file elsewhere", "cache/manifest.py", "tests/stages/test_records.py -k names_no_file",
          "for file in (found.quarantine, *(part.file for part in found.parts)):", "for file in (*(part.file for part in found.parts),):"),
    fault("a Megatron index begins again behind its first chunk", "sources/external/megatron.py", "tests/sources/test_tokens.py -k first_chunk",
          "                at = int(ends[-1])\n", ""),
    fault("no tools are a list to a template", "transforms/chat/conversations.py", "tests/transforms/test_prompts.py -k no_tools_are",
          '"tools": tools or None', '"tools": tools'),
    fault("an own collator alone does not say what rows are", "compat/data_module.py", "tests/compat/test_document_004.py -k own_collator",
          "sure=task_spec is not None or collate_fn is not None", "sure=task_spec is not None and collate_fn is not None"),
    fault("an error shows a long text whole", "train/model/writing.py", "tests/train/test_export.py -k cannot_be_asked",
          'short = said if len(said) <= SHOWN else f"{said[:SHOWN]} ..."', "short = said"),
    fault("verify asks for a saved folder with the options of the cache", "cli/verify.py", "tests/stages/test_verify.py -k saved_folder_in_a_bucket",
          "None if data.save is None else data.save.output_dir", "None"),
    fault("a report leaves out the config of its run", "train/report/page.py", "tests/train/test_report.py -k config_of_the_run",
          'return Section(heading, text=path.read_text(encoding="utf-8", errors="replace"))', "return Section(heading)"),
    fault("a state cuts a document anywhere", "plan/spec.py", "tests/plan/test_windows.py -k states_of_other_plans",
          "*drawn, *deficits, *(cut or ())", "*drawn, *deficits"),
    fault("a null answer shares text with the other one", "transforms/prompt/formats.py", "tests/stages/test_pair_rows.py -k null_shares_no_text",
          "if not isinstance(one, str) or not isinstance(other, str):", "if False:"),
    # a fresh draw, put in by hand
    fault("a host that failed once is never asked again", "core/reachable.py", "tests/transforms/test_tokenizer.py -k asked_again",
          "if why is None or time.monotonic() - asked < FAILED_S:", "if why is None or why:"),
    fault("a document outside its .bin is named by the next one's row", "sources/external/megatron.py", "tests/sources/test_tokens.py -k bad_indexes",
          'first + int(wrong[0]), side="right")) - 1', 'first + int(wrong[0]), side="right"))'),
    fault("the Hub's partial splits are not found", "sources/hub/layout.py", "tests/sources/test_hub.py -k converted_copy",
          'parts[1].removeprefix("partial-")', "parts[1]"),
    fault("a verdict outlives the tokenizers that it was found with", "transforms/tokenizer/proof.py", "tests/transforms/test_tokenizer.py -k versions_that",
          "fast.version(), _reference_version())}", "fast.version())}"),
    fault("the last reason is told, not the first", "previews/masks.py", "tests/test_masks.py -k first_form",
          'why = next((one for one in refused if one.reason != "refused_by_template"), refused[0])', "why = refused[-1]"),
    fault("an added EOS is told as a token of the file", "loader/explain.py", "tests/test_explain.py -k packed_batches",
          '"token_stop": min(stop, stored),', '"token_stop": stop,'),
    fault("a teacher that is sure of one token is not listened to", "train/losses/distill.py", "tests/train/test_distill.py -k by_hand",
          "(log_probs != 0).any(-1)", "(log_probs != 0).all(-1)"),
    fault("a tenth of a run begins a step early", "train/report/pictures.py", "tests/test_plan_report.py -k no_step_longer",
          'each["step"] > until[-1]["step"] - tenth', 'each["step"] >= until[-1]["step"] - tenth'),
    fault("blocks whose values are NaN are timed", "kernels/tuning/measure.py", "tests/kernels/test_tuning.py -k no_number",
          "if not error <= ROUNDING[dtype]:", "if error > ROUNDING[dtype]:"),
    fault("EOS pads where there is a pad token", "compat/foreign.py", "tests/compat/test_printed_names.py -k of_ones_own_encodes",
          '"pad_token_id", "eos_token_id") or 0', '"eos_token_id", "pad_token_id") or 0'),
    fault("parity lets one token more stand", "previews/parity.py", "tests/test_parity.py -k does_not_write",
          "if pair.own.end != OPEN and own[:-1] == list(found):", "if own[:-1] == list(found):"),
    fault("a preview does not say what is cut", "previews/preview.py", "tests/test_preview.py -k segments_and_cuts",
          """                lines += [f"      cut: {cut}" for cut in segment.cuts]\n""", ""),
    fault("thoughts that no tag opens are words", "transforms/chat/sentinels.py", "tests/transforms/test_trained_turns.py -k only_closes",
          'if "<think>" in pieces[max(n - 1, 0) : n] or pieces[n + 1 : n + 2] == ["</think>"]:', 'if "<think>" in pieces[max(n - 1, 0) : n]:'),
    fault("what ends turns in plain text ends no text", "transforms/chat/stops.py", "tests/transforms/test_chat.py -k asks_for_the_eos",
          "return stop is not None and said.endswith(stop.strip())", "return False"),
    fault("a run whose empty dataset has no cap has no end", "plan/spec.py", "tests/plan/test_spec.py -k no_run_going",
          "for cap, count in zip(self.caps, num_docs, strict=True) if count]", "for cap, count in zip(self.caps, num_docs, strict=True)]"),
    fault("windows that end early count truncated documents whole", "plan/feed.py", "tests/plan/test_spec.py -k what_is_placed",
          'spec.pack.seq_length * _UNIT if spec.pack.oversize == "truncate" else 1 << 62', "1 << 62"),
    fault("a preview writes into a dataset's own cache", "previews/samples.py", "tests/test_preview.py -k keeps_elsewhere",
          "dataclasses.replace(dataset, cache_path=None, cache_enabled=True)", "dataclasses.replace(dataset, cache_enabled=True)"),
    fault("rows of rejected answers have the numbers of others", "previews/parity.py", "tests/test_parity.py -k not_closed",
          "numbers = [number for number in numbers for _ in (0, 1)]", "numbers = [*numbers, *numbers]"),
    fault("rows left over are told of a run that ends before", "stages/reports/plan_report.py", "tests/test_plan_report.py -k end_unevenly",
          "if self.left_over and self.steps == self.available:", "if self.left_over:"),
    fault("parts of a run weigh alike, however long", "stages/reports/plan_report.py", "tests/test_plan_report.py -k add_up",
          "requested=sum(one.requested * count for count, one in found) / max(1, rows)", "requested=sum(one.requested for _, one in found) / len(found)"),
    fault("a file that two parts share counts twice", "stages/reports/plan_report.py", "tests/test_plan_report.py -k preparing_is_said",
          "{part.file: part.num_bytes for part in cache.manifest.parts}.values()", "part.num_bytes for part in cache.manifest.parts"),
    fault("max_length that left rows out is told to have no effect", "stages/reports/plan_report.py", "tests/test_plan_report.py -k no_document_reaches",
          "if tokenized is None or d.tokens_cut or TOO_LONG in d.rejected:", "if tokenized is None or d.tokens_cut:"),
    fault("continued pieces without masks are told to have no targets", "stages/reports/plan_report.py", "tests/test_plan_report.py -k longer_than_the_run",
          "if pieces > 0 and LOSS_MASK in cache.schema.names:", "if pieces > 0:"),
    fault("one part more is looked into", "discovery/discover.py", "tests/stages/test_discover.py -k found_is_told",
          "if len(parts) < PARTS:", "if len(parts) <= PARTS:"),
    fault("speakers of other files are not seen", "discovery/inspection.py", "tests/stages/test_discover.py -k found_is_told",
          "for one in group[:HEADS]:", "for one in group[:1]:"),
    fault("an Alpaca row without an answer can be read", "discovery/proposal.py", "tests/stages/test_discover.py -k found_is_told",
          '{"prompt_completion": "completion", "alpaca": "output"}.get(kind.name)', '{"prompt_completion": "completion"}.get(kind.name)'),
    fault("files of one kind are parts where some have tools", "discovery/inspection.py", "tests/stages/test_discover.py -k found_is_told",
          'tuple(c.column for c in kind.choices if c.slot != "tools")', "tuple(c.column for c in kind.choices)"),
    fault("a header of white space is a column", "sources/formats/csv.py", "tests/sources/test_bad_input.py -k csv_header",
          "if not name.strip() or count > 1:", "if not name or count > 1:"),
    fault("one dataset interleaved alone never ends", "stages/source/interleave.py", "tests/stages/test_interleave.py -k restarts_without",
          'None if stop == "restart" and len(self.sources) > 1 else 1', 'None if stop == "restart" else 1'),
    fault("best.json lists steps behind a resume", "train/callbacks/named.py", "tests/train/test_named_callbacks.py -k goes_back",
          "            (self._folder / BEST).unlink(missing_ok=True)\n", "            pass\n"),
    fault("two keys of rows ask the lesser one", "interop/foreign/finish.py", "tests/interop/test_foreign.py -k leave_out",
          'key = "micro_batch_size" if "micro_batch_size" in given else key', 'key = key if key in given else "micro_batch_size"'),
    fault("a token stands in an error of the Hub", "interop/hub.py", "tests/interop/test_hub.py -k answer_repeats",
          "            said = said.replace(self.token, \"***\")\n", "            pass\n"),
    fault("a penalty strengthens unlikely tokens", "train/model/generate.py", "tests/train/test_generate.py -k penalty_weighs",
          "jnp.where(logits > 0, logits / penalty, logits * penalty)", "logits / penalty"),
    fault("the page of a plan leaves out truncated tokens", "stages/reports/plan_page.py", "tests/test_plan_report.py -k on_its_page",
          "one.tokens_cut + one.tokens_truncated + one.tokens_dropped", "one.tokens_cut + one.tokens_dropped"),
    fault("shards found finished are told of a folder up to date", "cli/show.py", "tests/cli/test_terminal.py -k every_number",
          "if folder.resumed_shards and not folder.up_to_date:", "if folder.resumed_shards:"),
    fault("a best checkpoint that is gone is not told so", "train/report/page.py", "tests/train/test_report.py -k every_cell",
          'gone = "" if (folder / one["checkpoint"]).is_dir() else " (gone)"', 'gone = ""'),
    fault("a finished run's mixture is told as one that goes on", "train/report/page.py", "tests/train/test_report.py -k every_cell",
          'if plan["steps"] < last:', 'if plan["steps"] <= last:'),
    fault("more tokens flow to draws than were stored", "train/report/numbers.py", "tests/train/test_report.py -k 'flow or draws_is'",
          'link(f"{name}: stored", f"{name}: drawn", min(stored, drawn))', 'link(f"{name}: stored", f"{name}: drawn", drawn)'),
    fault("the second picture begins with another color", "train/report/pictures.py", "tests/train/test_metrics.py -k nothing_of_a_picture",
          "    axes.set_prop_cycle(None)  # starts with the first color again\n", ""),
    fault("the served page is cut where it is not ASCII", "train/report/serve.py", "tests/train/test_report.py -k this_machine_alone",
          'self.send_header("Content-Length", str(len(body)))', 'self.send_header("Content-Length", str(len(text)))'),
    fault("EOS of a pass that was not finished are told as added", "stages/reports/ledger.py", "tests/test_plan_report.py -k where_it_is_known",
          "return part.passes * lacking if part.unreached == 0 else None", "return part.passes * lacking"),
    fault("two sources of a balance are told as one", "cli/show.py", "tests/cli/test_terminal.py -k every_number",
          "        if len(entry.into) > 1:", "        if len(entry.into) > 2:"),
    fault("passes count rows where they are packed", "stages/reports/plan_report.py", "tests/test_plan_report.py -k endless_mixture_needs",
          "rows * pack.seq_length / max(tokens, 1)", "rows / max(tokens, 1)"),
    fault("jsonl files are read by no format", "discovery/discover.py", "tests/stages/test_discover.py -k cannot_be_read",
          "READERS.get(type, type)", "type"),
    fault("a folder with files that were left out is read whole", "discovery/discover.py", "tests/stages/test_discover.py -k cannot_be_read",
          "alone = len(groups) == 1 and not notes", "alone = len(groups) == 1"),
    fault("of several splits none is proposed by default", "discovery/findings.py", "tests/stages/test_discover.py -k tells_the_same",
          'if split is None and "train" in self.splits:', 'if split is None and "training" in self.splits:'),
    fault("messages that have a value say nothing", "previews/samples.py", "tests/test_preview.py -k word_for_word",
          'content = message.get("content", message.get("value"))', 'content = message.get("content")'),
    fault("content beside a call is empty where it should be left out", "previews/masks.py", "tests/test_masks.py -k every_form",
          'made["content"] = "" if empty else None', 'made["content"] = None if empty else ""'),
    fault("an EOS of transformers' own counts twice", "previews/parity.py", "tests/test_parity.py -k completions",
          "if end != OPEN and found[-1:] != [eos]:", "if end != OPEN:"),
    fault("a document of a skipped batch is named again and again", "train/report/page.py", "tests/train/test_report.py -k skipped_batch",
          '", ".join(dict.fromkeys(found[:5]))', '", ".join(found[:5])'),
    fault("the median of a number is its mean", "train/report/numbers.py", "tests/train/test_report.py -k every_cell",
          "float(np.median(found))", "float(np.mean(found))"),
    fault("a mixture is prepared before its datasets are", "stages/reports/plan_report.py", "tests/test_plan_report.py -k preparing_is_said",
          "planned.mixture.parts.values() if planned else [source]", "[source]"),
    fault("datasets that are told count among the more", "stages/reports/shares.py", "tests/stages/test_shares.py -k first_eight",
          "and {len(apart) - 8} more", "and {len(apart)} more"),
    fault("a schedule without batch sizes is warned of", "stages/reports/shares.py", "tests/test_plan_report.py -k other_shares_of_tokens",
          "if schedule is not None and not schedule.batch_sizes:", "if schedule is not None and schedule.batch_sizes:"),
    fault("a dataset that is not asked for is told as long", "stages/reports/shares.py", "tests/stages/test_shares.py -k to_blame",
          "if mean > LONG * placed and list(asked.values())[i]", "if mean > LONG * placed"),
    fault("weights that change at the end are told as late", "stages/reports/shares.py", "tests/stages/test_shares.py -k hold_late",
          "if counted.begin.batch < step < steps:\n            row", "if counted.begin.batch < step <= steps:\n            row"),
    fault("a run to the end of the data is told to end inside a block", "stages/reports/plan_report.py", "tests/test_plan_report.py -k inside_shuffled",
          "if rows and self.reached.stop % rows and self.steps != self.available:", "if rows and self.reached.stop % rows:"),
    fault("a step without a number is drawn", "train/report/pictures.py", "tests/train/test_metrics.py -k of_a_picture",
          "for record in records if record.get(key) is not None]", "for record in records if key in record]"),
    fault("a list of exactly as many names seems longer", "core/errors.py", "tests/core/test_errors.py -k a_few",
          '*(["..."] if len(names) > most else [])', '*(["..."] if len(names) >= most else [])'),
    fault("a path that is there is corrected", "core/errors.py", "tests/core/test_errors.py -k perhaps_meant",
          "None if missing in names else did_you_mean(missing, names[:2000])", "did_you_mean(missing, names[:2000])"),
    fault("access denied has the advice of other errors", "core/errors.py", "tests/core/test_errors.py -k denied",
          "if isinstance(error, PermissionError) and", "if isinstance(error, FileExistsError) and"),
    fault("a Hub part that is only listed forgets where its rows are counted", "discovery/discover.py", "tests/stages/test_discover.py -k hub_dataset_holds",
          'known = {"num_rows": candidate.card_rows, "rows_from": "card"}', 'known = {"num_rows": candidate.card_rows}'),
    fault("the revision behind an @ is not looked at", "discovery/discover.py", "tests/stages/test_discover.py -k hub_dataset_holds",
          "hub.listing(asked.revision or dataset.revision)", "hub.listing(dataset.revision)"),
    fault("files of a part whose rows a card counts are all opened", "discovery/inspection.py", "tests/stages/test_discover.py -k hub_dataset_holds",
          "    if found.card_rows is not None:\n        most = 1\n", ""),
    fault("a row that is longer than the head hides a file", "discovery/inspection.py", "tests/stages/test_discover.py -k looked_at_is_told",
          "if num_bytes == LONG_HEAD_BYTES or file.num_bytes <= num_bytes:", "if True:"),
    fault("texts of one file each are counted by what was opened", "discovery/inspection.py", "tests/stages/test_discover.py -k looked_at_is_told",
          '{"num_rows": len(files), "rows_from": "files"}', '{"num_rows": len(group), "rows_from": "files"}'),
    fault("one file that was seen whole speaks for all", "discovery/inspection.py", "tests/stages/test_discover.py -k looked_at_is_told",
          "if any(one.looked_at != one.total for one in group):", "if all(one.looked_at != one.total for one in group):"),
    fault("a share of rows read forward counts those before a state anew", "loader/rows/ranks.py", "tests/loader/test_streaming.py -k ranks_share",
          "replace(state, row=self.first_below(state.row))", "state"),
    fault("a tokenizer goes without the file of older versions", "train/model/pretrained/files.py", "tests/train/test_export.py -k goes_along",
          '    CHAT_TEMPLATE,\n    "tokenizer.model",\n', "    CHAT_TEMPLATE,\n"),
    fault("an option that came later is compared with older checkpoints", "train/checkpoint/resume.py", "tests/train/test_run_identity.py -k came_later",
          '"sigmoid", "margin": None, ', '"sigmoid", '),
    fault("one task of Slurm looks for others", "train/parallel/distributed.py", "tests/train/test_processes.py -k nothing_speaks",
          'int(variables.get("SLURM_NTASKS", "1")) > 1', 'int(variables.get("SLURM_NTASKS", "1")) >= 1'),
    fault("gradients of a part of the products are of all", "train/plan/aot.py", "tests/train/test_plan_step.py -k traffic",
          '/ (mesh["fsdp"] * mesh["tensor"])', '/ mesh["fsdp"]'),
    fault("all differences are shown before `and more`", "cli/parity.py", "tests/test_parity.py -k first_token",
          "one.differences[:MOST_SHOWN]:", "one.differences:"),
    fault("max_length of an image's text has no effect", "compat/registry.py", "tests/compat/test_registry.py",
          "text=_text(tokenizer, max_length)", "text=_text(tokenizer)"),
    fault("max_length of hidden tokens has no effect", "compat/registry.py", "tests/compat/test_registry.py",
          "(tokenizer, True, max_length=max_length, **options)", "(tokenizer, True, **options)"),
    fault("the end of a share counts its own rows alone", "loader/rows/ranks.py", "tests/loader/test_streaming.py -k ranks_share",
          "finish(self.first_below(row), left_out)", "finish(row, left_out)"),
    fault("a line break is within a word", "compat/masking.py", "tests/compat/test_collators.py -k whole_words",
          "token.startswith((*BEGINS, *BREAKS))", "token.startswith(BEGINS)"),
    fault("an export that differs ends with 0", "cli/export.py", "tests/interop/test_exported.py -k end_with_1",
          "    if found:\n        raise typer.Exit(1)\n", ""),
    fault("the classifier is linear", "train/model/classifier.py", "tests/compat/test_classify.py -k logits_are",
          "nnx.relu(layer(x))", "layer(x)"),
    fault("what helps with new tokens is told twice", "train/model/pretrained/added.py", "tests/train/test_added_tokens.py -k cannot_be",
          'problem = f"{error.at}: {error.problem}"', "problem = str(error)"),
    fault("what helps with new tokens is not told", "train/model/pretrained/added.py", "tests/train/test_added_tokens.py -k cannot_be",
          "have=error.have, fix=error.fix", 'have=error.have, fix=""'),
    fault("a batch is explained only where its devices are", "history.py", "tests/test_explain.py -k the_command",
          "mesh=None, partition_spec=None", "partition_spec=None"),
    fault("a document less is as good", "doctor/data.py", "tests/test_doctor.py -k other_masks",
          "range(max(cache.num_docs, other.num_docs))", "range(min(cache.num_docs, other.num_docs))"),
    fault("devices add gradients of the head in its dtype", "kernels/loss/chunked.py", "tests/kernels/test_loss.py -k shares_of_a_sum",
          "jnp.dtype(grad_dtype or lm_head.dtype)", "jnp.dtype(lm_head.dtype)"),
    fault("blocks of two need no shuffle", "plan/order.py", "tests/test_pipeline.py -k configs_that_are_refused",
          "self.block_rows <= 1 or self.shuffle", "self.block_rows <= 2 or self.shuffle"),
    fault("a page shows the columns of the first row alone", "discovery/page.py", "tests/stages/test_discover.py -k looked_at_is_told",
          "names = list(dict.fromkeys(name for row in part.sample for name in row))", "names = [*part.sample[0]][:1]"),
    fault("a proposal is sorted by name", "discovery/proposal.py", "tests/stages/test_discover.py -k every_kind",
          "sort_keys=False", "sort_keys=True"),
    fault("a flag that is no flag is proposed", "discovery/proposal.py", "tests/stages/test_discover.py -k every_kind",
          "wrong_messages(talk) or reader.wrong_flags(talk)", "wrong_messages(talk)"),
    fault("a rejected answer as JSON is not named", "discovery/proposal.py", "tests/stages/test_discover.py -k every_kind",
          '            rejected_column=column.get("rejected"),\n', ""),
    fault("what a schedule asks for is the mean over steps", "plan/mix_schedule.py", "tests/stages/test_shares.py tests/test_plan_report.py -k 'asked_for_between or word_for_word'",
          "min(rows, self.first_row(step + 1)) - self.first_row(step) for", "1 for"),
    fault("a dataset that is read once is said to be read so", "stages/reports/plan_report.py", "tests/test_plan_report.py -k word_for_word",
          "(d.epochs > 1, f", "(d.epochs >= 1, f"),
    fault("datasets of a joined plan stand as in its first part", "stages/reports/plan_report.py", "tests/test_plan_report.py -k add_up",
          "for report in reversed(reports) for dataset", "for report in reports for dataset"),
    fault("the tokens that stand before are named by their end", "previews/samples.py", "tests/test_preview.py -k word_for_word",
          "tokens 0:{start} of the document stand before", "tokens 0:{stop} of the document stand before"),
    fault("a template of a tokenizer is shown another day", "previews/masks.py", "tests/test_masks.py -k word_for_word",
          'train_on="assistant",\n            date=asked.template_date,\n        )\n        if', 'train_on="assistant",\n            date=DATE,\n        )\n        if'),
    fault("every text is said to have an EOS of its own", "previews/parity.py", "tests/test_parity.py -k word_for_word",
          'f"EOS follows {ended} texts', 'f"EOS follows {len(pairs)} texts'),
    # a draw by seed over core, sources, cache, stages, transforms, save
    fault("rows that are read up to a number are said to have no end", "sources/external/own.py", "tests/sources/test_own.py -k said_to_have",
          "(pulled.rows - len(taken)) // MANY_ROWS and rows is None:", "(pulled.rows - len(taken)) // MANY_ROWS:"),
    fault("document_tokens of records is taken without effect", "sources/formats/arrayrecord.py", "tests/sources/test_arrayrecord.py -k bad_records",
          'for name in ("separator_id", "document_tokens"):', 'for name in ("separator_id",):'),
    fault("a null list counts a token in what is written for Megatron", "sources/external/megatron.py", "tests/sources/test_tokens.py -k from_a_source",
          "lists.value_lengths().fill_null(0)", "lists.value_lengths().fill_null(1)"),
    fault("a part from the end is looked for in the first rows", "sources/splits.py", "tests/sources/test_hub.py -k parts",
          'counted = start == "0%" or start.isdigit()', "counted = True"),
    fault("a dataset's own cache has no options", "cache/location.py", "tests/stages/test_remote_cache.py -k bucket_of_its_own",
          "cache_folder(dataset.cache_path, context.config.cache, key)", "cache_folder(dataset.cache_path, None, key)"),
    fault("row numbers are a column of the data", "stages/source/columns.py", "tests/stages/test_formats.py -k keeps_the_others",
          "have = data_columns(source.schema)", "have = source.schema.names"),
    fault("a text that is cut gets no EOS", "stages/tokenize/token_rows.py", "tests/stages/test_cache_writer.py -k truncation_are_counted",
          "continued = (made.truncated > 0) & (made.mask is not None)", "continued = made.truncated > 0"),
    fault("tokens that a fast tokenizer lacks are no difference", "transforms/tokenizer/proof.py", "tests/transforms/test_tokenizer.py -k hostile_text",
          "pairs = itertools.zip_longest(found, expected)", "pairs = zip(found, expected)"),
    fault("a thought of some template belongs to the header", "transforms/chat/stops.py", "tests/transforms/test_chat.py -k prompt_opens",
          "(think|thinking|thought|reasoning)", "(think|thinking|thought)"),
    fault("a boundary in the middle of the room is none", "transforms/tokenizer/lengths.py", "tests/transforms/test_lengths.py -k half_of_the_room",
          "if at < len(edges) and edges[at] <= most:", "if at < len(edges) and edges[at] < most:"),
    fault("a first boundary in the middle of the room is none", "transforms/tokenizer/lengths.py", "tests/transforms/test_lengths.py -k half_of_the_room",
          "if at >= 0 and edges[at] >= least:", "if at >= 0 and edges[at] > least:"),
    fault("what has the form of a sentinel is taken for one", "transforms/chat/sentinels.py", "tests/transforms/test_chat.py -k stands_for_nothing",
          "if not text.startswith(gaps[0]) or not words.value.keys() >= set(found):", "if not text.startswith(gaps[0]):"),
    fault("suffix and middle of a model stand in each other's place", "transforms/prompt/fill_in_the_middle.py", "tests/transforms/test_fill_in_the_middle.py -k models_in_use",
          '("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),', '("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),'),
    fault("a file without a suffix has no name in the error", "transforms/tokenizer/files.py", "tests/transforms/test_tokenizer.py -k is_no_tokenizer",
          "path.suffix or 'nameless'", "path.suffix"),
    fault("shards of a cache have the bytes of their last part", "cache/reader.py", "tests/sources/test_cache.py -k stateless",
          "num_bytes[part.shard] += part.num_bytes", "num_bytes[part.shard] = part.num_bytes"),
    fault("windows of a schedule bear its shortest documents", "stages/mix/mixture.py", "tests/stages/test_mix_schedule.py -k longest_documents",
          "window_docs=min(window_docs(datasets, one, length)", "window_docs=max(window_docs(datasets, one, length)"),
    fault("an answer of a pair that is encoded alone has no prompt", "stages/tokenize/engine.py", "tests/stages/test_pair_rows.py -k as_the_engine",
          "self.render_rows(self._with_shared([row]))", "self.render_rows([row])"),
    fault("Chat writes over row numbers", "transforms/columns/conversation.py", "tests/transforms/test_conversation.py",
          "into and into != ROW_NUMBER,", "into,"),
    fault("a few bytes are a Parquet file where they begin and end as one", "sources/formats/parquet.py", "tests/sources/test_bad_input.py -k truncated_parquet",
          "if tail != MAGIC or file.num_bytes < 12:", "if tail != MAGIC:"),
    # entries of tables: names, aliases, encodings, words, texts
    fault("s3a is a protocol without an extra", "core/storage.py", "tests/sources/test_remote.py -k without_its_package",
          '"s3": "s3", "s3a": "s3"}', '"s3": "s3"}'),
    fault("a URL of gcs needs no bucket", "core/storage.py", "tests/sources/test_remote.py -k without_a_bucket",
          "(s3a?|gc?s|https?):///", "(s3a?|gs|https?):///"),
    fault("pictures in MDS are not read", "sources/formats/mds.py", "tests/sources/test_shards.py -k every_encoding",
          '"jpeg": BYTES, "png": BYTES', '"png": BYTES'),
    fault("small integers in MDS are not read", "sources/formats/mds.py", "tests/sources/test_shards.py -k every_encoding",
          'SCALARS = ("int8", "int16",', 'SCALARS = ("int16",'),
    fault("Megatron's signed bytes are unsigned", "sources/external/megatron.py", "tests/sources/test_tokens.py -k of_every_type",
          '2: "<i1"', '2: "<u1"'),
    fault("a member that torch pickled is bytes", "sources/formats/webdataset.py", "tests/sources/test_shards.py -k pickled",
          '"pyd", "pth", "pt")', '"pyd", "pth")'),
    fault("a compressed tar has no format", "sources/refs.py", "tests/sources/test_files.py -k format_of",
          '"txt", "mds", "webdataset")', '"txt", "mds")'),
    fault("eval names no split", "sources/hub/layout.py", "tests/sources/test_hub.py -k name_a_split",
          '"testing", "eval", "evaluation"', '"testing", "evaluation"'),
    fault("state.json is data", "sources/hub/layout.py", "tests/sources/test_hub.py -k are_no_data",
          '"dataset_dict.json", "state.json")', '"dataset_dict.json")'),
    fault("Arrow files of the Hub are downloaded whole", "sources/hub/repo.py", "tests/sources/test_hub.py -k than_needed",
          '("parquet", "arrow")', '("parquet",)'),
    fault("a winner is no chosen answer", "transforms/columns/kinds.py", "tests/transforms/test_kinds.py -k docs_list",
          '"preferred", "winner",', '"preferred",'),
    fault("a prompt's language is a prompt", "transforms/columns/kinds.py", "tests/transforms/test_kinds.py -k something_else",
          '    "language",\n    "name",', '    "name",'),
    fault("double is no type", "transforms/columns/types.py", "tests/transforms/test_columns.py -k types_as_text",
          '"float64", "double")', '"float64")'),
    fault("a server that answers 522 is not asked again", "core/remote.py", "tests/core/test_retrying.py -k what_passes",
          "521, 522, 523", "521, 523"),
    fault("errors of httpx2 do not pass", "core/remote.py", "tests/core/test_retrying.py -k what_passes",
          '    "httpx2",\n', ""),
    fault("a word of gcsfs is a secret", "core/remote.py", "tests/core/test_retrying.py -k is_no_secret",
          '"google_default", "browser")', '"google_default")'),
    fault("a password is no credential of its own", "core/trust.py", "tests/core/test_trust.py -k only_a_config_names",
          '"username", "password",', '"username",'),
    fault("a login by the browser is a credential of its own", "core/trust.py", "tests/core/test_trust.py -k only_a_config_names",
          '"browser", False, None)', "False, None)"),
    fault("anon: false is a credential of its own", "core/trust.py", "tests/core/test_trust.py -k only_a_config_names",
          '"browser", False, None)', '"browser", None)'),
    fault("a list in place of a mapping is told in words of pydantic", "core/config.py", "tests/core/test_config.py -k name_the_key_path",
          '    "dict_type": "a mapping",\n', ""),
    fault("a missing .tiktoken is looked up on the Hub", "transforms/tokenizer/files.py", "tests/transforms/test_tokenizer.py -k looks_like",
          '".model", ".tiktoken", ".txt")', '".model", ".txt")'),
    fault("a Hub that is not reached is told like one that refuses", "transforms/tokenizer/files.py", "tests/transforms/test_tokenizer.py -k answers_of",
          "        LocalEntryNotFoundError: (\n", "        ZeroDivisionError: (\n"),
    fault("a config that did not come is none", "transforms/tokenizer/files.py", "tests/transforms/test_tokenizer.py -k does_not_send",
          "if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):", "if isinstance(error, EntryNotFoundError):"),
    fault("a repository is told to be set where it is misspelt", "save/config.py", "tests/interop/test_hub.py -k no_sense",
          """'Write "user/name".'""", """'Set it.'"""),
    fault("a bucket that is too small asks for max_length", "loader/collate.py", "tests/loader/test_collate.py -k that_are_documents",
          '("length_buckets", "add a bucket of")', '("length_buckets", "raise max_length to")'),
    fault("a developer is a speaker that nobody knows", "transforms/chat/worker.py", "tests/transforms/test_chat.py -k no_template_knows",
          '{"system", "developer", "user",', '{"system", "user",'),
    fault("chatgpt says what nobody said", "transforms/prompt/config.py", "tests/transforms/test_prompts.py -k of_speakers",
          '    "chatgpt": "assistant",\n', ""),
    fault("developers cannot be trained", "transforms/prompt/config.py", "tests/transforms/test_prompts.py -k can_be_trained",
          '"system", "tool", "developer")', '"system", "tool")'),
    fault("a mean reward of desirable answers is not told", "cli/show.py", "tests/cli/test_terminal.py -k evaluations_are_told",
          '("reward_desirable", "reward of', '("reward_wanted", "reward of'),
    fault("a learning rate is told with one digit", "cli/show.py", "tests/cli/test_terminal.py -k one_line",
          '"lr {:.2e}"', '"lr {:.0e}"'),
    fault("a client's own name is a secret", "core/ranged.py", "tests/core/test_trust.py -k 'plain_http or redirect'",
          '"accept-encoding", "user-agent"}', '"accept-encoding"}'),
    fault("jaxtyping is of no extra", "core/errors.py", "tests/core/test_errors.py -k of_the_extra",
          '"orbax", "jaxtyping",', '"orbax",'),
    fault("nobody knows num_proc", "core/foreign_names.py", "tests/core/test_foreign_names.py -k no_import_takes",
          "preprocessing_num_workers num_proc", "preprocessing_num_workers"),
    fault("a column of verdicts beside a prompt has no effect", "stages/source/config.py", "tests/transforms/test_prompts.py -k stands_alone",
          '    "desirable_field",\n    "train_on",', '    "train_on",'),
    fault("a template's variables have no effect on text", "stages/source/config.py", "tests/transforms/test_prompts.py -k refused_on_text",
          '    "chat_template_kwargs",\n    "train_empty', '    "train_empty'),
    fault("openai is no format of messages", "transforms/prompt/config.py", "tests/transforms/test_prompts.py -k one_format",
          'CHAT_FORMATS = ("chat", "openai",', 'CHAT_FORMATS = ("chat",'),
    fault("a cache on a system that is read-only is told as unsafe", "core/locks.py", "tests/stages/test_cache_admin.py -k still_read",
          "errno.EPERM, errno.EROFS)", "errno.EPERM)"),
    fault("hexadecimal numbers of YAML are texts", "core/safe_yaml.py", "tests/core/test_config.py -k of_yaml_are_numbers",
          "|0b[01_]+|0x[0-9a-fA-F_]+)", "|0b[01_]+)"),
    fault("a declared token takes no spaces with it", "transforms/tokenizer/files.py", "tests/transforms/test_tokenizer.py -k flags_of",
          '("single_word", "lstrip", "rstrip", "normalized")', '("single_word", "rstrip", "normalized")'),
    fault("<eos> ends no document", "transforms/tokenizer/tokenizer.py", "tests/transforms/test_tokenizer.py -k taken_for_eos",
          '"<|end_of_text|>", "<eos>")', '"<|end_of_text|>")'),
    fault("a sentence in Chinese quotation marks goes on", "transforms/tokenizer/lengths.py", "tests/transforms/test_lengths.py -k every_script",
          "[”’）」』]*", "[”’）』]*"),
    fault("a clause ends at no Arabic semicolon", "transforms/tokenizer/lengths.py", "tests/transforms/test_lengths.py -k every_script",
          "[,;:–—،؛]", "[,;:–—،]"),
    fault("rows that are too long are told to be corrected", "transforms/refused.py", "tests/transforms/test_lengths.py -k makes_a_bad_row",
          '    TOO_LONG: "Raise max_length, or choose another length.policy",\n', ""),
    fault("rows beyond the limits are told to be corrected", "transforms/refused.py", "tests/stages/test_prompt_rows.py -k takes_too_long_is",
          'BEYOND_LIMITS: "Leave such rows out, cut', 'EMPTY: "Leave such rows out, cut'),
]
# fmt: on


class Failures:
    """A plugin of pytest that writes the names of tests that fail into a file, one a line."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


class Room:
    """A copy of the code, in which one trial after another takes place."""

    def __init__(self, folder: Path) -> None:
        self._copy, self._kernels = folder / "src", folder / "kernels"
        self._folder, self._failed = folder, folder / "failed"
        self._stamps = itertools.count(1)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, self._copy / "easypipe", ignore=ignored)

    def begin(self, fault: Fault | None, tests: Sequence[str]) -> None:
        """Puts a fault in, or none, and begins its tests in a fork, up to the first that fails."""
        kernels = self._kernels
        if fault is not None:
            file = self._copy / "easypipe" / fault.file
            whole = file.read_text(encoding="utf-8")
            file.write_text(fault.put_into(whole), encoding="utf-8")
            # bytecode and kernels are known by the time of their file, which no other fault has
            stamp = next(self._stamps)
            os.utime(file, (stamp, stamp))
            if "@jit" in whole:
                # Numba looks only at a kernel's own file: kernels that call one of this file,
                # compiled before or after, would be wrong.
                kernels = self._folder / "faulty"
                shutil.rmtree(kernels, ignore_errors=True)
        self._failed.unlink(missing_ok=True)
        self.fault, self.started = fault, time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            self._run(kernels, tests)

    def _run(self, kernels: Path, tests: Sequence[str]) -> None:
        """Runs what `python -m pytest` would, with the copy in front of all else."""
        code = 70
        try:
            os.setsid()
            said = os.open(self._folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for target, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
                os.dup2(file, target)
            sys.path.insert(0, copy := str(self._copy))
            os.environ |= {"PYTHONPATH": copy, "NUMBA_CACHE_DIR": str(kernels)}
            os.environ["EASYPIPE_PROGRAMS"] = str(self._folder.parent / "programs")
            from numba.core import config

            config.reload_config()
            options = ["-q", *QUICK, f"--basetemp={self._folder / 'tests'}"]
            options += [] if self.fault is None else ["-x"]
            code = int(pytest.main([*options, *tests], [Failures(self._failed)]))
            sys.stdout.flush()
        finally:
            os._exit(code)

    def ended(self) -> tuple[str, list[str]] | None:
        """Takes the fault out when its tests have ended.

        Returns:
            None while they run; then "dies", "lives", or what went wrong with the trial itself; and
            the tests that failed.
        """
        if late := self.fault is not None and time.monotonic() - self.started > LONGEST_S:
            os.killpg(self.pid, signal.SIGKILL)
        elif os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        with contextlib.suppress(ProcessLookupError):  # what its tests started
            os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.fault is not None:
            shutil.copy2(PACKAGE / self.fault.file, self._copy / "easypipe" / self.fault.file)
        if late or code in (0, 1):
            failed = self._failed.read_text("utf-8").splitlines() if self._failed.is_file() else []
            return "dies" if late or code else "lives", failed
        said = (self._folder / "said").read_text("utf-8", "replace").strip().splitlines()
        return f"NOT TRIED (pytest's exit code {code}): {said[-1:]}", []


def run(faults: Sequence[Fault], rooms: list[Room]) -> Iterator[tuple[Fault, str, list[str]]]:
    """Yields each fault as it is decided, with what `Room.ended` returns."""
    waiting, busy = list(reversed(faults)), list[Room]()
    while waiting or busy:
        while waiting and rooms:
            busy.append(rooms.pop())
            busy[-1].begin(waiting[-1], waiting.pop().tests)
        time.sleep(0.02)
        for room in tuple(busy):
            if room.fault is not None and (ended := room.ended()) is not None:
                busy.remove(room)
                rooms.append(room)
                yield room.fault, *ended


def alone(room: Room, tests: Sequence[str]) -> tuple[str, list[str]]:
    """Runs tests on the code as it is; returns what `Room.ended` does."""
    room.begin(None, tests)
    while (ended := room.ended()) is None:
        time.sleep(0.1)
    return ended


def load() -> None:
    """What most tests need, and what every trial inherits."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.chdir(ROOT)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    settings, phases = hypothesis.settings, set(hypothesis.Phase) - {hypothesis.Phase.shrink}
    settings.register_profile("faults", settings.get_profile("easypipe"), phases=phases)
    gc.freeze()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    chosen = [
        one
        for one in FAULTS
        if not given.words or any(word in f"{one.file} {one.name}" for word in given.words)
    ]
    stale = [one.name for one in chosen if not one.fits]
    if stale:
        print(f"these faults no longer fit the code: {stale}")
        return 2
    load()
    with tempfile.TemporaryDirectory(prefix="easypipe-faults-") as scratch:
        # what a fault fails with is not tried first next time
        set_hypothesis_home_dir(scratch)
        rooms = [Room(Path(scratch, str(n))) for n in range(given.jobs)]
        began, died, killers = time.monotonic(), set[str](), dict[str, list[str]]()
        for one, found, failed in run(chosen, rooms):
            died |= {one.name} if found == "dies" else set()
            killers |= {test: [*killers.get(test, ()), one.name] for test in failed}
            seconds = time.monotonic() - began
            print(f"{seconds:6.0f} s  {found:5}  {one.file}: {one.name}  {failed}", flush=True)
        found, failed = alone(rooms[0], sorted(killers)) if killers else ("lives", [])
    for test in failed:
        print(f"{test} fails without a fault, and so decides nothing: {killers[test]}")
        died -= {*killers[test]}
    whole = "" if found in ("lives", "dies") else f": {found}"
    print(f"without a fault {len(killers) - len(failed)} of those {len(killers)} tests pass{whole}")
    minutes = (time.monotonic() - began) / 60
    print(f"{len(died)} of {len(chosen)} faults die, in {minutes:.0f} minutes")
    return int(len(chosen) - len(died) > MAY_LIVE or found != "lives")


if __name__ == "__main__":
    sys.exit(main())
