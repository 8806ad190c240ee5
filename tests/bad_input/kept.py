"""Cases: tokenizers, and what easypipe and others wrote, damaged or of another shape."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_input.case import Action, Case, lines
from easypipe import LoaderState, Pipeline, load_saved
from easypipe.core.config import digest, from_dict, load_yaml
from easypipe.stages.config import PipelineConfig
from pipelines import tokenizer

NOISE = bytes((i * 197 + i // 7 * 31) % 251 for i in range(4000))
SHAPES: dict[str, bytes] = {
    "that is empty": b"",
    "that is noise": NOISE,
    "that is cut": b'{"version": 1, "x": [',
    "that is a list": b"[]",
    "that is null": b"null",
    "that is an empty object": b"{}",
    "of deep nesting": b"[" * 100_000,
    "of a huge number": b'{"version": ' + b"9" * 5000 + b"}",
}
FEW = {
    name: SHAPES[name] for name in ("that is noise", "that is an empty object", "of deep nesting")
}


# Tokenizers


def tokens(what: str, says: str | None, **files: bytes | str) -> Case:
    """The tokenizer's folder with other files; `__` stands for a dot, an empty one is taken out."""
    named = {f"tokenizer/{name.replace('__', '.')}": content for name, content in files.items()}
    return Case(what, says, files=named)


def definition(change: Callable[[dict[str, Any]], object]) -> str:
    values = json.loads((Path(tokenizer()) / "tokenizer.json").read_text())
    change(values)
    return json.dumps(values)


FILE = "tokenizer/tokenizer.json"
TOKENIZERS = [
    *(
        tokens(f"tokenizer.json {name}", FILE, tokenizer__json=data)
        for name, data in SHAPES.items()
    ),
    tokens(
        "tokenizer.json with a BOM",
        FILE,
        tokenizer__json="\ufeff" + definition(lambda values: None),
    ),
    tokens(
        "tokenizer.json in UTF-16",
        FILE,
        tokenizer__json=definition(lambda values: None).encode("utf-16"),
    ),
    tokens(
        "tokenizer.json without a model",
        FILE,
        tokenizer__json=definition(lambda values: values.pop("model")),
    ),
    tokens(
        "tokenizer.json of an unknown model",
        FILE,
        tokenizer__json=definition(lambda values: values["model"].update(type="GPT")),
    ),
    tokens(
        "tokenizer.json without a vocabulary",
        FILE,
        tokenizer__json=definition(lambda values: values["model"].update(vocab={})),
    ),
    tokens(
        "tokenizer.json with invalid merges",
        FILE,
        tokenizer__json=definition(lambda values: values["model"].update(merges=[["x", "yy"]])),
    ),
    tokens(
        "tokenizer.json whose vocabulary is a list",
        FILE,
        tokenizer__json=definition(lambda values: values["model"].update(vocab=[1, 2])),
    ),
    tokens(
        "tokenizer.json with ids below zero",
        FILE,
        tokenizer__json=definition(lambda values: values["model"]["vocab"].update(a=-1)),
    ),
    tokens(
        "tokenizer.json with huge ids",
        FILE,
        tokenizer__json=definition(lambda values: values["model"]["vocab"].update(a=2**40)),
    ),
    tokens(
        "tokenizer.json with two tokens of one id",
        None,
        tokenizer__json=definition(lambda values: values["model"]["vocab"].update(zzz=5)),
    ),
    tokens(
        "tokenizer.json with an unknown pre-tokenizer",
        FILE,
        tokenizer__json=definition(lambda values: values.update(pre_tokenizer={"type": "Cut"})),
    ),
    tokens(
        "tokenizer.json whose pattern does not compile",
        FILE,
        tokenizer__json=definition(
            lambda values: values.update(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": "(("},
                    "behavior": "Isolated",
                    "invert": False,
                }
            )
        ),
    ),
    tokens(
        "tokenizer.json whose post-processor names no token",
        FILE,
        tokenizer__json=definition(
            lambda values: values.update(
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {},
                }
            )
        ),
    ),
    tokens(
        "tokenizer.json that truncates",
        None,
        tokenizer__json=definition(
            lambda values: values.update(
                truncation={
                    "max_length": 2,
                    "strategy": "LongestFirst",
                    "stride": 0,
                    "direction": "Right",
                }
            )
        ),
    ),
    *(
        tokens(f"tokenizer_config.json {name}", says, tokenizer_config__json=data)
        for name, data in SHAPES.items()
        for says in [
            None if name == "that is an empty object" else "tokenizer/tokenizer_config.json"
        ]
    ),
    tokens(
        "an EOS that is not a token",
        "pack.eos_token_id: the tokenizer 'tokenizer'",
        tokenizer_config__json='{"eos_token": "<nowhere>"}',
    ),
    tokens("an EOS that is a number", FILE, tokenizer_config__json='{"eos_token": 5}'),
    tokens("an EOS that is a list", FILE, tokenizer_config__json='{"eos_token": ["a"]}'),
    Case(
        "a tokenizer's folder without files",
        "tokenizer: the folder holds no tokenizer.json",
        setup=lambda folder: (folder / FILE).unlink(),
    ),
    Case(
        "tokenizer.json that is a folder",
        "tokenizer",
        setup=lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()),
    ),
]


