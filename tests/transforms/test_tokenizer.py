from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st

import strategies
from easypipe import DatasetConfig, Pipeline, PipelineConfig
from easypipe.core import reachable
from easypipe.core.errors import ConfigError, TokenizerError
from easypipe.core.schema import token_dtype
from easypipe.transforms.tokenizer import fast, files, proof
from easypipe.transforms.tokenizer.config import TokenizerConfig
from easypipe.transforms.tokenizer.files import find_end_tokens
from easypipe.transforms.tokenizer.tokenizer import Tokenizer, load_tokenizer
from strategies import examples
from token_support import FAST, TOKENIZERS, small_tokenizer, small_tokenizer_folder, texts
from web import web_server


def hostile(specials: list[str]) -> list[str]:
    return proof.torture(specials).to_pylist()


def real_texts(shared_data: Path) -> list[str]:
    lines = (
        (shared_data / "text" / "udhr_15_languages.jsonl").read_text(encoding="utf-8").splitlines()
    )
    c4 = (shared_data / "text" / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()[:80]
    return [json.loads(line)["text"] for line in lines + c4]


def reference(folder: Path) -> tokenizers.Tokenizer:
    """The file's, with what tokenizer_config.json adds to it."""
    made, config = (
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
        folder / "tokenizer_config.json",
    )
    for token in (
        (json.loads(config.read_text()) if config.is_file() else {})
        .get("added_tokens_decoder", {})
        .values()
    ):
        if token["content"] not in {
            added.content for added in made.get_added_tokens_decoder().values()
        }:
            made.add_tokens([tokenizers.AddedToken(**token)])
    return made


@pytest.mark.shared
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_special_tokens": False},
        {"max_length": 9},
        {"backend": "tokenizers", "max_length": 3},
    ],
)
def test_tokens_are_those_of_the_reference(shared_data: Path, name: str, options: dict) -> None:
    folder = shared_data / "tokenizers" / name
    tokenizer = load_tokenizer(TokenizerConfig(name_or_path=str(folder), **options))
    expected = reference(folder)
    if "max_length" in options:
        expected.enable_truncation(options["max_length"])
    specials = [token.content for token in expected.get_added_tokens_decoder().values()]
    inputs = hostile(specials) + real_texts(shared_data) + [f"x{special}y" for special in specials]
    encoded = tokenizer.encode_column(pa.array(inputs))
    assert encoded.offsets.dtype == np.int64
    assert encoded.ids.dtype == token_dtype(tokenizer.vocab_size)
    assert encoded.offsets[-1] == len(encoded.ids)
    full = reference(folder)
    for i, text in enumerate(inputs):
        ids = encoded.ids[encoded.offsets[i] : encoded.offsets[i + 1]].tolist()
        assert (
            ids == expected.encode(text, add_special_tokens=tokenizer.config.add_special_tokens).ids
        ), ascii(text)
        assert ids == tokenizer.reference_encode(text)
        content = len(full.encode(text, add_special_tokens=False).ids)
        # conservation, document by document
        assert content + tokenizer.specials_per_text == len(ids) + encoded.truncated[i]
    assert encoded.added.tolist() == [tokenizer.specials_per_text] * len(inputs)


@pytest.mark.shared
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_backend_says_what_and_why(
    shared_data: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="easypipe"):
        backend = load_tokenizer(str(shared_data / "tokenizers" / name)).backend
    assert backend.name == ("gigatoken" if name in FAST else "tokenizers")
    assert "equals `tokenizers`" in backend.why if name in FAST else "cannot load it" in backend.why
    record = next(
        r
        for r in caplog.records
        if "tokenizer" in r.message and r.name == "easypipe" and backend.why in r.message
    )
    # a fallback is a warning
    assert record.levelno == (logging.INFO if name in FAST else logging.WARNING)


@pytest.mark.shared
def test_special_tokens_come_from_the_post_processor(shared_data: Path) -> None:
    name = str(shared_data / "tokenizers" / "mistral_v1")
    # which never adds them: it happens columnwise
    tokenizer = load_tokenizer(TokenizerConfig(name_or_path=name, backend="gigatoken"))
    encoded = tokenizer.encode_column(pa.array(["hi", "", "</s>"]))
    assert encoded.ids[encoded.offsets[:-1]].tolist() == [1, 1, 1]
    assert encoded.added.sum() == 3
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 32000)


