"""`easypipe export --gguf`: the file as the package gguf reads it; and, where llama-cpp-python is
installed (`nox -s gguf`), as llama.cpp runs it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from easypipe import DatasetConfig, PipelineConfig, Trainer, train_bpe
from easypipe.cli import main
from easypipe.core.errors import ConfigError, TokenizerError
from easypipe.interop.gguf import STEPS, gguf_differences
from easypipe.train import load_pretrained
from easypipe.train.finished import Trained
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.lora import adapters, add_lora
from easypipe.train.model.pretrained.gguf import ARCHITECTURES, save_gguf
from easypipe.train.model.pretrained.gguf_tokens import vocabulary_of
from easypipe.train.model.pretrained.save import Seen
from easypipe.transforms.prompt.templates import CHAT_TEMPLATES
from easypipe.transforms.tokenizer.tokenizer import load_tokenizer
from pipelines import texts
from train.hf_support import NINE, tensors, write_model

VOCAB, EOS, IM_END = 300, 0, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = Seen(chat_template=CHAT_TEMPLATES["chatml"], stop_token_ids=(IM_END,), max_length=512)
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python: nox -s gguf"
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(texts(60), VOCAB - 4, SPECIAL, folder)
    return folder


def of_family(name: str, folder: Path, **changed: Any) -> Decoder:
    config = NINE[name] | {"vocab_size": VOCAB, "bos_token_id": EOS, "eos_token_id": EOS} | changed
    return load_pretrained(write_model(folder, config, tensors(config)))


def trained(model: Decoder, tokenizer: Path, seen: Seen = CHAT) -> Trained:
    return Trained(model=model, step=1, tokenizer=str(tokenizer), seen=seen, base=None)


def written(run: Trained, path: Path, dtype: Any = None) -> Path:
    return save_gguf(run.model, path, tokenizer=run.tokenizer, dtype=dtype, **run.seen.options())


def values(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Of each tensor its values, in float32."""
    wide = {"F32": np.float32, "F16": np.float16}
    found = {}
    for one in gguf.GGUFReader(path).tensors:
        kind = one.tensor_type.name
        data = one.data.view(np.uint8).reshape(-1)
        flat = data.view(jnp.bfloat16 if kind == "BF16" else wide[kind]).astype(np.float32)
        found[one.name] = flat.reshape([int(size) for size in one.shape[::-1]])
    return found