UNKNOWN = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<e>": 2}, "unk_token": "<unk>"}
WORDS = UNKNOWN | {"vocab": {"a": 0, "b": 1, "<e>": 2, "<unk>": 3}}


def word_level(what: str, says: str | None, on_error: str = "error", **changes: Any) -> Case:
    """A tokenizer of a few words, otherwise than that of the tests, for a few rows."""
    parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    whole = {"version": "1.0", "added_tokens": [], "model": WORDS} | dict.fromkeys(parts) | changes
    files = {
        FILE: json.dumps(whole),
        "tokenizer/tokenizer_config.json": '{"eos_token": "<e>"}',
        "data.jsonl": lines([{"text": text} for text in ("a", "b a", "a" * 40 + "b", "a")]),
    }
    return Case(what, says, files=files, options={"datasets.0.on_error": on_error})


WHITESPACE = {"type": "Whitespace"}
GIVES_UP = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$"},
    "behavior": "Isolated",
    "invert": False,
}
REFUSED = "data.jsonl, row 2, column 'text': refused_by_tokenizer: 'aaa … cannot be encoded: "
NO_CHARSMAP = base64.b64encode(struct.pack("<I", 1024) + b"\xff" * 1024 + b"abc\0").decode()
PREFIXED = {"type": "BPE", "vocab": {"a": 0, "€": 1}, "continuing_subword_prefix": "x"}
TOKENIZERS += [
    word_level(
        "a word that the tokenizer refuses to encode",
        f"{FILE}: cannot be used: WordLevel error",
        pre_tokenizer=WHITESPACE,
        model=UNKNOWN,
    ),
    word_level(
        "a row at which the tokenizer's pattern gives up",
        REFUSED + "Onig: Regex search error: retry-limit",
        pre_tokenizer=GIVES_UP,
    ),
    word_level("such a row that is put in quarantine", None, "quarantine", pre_tokenizer=GIVES_UP),
    word_level(
        "a normalizer that points outside its table",
        f"{FILE}: cannot be used: index out of bounds",
        normalizer={"type": "Precompiled", "precompiled_charsmap": NO_CHARSMAP},
    ),
    word_level(
        "a merge at which the tokenizer's library ends the process",
        f"{FILE}, model.merges: '€' does not begin with the prefix",
        model=PREFIXED | {"merges": [["a", "€"]]},
    ),
]


# Caches


def files_of(folder: Path, pattern: str) -> list[Path]:
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    assert found, f"no {pattern} in {sorted(map(str, folder.rglob('*')))}"
    return found


def write_over(pattern: str, content: bytes) -> Action:
    """Puts `content` into every file of the folder that fits the pattern."""

    def act(folder: Path) -> None:
        for path in files_of(folder, pattern):
            path.write_bytes(content)

    return act


def flip(pattern: str, at: float = 0.5) -> Action:
    def act(folder: Path) -> None:
        for path in files_of(folder, pattern):
            data = bytearray(path.read_bytes())
            data[int(len(data) * at)] ^= 0x55
            path.write_bytes(data)

    return act


def remove(pattern: str) -> Action:
    def act(folder: Path) -> None:
        for path in files_of(folder, pattern):
            path.unlink()

    return act


def read_all(folder: Path) -> None:
    """Makes every batch of the folder's config."""
    config = from_dict(PipelineConfig, load_yaml(folder / "run.yaml"))
    loader = Pipeline.from_config(config).source().tokenize().pack().load().build()
    for _ in loader:
        pass