def test_special_tokens_on_both_sides_are_counted(tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer_folder(), tmp_path / "t")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    pad = made.token_to_id("<|pad|>")
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|pad|> $A <|pad|>", special_tokens=[("<|pad|>", pad)]
    )
    made.save(str(tmp_path / "t" / "tokenizer.json"))
    encoded = load_tokenizer(str(tmp_path / "t")).encode_column(pa.array(["hi", "", "hello"]))
    assert encoded.added.sum() == np.count_nonzero(encoded.ids == pad) == 6


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<end>"])
def test_names_that_are_taken_for_eos(name: str, tmp_path: Path) -> None:
    definition = (small_tokenizer_folder() / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(definition.replace("<|endoftext|>", name))
    assert load_tokenizer(str(tmp_path)).eos_token_id == (None if name == "<end>" else 0)


def test_of_two_names_none_is_taken_for_eos(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(small_tokenizer_folder() / "tokenizer.json"))
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).eos_token_id is None


@pytest.mark.shared
def test_eos_is_taken_from_an_unmistakable_name_with_a_warning(
    shared_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # has no tokenizer_config.json
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "olmo_neox"))
    assert tokenizer.eos_token_id == 50279
    assert "no tokenizer_config.json names its eos_token; taking '<|endoftext|>'" in caplog.text


@functools.cache
def tokenizer_of_length(max_length: int | None, backend: str) -> Tokenizer:
    return small_tokenizer(max_length=max_length, backend=backend)


@examples(60)
@given(
    st.lists(strategies.texts(), max_size=30),
    st.lists(st.integers(0, 30), max_size=4),
    st.sampled_from([None, 1, 5]),
    st.sampled_from(["auto", "gigatoken"]),
)
def test_row_wise_and_equal_to_the_reference(
    rows: list[str], cuts: list[int], max_length: int | None, backend: str
) -> None:
    tokenizer = tokenizer_of_length(max_length, backend)
    column = pa.array(rows, pa.string())
    whole = tokenizer.encode_column(column)
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    pieces = [tokenizer.encode_column(column.slice(a, b - a)) for a, b in itertools.pairwise(edges)]
    assert (
        np.concatenate([np.zeros(0, np.uint32), *(p.ids for p in pieces)]).tolist()
        == whole.ids.tolist()
    )
    for i, text in enumerate(rows):
        assert whole.ids[
            whole.offsets[i] : whole.offsets[i + 1]
        ].tolist() == tokenizer.reference_encode(text)
        if max_length is None:
            assert tokenizer.decode(tokenizer.reference_encode(text)) == text


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
@pytest.mark.parametrize("backend", ["gigatoken", "tokenizers"])
def test_every_text_type_and_slices_of_it(kind: pa.DataType, backend: str) -> None:
    tokenizer = small_tokenizer(backend=backend)
    rows = texts(20)
    array = pa.array(rows, pa.string()).cast(kind)
    encoded = tokenizer.encode_column(array.slice(5, 9))
    assert [encoded.ids[a:b].tolist() for a, b in itertools.pairwise(encoded.offsets)] == [
        tokenizer.reference_encode(text) for text in rows[5:14]
    ]
    assert tokenizer.encode_column(array.slice(0, 0)).offsets.tolist() == [0]


def test_many_threads_share_a_tokenizer() -> None:
    tokenizer = small_tokenizer()
    expected = tokenizer.encode_column(pa.array(texts(200))).ids.tolist()
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(
            lambda _: tokenizer.encode_column(pa.array(texts(200))).ids.tolist(), range(40)
        ):
            assert found == expected