def times_slower(config: dict[str, Any]) -> list[float]:
    """How many times slower Llama 3.1 turns each pair than theta alone would (its paper's code)."""
    scaling, width = config["rope_scaling"], config["hidden_size"] // config["num_attention_heads"]
    low, high, factor = (scaling[f"{name}factor"] for name in ("low_freq_", "high_freq_", ""))
    found = []
    for i in range(0, width, 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / width)
        turns = scaling["original_max_position_embeddings"] / wavelength
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def neighbours(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + h/2 of a head, which turn together, side by side."""
    width = len(matrix) // heads
    order = [
        head * width + i + half
        for head in range(heads)
        for i in range(width // 2)
        for half in (0, width // 2)
    ]
    return matrix[order]


@pytest.mark.parametrize("family", NINE)
def test_every_tensor_stands_in_the_file(family: str, tokenizer: Path, tmp_path: Path) -> None:
    model = of_family(family, tmp_path / "files")
    config = NINE[family] | {"vocab_size": VOCAB}
    path = written(trained(model, tokenizer), tmp_path / "model.gguf")
    found, arch = arrays(path), values(path)["general.architecture"]
    own = tensors(config)
    gemma = arch.startswith("gemma")
    assert arch == ARCHITECTURES[config["model_type"]]
    assert len(found) == len(own) + (family == "llama3")
    if family == "llama3":
        np.testing.assert_allclose(found["rope_freqs.weight"], times_slower(config), rtol=1e-5)
    first = "model.layers.1."
    same = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        f"{first}self_attn.v_proj.weight": "blk.1.attn_v.weight",
        f"{first}self_attn.o_proj.weight": "blk.1.attn_output.weight",
        f"{first}mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        f"{first}mlp.up_proj.weight": "blk.1.ffn_up.weight",
        f"{first}mlp.down_proj.weight": "blk.1.ffn_down.weight",
        f"{first}input_layernorm.weight": "blk.1.attn_norm.weight",
    }
    if gemma:
        same[f"{first}post_attention_layernorm.weight"] = "blk.1.post_attention_norm.weight"
        same[f"{first}pre_feedforward_layernorm.weight"] = "blk.1.ffn_norm.weight"
    for theirs, ours in same.items():
        more = 1 if gemma and theirs.endswith("norm.weight") else 0
        np.testing.assert_array_equal(found[ours], own[theirs] + np.float32(more))
    for kind, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
        matrix = own[f"{first}self_attn.{kind}_proj.weight"]
        wanted = neighbours(matrix, heads) if arch == "llama" else matrix
        scale = np.sqrt(16 / 24) if (family, kind) == ("gemma2", "q") else 1
        np.testing.assert_allclose(found[f"blk.1.attn_{kind}.weight"], wanted * scale, rtol=1e-6)


def test_the_shape_of_the_model_stands_in_the_file(tokenizer: Path, tmp_path: Path) -> None:
    found = {}
    for family in ("llama3", "mistral", "gemma2", "gemma3", "llama2, linear"):
        run = trained(of_family(family, tmp_path / family), tokenizer)
        known = values(written(run, tmp_path / f"{family}.gguf"))
        arch = known["general.architecture"]
        found[family] = {
            key.removeprefix(f"{arch}."): value
            for key, value in known.items()
            if key.startswith(f"{arch}.")
        }
    assert found["llama3"] == pytest.approx(
        {
            "vocab_size": 300,
            "context_length": 1024,
            "embedding_length": 32,
            "feed_forward_length": 48,
            "block_count": 2,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": 8,
            "attention.value_length": 8,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": 8,
            "rope.freq_base": 500000.0,
        }
    )
    assert found["mistral"]["context_length"] == 100  # llama.cpp has no window for it
    assert "attention.sliding_window" not in found["mistral"]
    linear = found["llama2, linear"]
    assert (linear["rope.scaling.type"], linear["rope.scaling.factor"]) == ("linear", 4.0)
    two, three = found["gemma2"], found["gemma3"]
    assert two["attention.sliding_window"] == three["attention.sliding_window"] == 100
    assert two["attention.sliding_window_pattern"] == [True, False, True]
    assert (two["attn_logit_softcapping"], two["final_logit_softcapping"]) == (3.0, 8.0)
    assert (three["rope.freq_base"], three["rope.freq_base_swa"]) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("dtype", "number", "kind"),
    [(None, 0, "F32"), ("float32", 0, "F32"), ("float16", 1, "F16"), ("bfloat16", 32, "BF16")],
)
def test_matrices_have_the_dtype_that_is_asked_for_and_vectors_float32(
    dtype: Any, number: int, kind: str, tokenizer: Path, tmp_path: Path
) -> None:
    model = of_family("qwen3", tmp_path / "files")
    path = written(trained(model, tokenizer), tmp_path / "model.gguf", dtype)
    kinds = {one.name: one.tensor_type.name for one in gguf.GGUFReader(path).tensors}
    assert values(path)["general.file_type"] == number
    vectors = {name for name in kinds if "norm" in name}
    assert {kinds[name] for name in vectors} == {"F32"}
    assert {kinds[name] for name in kinds.keys() - vectors} == {kind}
    own = tensors(NINE["qwen3"] | {"vocab_size": VOCAB})["model.embed_tokens.weight"]
    rounded = own.astype(jnp.dtype(dtype or "float32")).astype(np.float32)
    np.testing.assert_array_equal(arrays(path)["token_embd.weight"], rounded)


def test_bfloat16_parameters_make_a_bfloat16_file(tokenizer: Path, tmp_path: Path) -> None:
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=2,
        param_dtype="bfloat16",
    )
    run = trained(Decoder(config, nnx.Rngs(0)), tokenizer)
    assert values(written(run, tmp_path / "model.gguf"))["general.file_type"] == 32


def test_adapters_are_merged_into_the_file(tokenizer: Path, tmp_path: Path) -> None:
    with_lora = add_lora(of_family("llama3", tmp_path / "files"), LoraConfig(rank=3), seed=0)
    plain = arrays(written(trained(with_lora, tokenizer), tmp_path / "plain.gguf"))
    for i, linear in enumerate(adapters(with_lora).values()):
        linear.lora_b[...] = 0.1 * jax.random.normal(jax.random.key(i), linear.lora_b.shape)
    tuned = arrays(written(trained(with_lora, tokenizer), tmp_path / "tuned.gguf"))
    moved = {name for name in plain if np.abs(plain[name] - tuned[name]).max() > 0.01}
    assert len(moved) == 14  # every projection of two layers
    assert plain.keys() == tuned.keys()


def test_tokens_and_what_ends_a_turn_stand_in_the_file(tokenizer: Path, tmp_path: Path) -> None:
    model = of_family("llama3", tmp_path / "files")
    known = values(written(trained(model, tokenizer), tmp_path / "model.gguf"))
    ours = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in known.items()
        if key.startswith("tokenizer.ggml.")
    }
    definition = json.loads((tokenizer / "tokenizer.json").read_text())["model"]
    size = len(definition["vocab"])
    tokens = ours.pop("tokens")
    assert dict(zip(tokens, range(size), strict=False)) == definition["vocab"]
    assert tokens[size:] == [f"[PAD{i}]" for i in range(size, VOCAB)]
    assert ours.pop("token_type") == [3] * 3 + [1] * (size - 3) + [5] * (VOCAB - size)
    assert ours.pop("merges") == [
        one if isinstance(one, str) else " ".join(one) for one in definition["merges"]
    ]
    assert ours == {
        "model": "gpt2",
        "pre": "gpt-2",
        "add_space_prefix": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token_id": EOS,
        "eos_token_id": IM_END,
        "eot_token_id": EOS,
    }
    assert known["tokenizer.chat_template"] == CHAT_TEMPLATES["chatml"]
    text = trained(model, tokenizer, Seen())
    plain = values(written(text, tmp_path / "text.gguf"))
    assert plain["tokenizer.ggml.eos_token_id"] == EOS
    assert "tokenizer.chat_template" not in plain


def changed(folder: Path, into: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The tokenizer of `folder` with another definition."""
    into.mkdir()
    definition = json.loads((folder / "tokenizer.json").read_text())
    change(definition)
    (into / "tokenizer.json").write_text(json.dumps(definition))
    (into / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return into


def pieces(folder: Path, *, prefix: bool, without: int = 0, normalized: bool = False) -> Path:
    """A tokenizer in the manner of SentencePiece: pieces of text with scores, and bytes for the
    rest; merges as transformers lists them. without: pairs that are left out of them.
    """
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", space)
    learner.pre_tokenizer = pre_tokenizers.Split(space, "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=90, show_progress=False)
    learner.train_from_iterator(texts(60), trainer)
    learned = sorted(learner.get_vocab().items(), key=lambda one: (len(one[0]) > 1, one[1]))
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += [space, *(word for word, _ in learned if word != space)]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [
        (word[:i], word[i:])
        for word in words[259:]
        for i in range(1, len(word))
        if word[:i] in vocab and word[i:] in vocab
    ]
    made = tokenizers.Tokenizer(
        models.BPE(vocab, merges[without:], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", space)
    made.normalizer = (
        normalizers.Sequence([normalizers.Prepend(space), replace]) if prefix else replace
    )
    if not prefix:
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens([tokenizers.AddedToken("<|tool|>", normalized=normalized)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def test_pieces_of_text_have_scores_in_the_order_of_their_merges(tmp_path: Path) -> None:
    loaded = load_tokenizer(pieces(tmp_path / "pieces", prefix=True))
    found = vocabulary_of(loaded, loaded.vocab_size + 1)
    assert (found.kind, found.cut, found.space_prefix) == ("llama", "default", True)
    assert (found.begins, found.ends, found.merges) == (1, None, [])
    assert found.types[:4] == [2, 3, 3, 6]
    assert found.types[-2:] == [4, 5]
    merged = [score for score in found.scores if score > min(found.scores)]
    assert merged == [-float(i) for i in range(len(merged))]
    assert not vocabulary_of(
        load_tokenizer(pieces(tmp_path / "plain", prefix=False)), 1000
    ).space_prefix


def test_pieces_whose_rules_differ_in_some_texts_are_carried_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metaspace = {"type": "Metaspace", "replacement": "\N{LOWER ONE EIGHTH BLOCK}", "split": False}

    def change(scheme: str) -> Callable[[dict[str, Any]], None]:
        one = metaspace | {"prepend_scheme": scheme}
        return lambda definition: definition.update(normalizer=None, pre_tokenizer=one)

    folder = pieces(tmp_path / "pieces", prefix=True)
    other = load_tokenizer(changed(folder, tmp_path / "always", change("always")))
    assert vocabulary_of(other, 1000).space_prefix
    assert "llama.cpp always puts one" in caplog.text
    with pytest.raises(TokenizerError, match=r"rules .* not known to be llama.cpp's"):
        vocabulary_of(load_tokenizer(changed(folder, tmp_path / "f", change("first"))), 1000)

    def spaces(definition: dict[str, Any]) -> None:
        model, two = definition["model"], "\N{LOWER ONE EIGHTH BLOCK}" * 2
        model["vocab"][two] = number = len(model["vocab"]) + 1
        model["merges"].append([two[0], two[0]])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        definition["added_tokens"].append({"id": number, "content": two, **flags})

    caplog.clear()
    plain = pieces(tmp_path / "plain", prefix=False)
    found = vocabulary_of(load_tokenizer(changed(plain, tmp_path / "spaces", spaces)), 1000)
    assert "takes tokens such as" in caplog.text
    assert found.types[found.tokens.index("  ")] == 4

    def no_tab(definition: dict[str, Any]) -> None:
        vocab = definition["model"]["vocab"]
        vocab["\t"] = vocab.pop("<0x09>")

    vocabulary_of(load_tokenizer(changed(plain, tmp_path / "tab", no_tab)), 1000)  # as Gemma's
    with pytest.raises(TokenizerError, match=r"there is none for \[10\]"):
        vocabulary_of(
            load_tokenizer(
                changed(
                    plain,
                    tmp_path / "byte",
                    lambda one: one["model"]["vocab"].update(
                        {"<0x>": one["model"]["vocab"].pop("<0x0A>")}
                    ),
                )
            ),
            1000,
        )


def test_the_tokenizer_of_mistral_is_carried(shared_data: Path) -> None:
    loaded = load_tokenizer(shared_data / "tokenizers" / "mistral_v1")
    found = vocabulary_of(loaded, 32000)
    assert (found.kind, found.space_prefix, found.begins) == ("llama", True, 1)
    scores = dict(zip(found.tokens, found.scores, strict=True))
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    assert scores[f"{space}t"] > scores["er"] > scores[f"{space}the"] > scores[space * 2]
    # whose merges stand among each other: the first in the text comes first
    assert scores[space * 3] == scores[space * 16] == scores[space * 2] + 1


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTS: dict[str, tuple[list[Any], bool]] = {
    "gpt-2": ([WORDS], False),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), WORDS], False),
    "qwen2": ([pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated"), BYTES], False),
    "llama-bpe": (
        [
            pre_tokenizers.Split(
                tokenizers.Regex(QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"
            ),
            BYTES,
        ],
        True,
    ),
    "smaug-bpe": (
        [
            pre_tokenizers.Split(
                tokenizers.Regex(QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"
            ),
            BYTES,
        ],
        False,
    ),
}


def cut_as(name: str, folder: Path) -> Path:
    """A byte-level tokenizer that cuts words as the models of this name do; it begins texts where
    Llama 3 does.
    """
    steps, ignore_merges = CUTS[name]
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    odd = ["I'VE 1234567 x2  and\n\n  3.14!!\n", "don't  don'T \t12 123 ¼½ ²²"] * 20
    made.train_from_iterator([*texts(60), *odd], trainer)
    if name == "llama-bpe":
        made.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    made.add_tokens(["<|tool|>", " two words"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.mark.parametrize("name", CUTS)
def test_how_text_is_cut_has_llama_cpps_name(name: str, tmp_path: Path) -> None:
    loaded = load_tokenizer(cut_as(name, tmp_path / "tokenizer"))
    found = vocabulary_of(loaded, loaded.vocab_size)
    assert (found.kind, found.cut) == ("gpt2", name)
    assert found.begins == (EOS if name == "llama-bpe" else None)
    assert found.types[-2:] == [4, 4]


FLAGS = ("single_word", "lstrip", "rstrip")


def _unigram(definition: dict[str, Any]) -> None:
    words = [[word, 0.0] for word in definition["model"]["vocab"]]
    definition["model"] = {"type": "Unigram", "unk_id": 0, "vocab": words, "byte_fallback": False}


def _flagged(flag: str) -> Callable[[dict[str, Any]], None]:
    return lambda definition: definition["added_tokens"][1].update({flag: True})


def _with(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda definition: definition.update({key: value})


def _in_model(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda definition: definition["model"].update({key: value})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_unigram, "llama.cpp has no Unigram as transformers has it"),
        *(
            (_flagged(flag), f"llama.cpp does not support ['{flag}'] of the token '<|im_start|>'")
            for flag in FLAGS
        ),
        (_with("normalizer", {"type": "Lowercase"}), "llama.cpp does not know its [{'type': 'Lo"),
        (
            _with(
                "pre_tokenizer",
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            ),
            "it cuts text into words by rules that are not known to be llama.cpp's",
        ),
        (_in_model("ignore_merges", True), "(ignore_merges)"),
        (_in_model("end_of_word_suffix", "</w>"), "does not support end_of_word_suffix ('</w>')"),
        (_with("pre_tokenizer", {"type": "Whitespace"}), "it treats text by rules that are not"),
    ],
    ids=["unigram", *FLAGS, "lowercase", "prefix", "ignore_merges", "suffix", "whitespace"],
)
def test_a_tokenizer_that_cannot_be_carried_is_refused_and_nothing_is_written(
    change: Any, told: str, tokenizer: Path, tmp_path: Path
) -> None:
    other = changed(tokenizer, tmp_path / "other", change)
    run = trained(of_family("llama3", tmp_path / "files"), other)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TokenizerError) as caught:
        written(run, tmp_path / "model.gguf")
    assert told in str(caught.value)
    assert str(other) in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("window", "told"), [(100, True), (1024, False), (4096, False)])
def test_a_window_within_the_longest_row_is_told_to_become_its_length(
    window: int, told: bool, tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = of_family("mistral", tmp_path / "files", sliding_window=window)
    known = values(written(trained(model, tokenizer), tmp_path / "model.gguf"))
    assert known["llama.context_length"] == min(window, 1024)
    said = "support the sliding window of mistral: it computes the same up to 100 tokens"
    assert (said in caplog.text) == ("sliding window" in caplog.text) == told


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
def test_texts_that_are_normalized_before_are_told(
    normalizer: Any, tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_tokenizer(changed(tokenizer, tmp_path / "nfc", _with("normalizer", normalizer)))
    assert vocabulary_of(loaded, loaded.vocab_size).cut
    assert ("texts into Unicode's form NFC" in caplog.text) == (normalizer is not None)


def _mixed(definition: dict[str, Any]) -> None:
    """The first pair of a word that has several goes behind all others."""
    merges = definition["model"]["merges"]
    made = ["".join(pair) for pair in merges]
    merges.append(merges.pop(next(i for i, word in enumerate(made) if made.count(word) > 1)))


def test_pieces_that_a_file_cannot_say_are_refused(tmp_path: Path) -> None:
    loaded = load_tokenizer(pieces(tmp_path / "pieces", prefix=True, without=1))
    with pytest.raises(
        TokenizerError, match=r"its merges leave out .* which llama.cpp would merge"
    ):
        vocabulary_of(loaded, 1000)


def _around(text: str) -> Callable[[dict[str, Any]], None]:
    made = processors.TemplateProcessing(
        single=text, special_tokens=[(one, i) for i, one in enumerate(SPECIAL)]
    )
    holder = tokenizers.Tokenizer(models.BPE())
    holder.post_processor = made
    return _with("post_processor", json.loads(holder.to_str())["post_processor"])


def test_what_stands_around_every_text_is_carried_or_refused(
    tokenizer: Path, tmp_path: Path
) -> None:
    model = of_family("llama3", tmp_path / "files")
    both = changed(tokenizer, tmp_path / "both", _around("<|im_start|> $A <|endoftext|>"))
    path = written(trained(model, both, Seen(max_length=64)), tmp_path / "both.gguf")
    known = values(path)
    keys = ("add_bos_token", "add_eos_token", "bos_token_id", "eos_token_id")
    assert [known[f"tokenizer.ggml.{key}"] for key in keys] == [True, True, 1, EOS]
    with pytest.raises(TokenizerError, match=r"puts token 0 behind every text, .* only put 2"):
        written(trained(model, both), tmp_path / "model.gguf")
    two = changed(tokenizer, tmp_path / "two", _around("<|im_start|> <|im_end|> $A"))
    with pytest.raises(TokenizerError, match=r"puts \['<.im_start.>', '<.im_end.>'\] around"):
        written(trained(model, two), tmp_path / "model.gguf")


def _of(**changed: Any) -> Callable[[Decoder], Decoder]:
    def made(model: Decoder) -> Decoder:
        return Decoder(dataclasses.replace(model.config, **changed), nnx.Rngs(0))

    return made


def _scoring(model: Decoder) -> Decoder:
    model.add_score(0)
    return model


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("llama3", _scoring, "llama.cpp's llama does not support llama with a reward model"),
        ("qwen2.5", _of(head_dim=16), "not support qwen2 with heads that do not fill hidden_size"),
        ("gemma2", _of(attention_soft_cap=None), "not support gemma2 with no soft caps"),
        (
            "gemma2",
            _of(tie_embeddings=False, logit_soft_cap=None),
            "not support gemma2 with no soft caps, a head beside the embeddings",
        ),
        (
            "gemma3",
            _of(attention_soft_cap=5.0),
            "not support gemma3_text with a soft cap of attention",
        ),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(
    family: str, change: Any, told: str, tokenizer: Path, tmp_path: Path
) -> None:
    model = change(of_family(family, tmp_path / "files"))
    with pytest.raises(ConfigError, match="Export without --gguf") as caught:
        written(trained(model, tokenizer), tmp_path / "model.gguf")
    assert told in str(caught.value)
    assert not (tmp_path / "model.gguf").exists()


def test_slower_rotations_of_another_architecture_are_refused(
    tokenizer: Path, tmp_path: Path
) -> None:
    scaling = NINE["llama3"]["rope_scaling"]
    model = of_family("qwen3", tmp_path / "f", rope_parameters=None, rope_scaling=scaling)
    with pytest.raises(
        ConfigError, match=r"does not support qwen3 with rope_scaling of kind llama3"
    ):
        written(trained(model, tokenizer), tmp_path / "model.gguf")


def test_a_family_that_was_not_compared_is_refused_by_name(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ARCHITECTURES, "qwen3")
    model = of_family("qwen3", tmp_path / "files")
    with pytest.raises(ConfigError, match=r"qwen3 was not compared with llama.cpp .have: llama"):
        written(trained(model, tokenizer), tmp_path / "model.gguf")


def test_what_float16_cannot_hold_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    model = of_family("llama3", tmp_path / "files")
    model.embedding[...] = model.embedding[...].at[3, 3].set(1e6)
    run = trained(model, tokenizer)
    with pytest.raises(ConfigError, match=r"--dtype: .*embed_tokens.weight .* float16 cannot hold"):
        written(run, tmp_path / "model.gguf", "float16")
    assert not (tmp_path / "model.gguf").exists()
    assert arrays(written(run, tmp_path / "m.gguf", "bfloat16"))["token_embd.weight"].max() > 9e5


def test_what_else_cannot_be_written_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    model, there = of_family("llama3", tmp_path / "files"), tmp_path / "there.gguf"
    there.write_text("mine")
    run = trained(model, tokenizer)
    with pytest.raises(ConfigError, match=r"there.gguf: is there already"):
        written(run, there)
    assert there.read_text() == "mine"
    with pytest.raises(ConfigError, match="the run names none"):
        written(dataclasses.replace(run, tokenizer=None), tmp_path / "model.gguf")
    small = of_family("llama3", tmp_path / "small", vocab_size=200)
    with pytest.raises(TokenizerError, match=r"has 29\d tokens, and the model 200"):
        written(trained(small, tokenizer), tmp_path / "model.gguf")
    many = dataclasses.replace(CHAT, stop_token_ids=(IM_END, 1, 5))
    with pytest.raises(TokenizerError, match="4 tokens end a text"):
        written(trained(model, tokenizer, many), tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("arguments", "missing", "told"),
    [
        (["--gguf"], "gguf", "pip install 'easypipe[gguf]'"),
        (["--gguf", "--check"], "llama_cpp", "--check: needs the package llama_cpp"),
        (["--gguf", "--adapters"], None, "--adapters: a GGUF file contains a whole model"),
        (["--dtype", "float16"], None, "--dtype: has no effect without --gguf"),
    ],
)
def test_the_command_says_what_it_needs_before_a_model_is_read(
    arguments: list[str],
    missing: str | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if missing is not None:
        monkeypatch.setitem(sys.modules, missing, None)
    assert main(["export", str(tmp_path), str(tmp_path / "out"), *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps over conversations."""
    talks = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} it is"}]
        for i in range(60)
    ]
    one = DatasetConfig(
        name="talks",
        data_files={"messages": talks},
        tokenizer=str(tokenizer),
        content_field="messages",
        chat_template="chatml",
    )
    shape = ModelConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2
    )
    folder = tmp_path_factory.mktemp("run")
    data = PipelineConfig(datasets=(one,), seed=7)
    Trainer(shape, data=data, output_dir=folder, seq_length=48, batch_size=4, steps=2).run()
    return folder


def test_the_command_writes_the_model_of_a_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    assert main(["export", str(run), str(path), "--gguf", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"model of step 2: {path}\n"
    known = values(path)
    assert known["general.file_type"] == 32
    assert known["llama.context_length"] == 48
    assert known["tokenizer.ggml.eos_token_id"] == IM_END
    assert known["tokenizer.chat_template"] == CHAT_TEMPLATES["chatml"]


@needs_llama
def test_the_command_checks_what_it_wrote(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "model.gguf"), "--gguf", "--check"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(
        "llama.cpp opens it as it was trained: equal greedy tokens, texts and ends\n"
    )


@needs_llama
@pytest.mark.slow
@pytest.mark.parametrize("family", NINE)
def test_llama_cpp_writes_what_the_run_writes(family: str, tokenizer: Path, tmp_path: Path) -> None:
    run = trained(of_family(family, tmp_path / "files"), tokenizer)
    path = written(run, tmp_path / "model.gguf", "float32")
    assert list(gguf_differences(run, path)) == []


@needs_llama
@pytest.mark.parametrize("name", [*CUTS, "pieces", "pieces without prefix"])
def test_llama_cpp_makes_the_same_tokens(name: str, tmp_path: Path) -> None:
    if name in CUTS:
        folder = cut_as(name, tmp_path / "tokenizer")
    else:
        folder = pieces(tmp_path / "tokenizer", prefix=name == "pieces")
    size = load_tokenizer(folder).vocab_size + 3
    model = of_family("llama3", tmp_path / "files", vocab_size=size)
    run = trained(model, folder, Seen(max_length=512))
    assert list(gguf_differences(run, written(run, tmp_path / "model.gguf"))) == []
    llama_cpp = pytest.importorskip("llama_cpp")
    opened = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    loaded = load_tokenizer(folder)
    odd = [
        "",
        " ",
        "  \n\n x",
        "I'VE don'T we'll 12 1234567 ¼ ²3",
        "<s>a</s> <|tool|>b<|endoftext|> c two words",
        "\u00a0\u3000x\u200d😶\u200d🌫️ é e\u0301",
        *texts(20),
    ]
    for text in odd:
        found = opened.tokenize(text.encode(), add_bos=True, special=True)
        assert found == loaded.reference_encode(text, whole=True), text


@needs_llama
@pytest.mark.parametrize("name", ["gpt2", "mistral_v1", "olmo_neox"])
def test_llama_cpp_makes_the_same_tokens_as_published_tokenizers(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    loaded = load_tokenizer(folder := shared_data / "tokenizers" / name)
    model = of_family("llama3", tmp_path / "files", vocab_size=loaded.vocab_size)
    run = trained(model, folder, Seen(max_length=512))
    path = written(run, tmp_path / "model.gguf")
    opened = pytest.importorskip("llama_cpp").Llama(str(path), vocab_only=True, verbose=False)
    paragraphs = Path(__file__).read_text().split("\n\n")
    odd = ["", "  a", "   b \t x\n\n\n y", "\t123 ünïcödé 中文 😶\u200d🌫️ ½²", "a" + " " * 50 + "b"]
    for text in [*paragraphs, *odd, "<s> x</s>", "[INST] hi [/INST]", "a\u200bb \u00a0c"]:
        found = opened.tokenize(text.encode(), add_bos=True, special=True)
        assert found == loaded.reference_encode(text, whole=True), text


@needs_llama
@pytest.mark.slow
def test_what_llama_cpp_would_do_in_another_way_is_told(tokenizer: Path, tmp_path: Path) -> None:
    run = trained(of_family("llama3", tmp_path / "files"), tokenizer)
    path = written(run, tmp_path / "model.gguf")
    other = of_family("llama3", tmp_path / "files")
    other.embedding[...] = other.embedding[...][::-1]
    told = list(gguf_differences(dataclasses.replace(run, model=other), path))
    assert len(told) == 3
    assert all(one.startswith("greedy tokens behind ") for one in told)
    assert f" of {STEPS} is " in told[0]
    asked = Seen(chat_template=CHAT_TEMPLATES["zephyr"], stop_token_ids=(7,), max_length=512)
    told = list(gguf_differences(dataclasses.replace(run, seen=asked), path))
    assert "generation does not end at the token 7, and the run's does" in told
    assert "the chat template is not the run's" in told
    (tmp_path / "other").mkdir()
    train_bpe(texts(20), VOCAB - 20, SPECIAL, tmp_path / "other")
    told = list(gguf_differences(dataclasses.replace(run, tokenizer=str(tmp_path / "other")), path))
    assert any(one.startswith("the text 'Hello, world!") for one in told)