CACHES = [
    *(
        Case(f"{kind} {name}", None, damage=write_over(pattern, data), run=read_all)
        for kind, pattern in (
            ("a cache's manifest", "cache/manifests/*.json"),
            ("the note of a config", "cache/configs/*.json"),
            ("the proof of a tokenizer", "cache/proofs/*.json"),
            ("the record of a range", "cache/ranges/*/*.json"),
            ("an index", "cache/indexes/*.json"),
        )
        for name, data in FEW.items()
    ),
    Case(
        "a file of tokens that is empty",
        None,
        damage=write_over("cache/tokens/*/*.arrow", b""),
        run=read_all,
    ),
    Case(
        "a file of tokens of noise",
        None,
        damage=write_over("cache/tokens/*/*.arrow", NOISE),
        run=read_all,
    ),
    Case(
        "a file of tokens with a flipped bit",
        "cache/tokens",
        damage=flip("cache/tokens/*/*.arrow"),
        run=read_all,
    ),
    Case(
        "a file of tokens with another beginning",
        "cache/tokens",
        damage=flip("cache/tokens/*/*.arrow", 0),
        run=read_all,
    ),
    Case("a file of tokens that is gone", None, damage=remove("cache/tokens/*/*.arrow")),
    Case("a manifest that is gone", None, damage=remove("cache/manifests/*.json")),
    Case(
        "a folder in place of a manifest",
        "cache/manifests",
        damage=lambda folder: [
            (path.unlink(), path.mkdir()) for path in files_of(folder, "cache/manifests/*.json")
        ],
    ),
    Case(
        "`cache list` of a damaged manifest",
        None,
        damage=write_over("cache/manifests/*.json", NOISE),
        run=("cache", "list", "--cache-dir", "cache"),
    ),
    Case(
        "`verify` of a damaged cache",
        "cache",
        damage=flip("cache/tokens/*/*.arrow"),
        run=("verify", "cache"),
    ),
    Case("`verify` of a folder that is not there", "nowhere", run=("verify", "nowhere")),
    Case("`verify` of a folder of other things", "tokenizer", run=("verify", "tokenizer")),
]


# Saved folders


SAVE = {"save": {"output_dir": "out"}}


def saved(what: str, says: str | None, damage: Action, read: str = "out") -> Case:
    """Rows that were packed and saved, then damaged, then read from first to last."""

    def act(folder: Path) -> None:
        source = load_saved(folder / read)
        for number, shard in enumerate(source.shards):
            source.read(number, 0, shard.num_rows or 0)

    return Case(what, says, options=SAVE, damage=damage, run=act)


SAVED = [
    *(
        saved(f"its manifest {name}", "out/_easypipe.json", write_over("out/_easypipe.json", data))
        for name, data in SHAPES.items()
    ),
    saved("its manifest is gone", "out", remove("out/_easypipe.json")),
    saved("a shard that is empty", "out/part", write_over("out/*.parquet", b"")),
    saved("a shard of noise", "out/part", write_over("out/*.parquet", NOISE)),
    saved("a shard with a flipped bit", "out/part", flip("out/*.parquet")),
    saved("a shard that is gone", "out/part", remove("out/*.parquet")),
    saved("a folder that is not there", "nowhere", lambda folder: None, "nowhere"),
    saved("a folder of other things", "tokenizer", lambda folder: None, "tokenizer"),
    saved("a file", "data.jsonl", lambda folder: None, "data.jsonl"),
    Case(
        "saving over a folder of other things",
        "tokenizer … is not empty",
        options={"save": {"output_dir": "tokenizer"}},
    ),
    Case(
        "a damaged folder as data",
        "out",
        options=SAVE,
        damage=lambda folder: (
            write_over("out/_easypipe.json", b"{}")(folder),
            (folder / "run.yaml").write_text(
                (folder / "run.yaml").read_text().replace("data.jsonl", "out")
            ),
        ),
        run=("plan", "run.yaml"),
    ),
]


def of_datasets(what: str, says: str, **files: bytes | str) -> Case:
    """A folder as `datasets.save_to_disk` writes it, with other content in its files of JSON."""
    named = {f"saved/{name.replace('__', '.')}": content for name, content in files.items()}
    return Case(what, says, files=named, options={"datasets.0.data_files": "saved"})