def test_gigatoken_is_renewed_by_bytes_where_memory_is_not_known_and_tokens_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast, "BLIND_BYTES", 4000)
    monkeypatch.setattr(fast, "anonymous_bytes", lambda: 0)  # a system that does not tell
    made = []
    load = fast.FastEngine._load
    monkeypatch.setattr(
        fast.FastEngine, "_load", lambda self: made.append(threading.get_ident()) or load(self)
    )
    tokenizer = small_tokenizer(backend="gigatoken")
    for i in range(30):
        rows = texts(10, seed=i)
        assert tokenizer.encode_column(pa.array(rows)).ids.tolist() == [
            i for text in rows for i in tokenizer.reference_encode(text)
        ]
    assert len(made) > 2


def test_gigatoken_is_renewed_when_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "SLOW_S", -1.0)
    memory = iter(range(0, 1 << 60, 2 * fast.GROWN_BYTES))
    monkeypatch.setattr(fast, "anonymous_bytes", lambda: next(memory))
    made = []
    load = fast.FastEngine._load
    monkeypatch.setattr(fast.FastEngine, "_load", lambda self: made.append(1) or load(self))
    engine = fast.FastEngine((small_tokenizer_folder() / "tokenizer.json").read_text())
    for _ in range(4):
        engine.encode(pa.array(texts(50), pa.large_string()))
    assert len(made) >= 3


@pytest.mark.slow
@pytest.mark.shared
def test_memory_is_bounded_on_text_of_nothing_but_new_words(shared_data: Path) -> None:
    """Law 8. 80 MB of it make a gigatoken tokenizer grow by 600 MB and more. A process of its own,
    so that nothing else is measured.
    """
    code = (
        "import sys, base64; import numpy as np, pyarrow as pa\n"
        "from easypipe.transforms.tokenizer import fast\n"
        "engine = fast.FastEngine(open(sys.argv[1]).read()); rng = np.random.default_rng(0); start "
        "= peak = fast.anonymous_bytes()\n"
        "for _ in range(40):\n"
        "    data = bytearray(base64.b64encode(rng.bytes(1_500_000)))\n"
        "    data[7::8] = b' ' * len(data[7::8])\n"
        "    rows = [data[i : i + 4000].decode() for i in range(0, len(data), 4000)]\n"
        "    engine.encode(pa.array(rows, pa.large_string())); peak = max(peak, "
        "fast.anonymous_bytes())\n"
        "print((peak - start) >> 20, start > 0)\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(shared_data / "tokenizers" / "gpt2" / "tokenizer.json"),
    ]
    grown, measured = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300
    ).stdout.split()
    if measured != "True":
        pytest.skip("this system does not tell a process's memory")
    assert int(grown) < 350


def test_few_bytes_are_encoded_without_gigatoken_and_need_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Counted(fast.FastEngine):
        def encode(self, texts):
            asked.append(texts.nbytes)
            return super().encode(texts)

    monkeypatch.setattr("easypipe.transforms.tokenizer.tokenizer.engine_of", Counted)

    def tokens(text: str, folder: str) -> list[list[int]]:
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "a.jsonl"
        file.write_text(json.dumps({"text": text}) + "\n")
        config = PipelineConfig(
            datasets=[DatasetConfig(name="d", data_files=str(file))],
            default_tokenizer=str(small_tokenizer_folder()),
            cache_dir=tmp_path / folder / "cache",
        )
        source = Pipeline.from_config(config).source().tokenize().get_data()["d"]
        asked.clear()  # of it, hostile texts are encoded once for all datasets
        return source.read(0, 0, 1).column("input_ids").to_pylist()

    for length, fast_too in ((1000, False), (1001, True)):
        text = ("a few words " * 100)[:length]
        assert tokens(text, str(length)) == [small_tokenizer().reference_encode(text)]
        assert bool(asked) == fast_too, length


class WrongEngine(fast.FastEngine):
    """gigatoken, but wrong about every text that holds `poison`."""

    poison, lost = "2-", False

    def encode(self, column):
        offsets, ids = super().encode(column)
        ids = ids.copy()
        for i, text in enumerate(column.to_pylist()):
            if self.poison in text and offsets[i + 1] > offsets[i]:
                if self.lost:  # all tokens of this text and of those behind it
                    return np.minimum(offsets, offsets[i]), ids
                ids[offsets[i]] ^= 1
        return offsets, ids