INFO = {"dataset_info__json": "{}"}
DATASETS = [
    *(
        of_datasets(f"dataset_dict.json {name}", "saved/dataset_dict.json", dataset_dict__json=data)
        for name, data in SHAPES.items()
    ),
    *(
        of_datasets(f"state.json {name}", "saved/state.json", state__json=data, **INFO)
        for name, data in SHAPES.items()
    ),
    of_datasets(
        "splits that are a number", "saved/dataset_dict.json", dataset_dict__json='{"splits": 5}'
    ),
    of_datasets(
        "splits that are numbers",
        "saved/dataset_dict.json",
        dataset_dict__json='{"splits": [5, null]}',
    ),
    of_datasets(
        "a split outside the folder",
        "saved/dataset_dict.json",
        dataset_dict__json='{"splits": ["../x"]}',
    ),
    of_datasets(
        "a split that is not there", "saved/train", dataset_dict__json='{"splits": ["train"]}'
    ),
    of_datasets(
        "several splits and none chosen", "split", dataset_dict__json='{"splits": ["a", "b"]}'
    ),
    of_datasets(
        "files that are numbers", "saved/state.json", state__json='{"_data_files": [5]}', **INFO
    ),
    of_datasets(
        "files outside the folder",
        "saved/state.json",
        state__json='{"_data_files": [{"filename": "/etc/passwd"}]}',
        **INFO,
    ),
    of_datasets(
        "files that are not there",
        "saved/a.arrow",
        state__json='{"_data_files": [{"filename": "a.arrow"}]}',
        **INFO,
    ),
]


# States


def state(what: str, says: str | None, text: Any) -> Case:
    """What `LoaderState.from_json` is given, and then `restore`."""

    def act(folder: Path) -> None:
        config = from_dict(PipelineConfig, load_yaml(folder / "run.yaml"))
        loader = Pipeline.from_config(config).source().tokenize().pack().load().build()
        given: Any = text(loader) if callable(text) else text
        loader.restore(LoaderState.from_json(given))

    return Case(what, says, run=act)


def altered(**values: Any) -> Callable[[Any], dict[str, Any]]:
    """The state of a loader with other values, and a checksum that fits."""

    def act(loader: Any) -> dict[str, Any]:
        made = json.loads(loader.state().to_json()) | values
        made.pop("checksum")
        return made | {"checksum": digest(made)}

    return act


STATES = [
    *(state(name, "loader state", data) for name, data in SHAPES.items()),
    state("that holds NaN", "loader state", '{"version": 1, "batch": NaN}'),
    state("that is a number", "loader state", 5),
    state("of another version", "loader state", altered(version=99)),
    state(
        "whose checksum does not fit",
        "loader state",
        lambda loader: loader.state().to_json().replace('"batch":0', '"batch":1'),
    ),
    state("with a batch below zero", "loader state", altered(batch=-1)),
    state("with a batch beyond the end", None, altered(batch=10**9, row=10**12)),
    state("with a batch of text", "loader state", altered(batch="one")),
    state("with a key more", "more", altered(more=1)),
    state("with components of numbers", "loader state", altered(components=5)),
    state(
        "of other data",
        "loader state",
        altered(components={"sources": "x", "tokenizer": "x", "config": "x", "plan": "x"}),
    ),
]


# Folders of runs


def run_folder(what: str, says: str | None, **files: bytes | str) -> Case:
    """`easypipe report` of a run's folder with such files."""
    named = {f"run/{name.replace('__', '.')}": content for name, content in files.items()}
    return Case(what, says, files=named, run=("report", "run"))


STEP = '{"step": 1, "loss": 2.5, "tokens": 10}\n'
RUNS = [
    Case("a folder that is not there", "nowhere", run=("report", "nowhere")),
    Case("a folder without a run", "tokenizer", run=("report", "tokenizer")),
    *(
        run_folder(f"metrics.jsonl {name}", "run", metrics__jsonl=data)
        for name, data in SHAPES.items()
    ),
    *(
        run_folder(f"ledger.json {name}", None, metrics__jsonl=STEP, ledger__json=data)
        for name, data in FEW.items()
    ),
    *(
        run_folder(f"run.yaml {name}", None, metrics__jsonl=STEP, run__yaml=data)
        for name, data in FEW.items()
    ),
    Case(
        "`generate` from a folder without a model", "tokenizer", run=("generate", "tokenizer", "hi")
    ),
    Case("`generate` from nothing", "nowhere", run=("generate", "./nowhere", "hi")),
    Case("`export` of a folder without a run", "tokenizer", run=("export", "tokenizer", "out")),
    Case("`export` of nothing", "nowhere", run=("export", "nowhere", "out")),
]
KINDS = {
    "Tokenizers": TOKENIZERS,
    "Token caches": CACHES,
    "Saved folders": SAVED,
    "Folders of `datasets`": DATASETS,
    "States of loaders": STATES,
    "Folders of runs": RUNS,
}