@pytest.mark.parametrize("lost", [False, True])
def test_a_difference_on_hostile_text_falls_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lost: bool
) -> None:
    monkeypatch.setattr(WrongEngine, "poison", "don't")
    monkeypatch.setattr(WrongEngine, "lost", lost)
    monkeypatch.setattr("easypipe.transforms.tokenizer.tokenizer.engine_of", WrongEngine)
    tokenizer = small_tokenizer()
    assert tokenizer.backend.name == "tokenizers"
    assert "differs from `tokenizers` at token 0 of " in tokenizer.backend.why
    assert any(r.levelno == logging.WARNING and "differs" in r.message for r in caplog.records)
    assert tokenizer.encode_column(pa.array(["don't"])).ids.tolist() == tokenizer.reference_encode(
        "don't"
    )
    with pytest.raises(
        TokenizerError,
        match=r"backend='gigatoken' cannot be used: gigatoken .* differs .*\. Set backend='auto'\.",
    ):
        _ = small_tokenizer(backend="gigatoken").backend


def test_a_difference_on_the_data_falls_back_and_is_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("easypipe.transforms.tokenizer.tokenizer.engine_of", WrongEngine)
    tokenizer = small_tokenizer()
    assert tokenizer.prove(pa.array(["fine"]), of="dataset d", memo=tmp_path).name == "gigatoken"
    assert (
        tokenizer.prove(pa.array(["fine", "2-"]), of="dataset d", memo=tmp_path).name
        == "tokenizers"
    )
    monkeypatch.undo()
    again = small_tokenizer()
    assert again.prove(pa.array(["fine"]), of="dataset d", memo=tmp_path).why.endswith(
        "(texts of dataset d)"
    )
    assert again.backend.name == "tokenizers"
    assert not again.refuted(tmp_path)  # nothing was written by gigatoken yet


def test_a_good_verdict_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_tokenizer().prove(pa.array(["x"]), of="d", memo=tmp_path)
    monkeypatch.setattr(proof, "torture", lambda specials: pytest.fail("proved twice"))
    assert small_tokenizer().prove(pa.array(["x"]), of="d", memo=tmp_path).name == "gigatoken"


@pytest.mark.parametrize("package", ["fast.version", "_reference_version"])
def test_a_verdict_is_of_the_versions_that_it_was_found_with(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdict = proof.Verdict(True, "equal")
    proof.remember(tmp_path, "a tokenizer", verdict)
    assert proof.recall(tmp_path, "a tokenizer") == verdict
    monkeypatch.setattr(f"{proof.__name__}.{package}", lambda: "0.0.1")
    assert proof.recall(tmp_path, "a tokenizer") is None


def test_nulls_are_refused() -> None:
    with pytest.raises(TokenizerError, match="1 of 2 texts are null"):
        small_tokenizer().encode_column(pa.array(["a", None]))


def test_identity() -> None:
    assert (
        small_tokenizer().fingerprint
        == small_tokenizer(max_length=5, backend="tokenizers").fingerprint
    )
    assert small_tokenizer().fingerprint != small_tokenizer(add_special_tokens=False).fingerprint


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name_or_path": ""}, "name_or_path: names no tokenizer"),
        (
            {"name_or_path": "x", "max_length": 0},
            "max_length: 0 is not a length. Give at least 1, or null for no limit.",
        ),
        (
            {"name_or_path": "x", "padding": "max_length"},
            "padding: 'max_length' needs a max_length",
        ),
        (
            {"name_or_path": "x", "trust_remote_code": True},
            "trust_remote_code: easypipe never runs code that comes with a tokenizer",
        ),
        ({"name_or_path": "x", "use_fast": True}, "use_fast: unknown key"),
        ({"name_or_path": "x", "backend": "gigatokn"}, "backend: 'gigatokn' is not an option"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TokenizerConfig(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.shared
def test_max_length_has_to_hold_the_special_tokens(shared_data: Path) -> None:
    name = str(shared_data / "tokenizers" / "mistral_v1")
    with pytest.raises(
        TokenizerError,
        match=r"max_length 1 is filled by 1 special tokens\. Give a larger max_length.",
    ):
        load_tokenizer(TokenizerConfig(name_or_path=name, max_length=1))
    assert (
        load_tokenizer(TokenizerConfig(name_or_path=name, max_length=2))
        .encode_column(pa.array(["a b c"]))
        .ids.tolist()[0]
        == 1
    )


def test_without_truncation_max_length_cuts_nothing() -> None:
    tokenizer = small_tokenizer(max_length=1, truncation=False)
    assert len(tokenizer.encode_column(pa.array(["one two three"])).ids) > 1


# Tokenizers that do not load


@pytest.mark.parametrize(
    "name",
    [
        *("/nowhere/tokenizer", "./nowhere", "../nowhere", "~/nowhere-easypipe", "a\\b"),
        *(f"nowhere.{ending}" for ending in ("json", "model", "tiktoken", "txt")),
        *("a b", "a/b/c"),
    ],
)
def test_what_looks_like_a_path_is_never_looked_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "easypipe.transforms.tokenizer.files._from_hub", lambda name: pytest.fail("asked the Hub")
    )
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(name)
    assert str(caught.value).startswith(f"{name}: no such file or folder")


def test_a_near_name_is_proposed_and_works(tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer_folder(), tmp_path / "gpt2")
    with pytest.raises(TokenizerError, match="Did you mean 'gpt2'") as caught:
        load_tokenizer(str(tmp_path / "gtp2"))
    assert caught.value.have == ["gpt2"]
    assert load_tokenizer(str(tmp_path / "gpt2")).vocab_size == 500


def test_a_file_of_any_name_is_read_with_what_lies_beside_it(tmp_path: Path) -> None:
    whole = load_tokenizer(str(shutil.copytree(small_tokenizer_folder(), tmp_path / "t")))
    (tmp_path / "t" / "tokenizer.json").rename(tmp_path / "t" / "own.json")
    own = load_tokenizer(str(tmp_path / "t" / "own.json"))
    assert (own.fingerprint, own.eos_token_id) == (whole.fingerprint, whole.eos_token_id)


def test_a_folder_or_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(
        TokenizerError,
        match=r"the folder holds no tokenizer.json \(have: tokenizer.model\). Convert",
    ):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer").write_bytes(b"x")
    for name, kind in (("tokenizer.model", r"a \.model file"), ("tokenizer", "a nameless file")):
        with pytest.raises(TokenizerError, match=f"{kind} is not a tokenizer\\.json"):
            load_tokenizer(str(tmp_path / name))
    for content, problem in (
        ("{", "not JSON: "),
        ("{}", "not a tokenizer: "),
        ("[1]", "not a tokenizer: "),
    ):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(TokenizerError) as caught:
            load_tokenizer(str(tmp_path))
        assert caught.value.at == str(tmp_path / "tokenizer.json")
        assert caught.value.problem.startswith(problem)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="cannot be read: 'utf-8'"):
        load_tokenizer(str(tmp_path))


def test_dropout_and_a_broken_config_are_refused(tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer_folder(), tmp_path / "t")
    definition = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    definition["model"]["dropout"] = 0.1
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(TokenizerError, match=r"its dropout of 0.1\d* makes tokens random"):
        load_tokenizer(str(tmp_path / "t"))
    (tmp_path / "t" / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not JSON"):
        load_tokenizer(str(tmp_path / "t"))


def test_truncation_and_padding_inside_the_file_have_no_effect(tmp_path: Path) -> None:
    shutil.copytree(small_tokenizer_folder(), tmp_path / "t")
    inside = reference(tmp_path / "t")
    inside.enable_truncation(2)
    inside.enable_padding(length=50)
    inside.save(str(tmp_path / "t" / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "t"))
    assert tokenizer.reference_encode("one two three") == small_tokenizer().reference_encode(
        "one two three"
    )
    encoded = tokenizer.encode_column(pa.array(["one two three"]))
    assert encoded.ids.tolist() == small_tokenizer().reference_encode("one two three")


def test_a_hub_name_without_network(tmp_path: Path) -> None:
    code = (
        "from easypipe.transforms.tokenizer.tokenizer import load_tokenizer, TokenizerError\n"
        "try: load_tokenizer('nobody/private-tokenizer')\n"
        "except TokenizerError as error: print(error)\n"
    )
    secret = "hf_SecretSecretSecretSecret"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "HF_TOKEN": secret,
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment,
    )
    assert done.stdout.startswith(
        "nobody/private-tokenizer: no such file or folder, and the Hugging Face Hub cannot "
        "be reached: "
    ), done.stdout
    assert "set HF_TOKEN" in done.stdout
    assert "give a local tokenizer.json" in done.stdout
    assert secret not in done.stdout + done.stderr


NO_NETWORK = (
    "Check the network (and HF_HUB_OFFLINE, HF_ENDPOINT), give a local tokenizer.json (hf download "
    "a/b --local-dir FOLDER on a machine with a network), or, for a private or gated repository, set "
    "HF_TOKEN."
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "GatedRepoError",
            "the Hub repository is gated. Accept its terms on https://huggingface.co/a/b, then set "
            "HF_TOKEN to a token that may read it.",
        ),
        (
            "RepositoryNotFoundError",
            "no such file or folder, nor such a repository on the Hugging Face Hub, or it is "
            "private. Check the name; for a private repository set HF_TOKEN to a token that may "
            "read it.",
        ),
        (
            "LocalEntryNotFoundError",
            "no such file or folder, and the Hugging Face Hub cannot be reached: "
            f"LocalEntryNotFoundError: bad ***. {NO_NETWORK}",
        ),
        (
            "RemoteEntryNotFoundError",
            "the Hub repository holds no tokenizer.json. Convert it with transformers: "
            "AutoTokenizer.from_pretrained(name).save_pretrained(folder), then give the folder.",
        ),
        *(
            (
                error,
                f"cannot be downloaded from the Hugging Face Hub: {error}: bad ***. Give a local "
                "tokenizer.json, or, for a private or gated repository, set HF_TOKEN.",
            )
            for error in ("HfHubHTTPError", "HFValidationError", "OSError")
        ),
    ],
)
def test_answers_of_the_hub(error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*_: object, **__: object) -> None:
        kind = getattr(errors, error, OSError)
        if not issubclass(kind, errors.HfHubHTTPError):
            raise kind("bad hf_abcdefghijkl")
        # of whichever HTTP library the Hub client uses
        answer = SimpleNamespace(headers={}, request=None, status_code=404)
        raise kind("bad hf_abcdefghijkl", response=answer)

    monkeypatch.setattr(files, "hub_unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer("a/b")
    assert str(caught.value) == f"a/b: {message}"


@pytest.mark.parametrize("error", ["LocalEntryNotFoundError", "HfHubHTTPError"])
def test_a_config_that_the_hub_does_not_send_is_named(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def only_one(_: str, name: str, **__: object) -> str:
        if name == "tokenizer.json":
            return str(Path(small_tokenizer_folder(), name))
        kind = getattr(errors, error)
        raise kind("bad hf_abcdefghijkl", **({} if error[0] == "L" else {"response": answer}))

    answer = SimpleNamespace(headers={}, request=None, status_code=503)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", only_one)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer("a/b")
    assert str(caught.value) == (
        "a/b: tokenizer_config.json cannot be downloaded from the Hugging Face Hub: "
        f"{error}: bad ***. Check the network, try again."
    )


def test_without_the_hub_the_template_alone_says_what_ends_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    assert find_end_tokens("a/b") == ()
    assert "a/b: its chat template alone says what ends an answer" in caplog.text
    assert "no route" in caplog.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("models/tokenizr", "(have: tokenizer, weights). Did you mean 'tokenizer'?"),
        ("models/other", "(have: tokenizer, weights). Check the path."),
        ("./models/tokenizr", "(have: tokenizer, weights). Did you mean 'tokenizer'?"),
        ("./modls/tokenizer/deep", "(have: models). Did you mean 'models'?"),
        ("models/deep/tokenizer/x", "(have: tokenizer, weights). Give a tokenizer.json"),
        ("~/modls/tokenizer", "(have: models). Did you mean 'models'?"),
        ("modls/tokenizer", ". Did you mean 'models'? Check the n"),
        ("modles", ". Did you mean 'models'? Check the n"),
    ],
)
@pytest.mark.parametrize("error", ["RepositoryNotFoundError", "LocalEntryNotFoundError"])
def test_a_mistyped_path_gets_the_names_that_are_near(
    name: str, words: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def refuse(*_: object, **__: object) -> None:
        kind = getattr(errors, error)
        answer = SimpleNamespace(headers={}, request=None, status_code=404)
        raise kind("nothing", **({"response": answer} if error.startswith("R") else {}))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    for folder in ("models/tokenizer", "models/weights"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(name)
    assert str(caught.value).startswith(f"{name}: no such file or folder")
    assert words in str(caught.value)


@pytest.mark.parametrize("where", ["nowhere", "untrusted"])
def test_a_hub_name_is_answered_at_once_where_the_hub_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # which the test run sets
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with untrusted_server(tmp_path) as port:
        told = "no-such-host.invalid:80: "
        if where == "untrusted":
            told = f"localhost:{port}: .*CERTIFICATE_VERIFY_FAILED"
        else:
            monkeypatch.setattr(reachable, "CONNECT_S", 0.2)
        endpoint = {
            "nowhere": "http://no-such-host.invalid",
            "untrusted": f"https://localhost:{port}",
        }
        monkeypatch.setattr(constants, "ENDPOINT", endpoint[where])
        began = time.monotonic()
        with pytest.raises(
            TokenizerError,
            match=rf"a/b: no such file .* cannot be reached: {told}.*hf download a/b",
        ):
            load_tokenizer("a/b")
        assert time.monotonic() - began < 5


def test_a_host_that_was_not_reached_is_asked_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(reachable, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    assert str(reachable.hub_unreachable(url)).startswith(f"127.0.0.1:{port}: ")
    with socket.create_server(("127.0.0.1", port)):
        assert reachable.hub_unreachable(url) is not None
        monkeypatch.setattr(reachable, "FAILED_S", 0.0)
        assert reachable.hub_unreachable(url) is None
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert str(reachable.hub_unreachable(url)).startswith("the proxy 127.0.0.1:1: ")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert reachable.hub_unreachable(url) is None, "it is asked without the proxy"


@contextlib.contextmanager
def untrusted_server(folder: Path) -> Iterator[int]:
    """The port of a server on loopback whose certificate nobody signed but itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    start = datetime.datetime(2020, 1, 1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, start, start.replace(year=2099))
    file = folder / "server.pem"
    file.write_bytes(
        made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
        + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with web_server() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        yield server.server_port


def test_a_hub_name_is_downloaded_with_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda name, file, **_: str(small_tokenizer_folder() / file),
    )
    tokenizer = load_tokenizer("someone/small")
    assert (tokenizer.name, tokenizer.origin, tokenizer.eos_token_id) == (
        "someone/small",
        "hub:someone/small",
        0,
    )
    assert tokenizer.fingerprint == small_tokenizer().fingerprint


def test_a_config_that_the_hub_is_known_not_to_have_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def cached(_: str, name: str, **__: object) -> str:
        if name == "tokenizer.json":
            return str(small_tokenizer_folder() / name)
        raise errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cached)
    monkeypatch.setattr(
        huggingface_hub,
        "try_to_load_from_cache",
        lambda *_: huggingface_hub._CACHED_NO_EXIST,  # pyright: ignore[reportPrivateUsage]
    )
    assert load_tokenizer("someone/small").origin == "hub:someone/small"


def declared(tmp_path: Path, options: dict) -> Tokenizer:
    """The small tokenizer with what tokenizer_config.json declares of it."""
    shutil.copytree(small_tokenizer_folder(), tmp_path / "t")
    before = json.loads((tmp_path / "t" / "tokenizer_config.json").read_text())
    (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps(before | options))
    return load_tokenizer(str(tmp_path / "t"))


def test_tokens_that_only_the_config_declares_are_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = small_tokenizer()
    new = {
        "content": "<|stop|>",
        "special": True,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
        "normalized": False,
    }
    mark = {"content": "<mark>", "special": False}
    wrong = {"content": "<wrong>", "special": True}
    decoder = {
        "500": new,
        "501": mark,
        "900": wrong,
        "0": {"content": "<|endoftext|>", "special": True},
    }
    tokenizer = declared(
        tmp_path,
        {
            "added_tokens_decoder": decoder,
            "eos_token": {"content": "<|stop|>"},
            "pad_token": "<|none|>",
        },
    )
    assert tokenizer.reference_encode("a<|stop|><mark>")[1:] == [500, 501]
    assert (tokenizer.eos_token_id, tokenizer.vocab_size, tokenizer.pad_token_id) == (
        500,
        502,
        None,
    )
    assert "<|stop|>" in tokenizer.special_tokens
    assert "<mark>" not in tokenizer.special_tokens
    assert "says that '<wrong>' is token 900, and it would be 502: it is not used" in caplog.text
    assert tokenizer.fingerprint != plain.fingerprint
    assert tokenizer.backend.name == "gigatoken"
    encoded = tokenizer.encode_column(pa.array(["a<|stop|>b"]))
    assert encoded.ids.tolist() == tokenizer.reference_encode("a<|stop|>b")
    assert encoded.special.tolist() == [1]


@pytest.mark.parametrize(
    "named",
    [
        *(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")),
        "additional_special_tokens",
        "extra_special_tokens",
    ],
)
def test_a_named_token_of_the_vocabulary_is_special(tmp_path: Path, named: str) -> None:
    word = next(
        token
        for i in range(300, 500)
        if (token := str(small_tokenizer().token(i))).isascii() and token.isalpha()
    )
    value = [word] if named.endswith("s") else word
    tokenizer = declared(tmp_path, {named: value, "added_tokens_decoder": {"0": "no object"}})
    assert word in tokenizer.special_tokens
    assert tokenizer.reference_encode(f"x{word}x")[1] == small_tokenizer()._reference.token_to_id(
        word
    )
    assert tokenizer.vocab_size == 500


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized"])
def test_flags_of_a_declared_token_are_kept(tmp_path: Path, flag: str) -> None:
    definition = json.loads((small_tokenizer_folder() / "tokenizer.json").read_text())
    definition["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    text, found = "a <x> b<x>c<X> d", dict[bool, list[int]]()
    for on in (False, True):
        token = {"content": "<X>" if flag == "normalized" else "<x>", "special": True, flag: on}
        options = {"added_tokens_decoder": {"500": token}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
        reference = tokenizers.Tokenizer.from_str(json.dumps(definition))
        reference.add_special_tokens([tokenizers.AddedToken(**token)])
        found[on] = load_tokenizer(str(tmp_path)).reference_encode(text)
        assert found[on] == reference.encode(text, add_special_tokens=False).ids
    assert found[False] != found[True]


@pytest.mark.shared
def test_declared_tokens_are_those_of_transformers(shared_data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = str(shared_data / "tokenizers" / "torchtitan_tiny")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in (
        "<|begin_of_text|>Hello<|end_of_text|>",
        "a <|im_start|> b<tool_call>",
        "[PAD]<|media_pad|></think> <think>",
    ):
        assert ours.reference_encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("where", ["vocab", "added_tokens"])
def test_an_id_that_no_memory_holds_is_refused(tmp_path: Path, where: str) -> None:
    """The fast encoder keeps a table of all ids up to the highest: 64 GiB here, which aborts the
    process.
    """
    definition = json.loads((small_tokenizer_folder() / "tokenizer.json").read_text())
    if where == "vocab":
        definition["model"]["vocab"]["Ġunheard"] = 4294967295
    else:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        definition["added_tokens"].append(
            {"id": 4294967295, "content": "<x>", "special": True, **flags}
        )
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition, ensure_ascii=False))
    with pytest.raises(
        TokenizerError,
        match=r"tokenizer\.json: .* has the id 4294967295, .* Correct the id: there are \d+ tokens",
    ):
        load_tokenizer(str(tmp_path))
