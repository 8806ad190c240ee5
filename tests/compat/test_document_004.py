"""Document 004 (shared/spec/004): data modules, the registry, the factory; its examples, with jax
arrays in place of tensors.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_support import chat_tokenizer, talk
from easypipe import (
    CollatorRegistry,
    DataLoaderConfig,
    DataLoaderFactory,
    DataModuleProtocol,
    DatasetConfig,
    LoadStageConfig,
    OrderConfig,
    Pipeline,
    PipelineConfig,
    PreprocessedDataset,
    PromptConfig,
    PromptEngine,
    TaskSpec,
    TokenizerConfig,
    UniversalDataModule,
    create_collate_fn,
    load_tokenizer,
    train_tokenizer,
)
from easypipe.core.errors import ConfigError, TokenizerError
from easypipe.loader.loader import Loader
from laws import assert_exact_resume, assert_one_way, assert_same_batches
from pipelines import texts, tokenizer
from strategies import examples

WIKI = [{"text": text} for text in texts(50)]
TOKENIZER = TokenizerConfig(name_or_path=tokenizer(), return_attention_mask=True)


class MyDataset:
    """What torch calls a map-style dataset."""

    def __init__(self, count: int = 100) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> dict[str, Any]:
        if not 0 <= idx < self.count:
            raise IndexError(idx)
        return {
            "pixel_values": jax.random.normal(jax.random.key(idx), (3, 8, 8)),
            "labels": idx % 10,
        }


class TensorDataset:
    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, idx: int) -> tuple[Any, ...]:
        return tuple(array[idx] for array in self.arrays)


def pipeline_of(
    rows: Any, name: str, seed: int, *, batch_size: int = 8, shuffle: bool, **load: Any
) -> Loader:
    dataset = DatasetConfig(name=name, data_files=rows, tokenizer=TOKENIZER, on_error="skip")
    pipeline = Pipeline(
        PipelineConfig(datasets=(dataset,), seed=seed, order=OrderConfig(shuffle=shuffle))
    ).source()
    if "input_ids" not in pipeline.get_data()[name].schema.names:
        pipeline.tokenize()
    return pipeline.load(LoadStageConfig(batch_size=batch_size, **load)).build()


def test_f31_any_class_with_two_loaders_is_a_data_module() -> None:
    class MyDataModule:
        def train_dataloader(self) -> Loader:
            return DataLoaderFactory().create_dataloader(
                MyDataset(), DataLoaderConfig(batch_size=32)
            )

        def val_dataloader(self) -> Loader:
            return DataLoaderFactory().create_dataloader(
                MyDataset(), DataLoaderConfig(batch_size=32)
            )

    dm: DataModuleProtocol = MyDataModule()
    assert isinstance(dm, DataModuleProtocol)
    assert isinstance(UniversalDataModule(MyDataset()), DataModuleProtocol)
    assert not isinstance(MyDataset(), DataModuleProtocol)


def test_f32_selection_as_printed() -> None:
    registry = CollatorRegistry.get_instance()
    task_spec = TaskSpec.vision_tiny()
    collator = registry.get_collator(task_spec=task_spec)
    assert collator([MyDataset()[0]])["pixel_values"].shape == (1, 8, 8, 3)
    task_spec = TaskSpec.lm_tiny()
    collator = registry.get_collator(task_spec=task_spec, tokenizer=load_tokenizer(tokenizer()))
    assert set(collator(WIKI[:3])) >= {"input_ids", "attention_mask", "labels"}
    collator = registry.get_collator(
        collator_name="vision", normalize=True, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5]
    )
    assert collator([{"pixel_values": np.ones((3, 8, 8))}])["pixel_values"].max() == 1


def test_f32_custom_registration_as_printed() -> None:
    registry = CollatorRegistry()

    @registry.register("audio", modality="audio", description="Audio collator with spectrogram")
    def create_audio_collator(task_spec=None, sample_rate=16000, n_fft=512):
        """Create audio collator for speech recognition."""

        class AudioCollator:
            def __init__(self, sample_rate, n_fft):
                self.sample_rate = sample_rate
                self.n_fft = n_fft

            def __call__(self, batch):
                waveforms = jnp.stack([item["waveform"] for item in batch])
                spectrograms = jnp.abs(jnp.fft.rfft(waveforms, n=self.n_fft)) ** 2
                labels = jnp.array([item["label"] for item in batch])
                return {"spectrograms": spectrograms, "labels": labels}

        return AudioCollator(sample_rate, n_fft)

    audio_task_spec = TaskSpec(
        name="speech_recognition", modality="audio", task_type="classification"
    )
    collator = registry.get_collator(task_spec=audio_task_spec, sample_rate=22050)
    assert collator.sample_rate == 22050
    assert collator([{"waveform": jnp.ones(600), "label": 1}] * 2)["spectrograms"].shape == (2, 257)

    @registry.register("multimodal", modality="vision", description="Vision-language collator")
    def create_multimodal_collator(task_spec=None, tokenizer=None, normalize=True):
        """Create collator for vision-language tasks (e.g., image captioning)."""
        vision_collator = registry.get_collator(collator_name="vision", normalize=normalize)
        text_collator = registry.get_collator(collator_name="text", tokenizer=tokenizer)

        def multimodal_collate_fn(batch):
            vision_batch = [{"pixel_values": item["pixel_values"]} for item in batch]
            text_batch = [{"input_ids": item["input_ids"]} for item in batch]
            vision_out = vision_collator(vision_batch)
            text_out = text_collator(text_batch)
            return {
                "pixel_values": vision_out["pixel_values"],
                "input_ids": text_out["input_ids"],
                "attention_mask": text_out["attention_mask"],
                "labels": text_out["labels"],
            }

        return multimodal_collate_fn

    batch = registry.get_collator(collator_name="multimodal", tokenizer=tokenizer())(
        [MyDataset()[0] | {"input_ids": [1, 2]}] * 2
    )
    assert batch["labels"].tolist() == [[2, -100]] * 2
    assert registry.find(TaskSpec.vision_tiny()).name == "vision"  # which has the modality's name


def test_f33_the_factory_as_printed(caplog: pytest.LogCaptureFixture) -> None:
    factory = DataLoaderFactory()
    dataset = TensorDataset(jax.random.normal(jax.random.key(0), (100, 32)))
    config = DataLoaderConfig(
        batch_size=32, shuffle=True, num_workers=2, pin_memory=True, prefetch_factor=2, seed=42
    )
    with caplog.at_level(logging.WARNING, "easypipe"):
        loader = factory.create_dataloader(dataset, config)
    assert "pin_memory=True changes nothing" in caplog.text
    assert [batch[0].shape for batch in loader] == [(32, 32)] * 3
    caplog.clear()
    config = DataLoaderConfig(
        batch_size=32, pin_memory=None, prefetch_factor=2, persistent_workers=None
    )
    assert [batch[0].shape for batch in factory.create_dataloader(dataset, config)] == [
        (32, 32)
    ] * 3 + [(4, 32)]
    assert not caplog.records
    config = DataLoaderConfig(batch_size=32, shuffle=True, seed=42, num_workers=0)
    loader1 = factory.create_dataloader(dataset, config)
    loader2 = factory.create_dataloader(dataset, config)
    batch1 = next(iter(loader1))
    batch2 = next(iter(loader2))
    assert jnp.array_equal(batch1[0], batch2[0])


def test_f34_from_a_hugging_face_dataset_as_printed() -> None:
    from datasets import Dataset

    dataset = Dataset.from_list([*WIKI, {"text": ""}])
    data_module = UniversalDataModule(
        train_data=dataset,
        task_spec=TaskSpec.lm_tiny(),
        tokenizer=load_tokenizer(tokenizer()),
        batch_size=8,
        val_split=0.1,  # 10% validation split
        num_workers=2,
        seed=42,
    )
    train_loader = data_module.train_dataloader()
    val_loader = data_module.val_dataloader()
    batches = []
    for batch in train_loader:
        input_ids = batch["input_ids"]
        labels = batch["labels"]
        assert input_ids.shape == labels.shape == batch["attention_mask"].shape
        batches.append(batch)
    assert val_loader is not None
    assert sum(batch["input_ids"].shape[0] for batch in val_loader) == 5
    splits = data_module.splits
    assert_one_way(
        batches,
        pipeline_of(dataset.select(splits.train.tolist()), "train", 42, shuffle=True),
        what="UniversalDataModule, train",
    )
    spelled = pipeline_of(
        dataset.select(splits.val.tolist()), "val", 42, shuffle=False, drop_last=False
    )
    assert_one_way(val_loader, spelled, what="UniversalDataModule, val")


def test_law_9_lists_of_arrays_with_and_without_a_tokenizer() -> None:
    arrays = [
        np.random.Generator(np.random.PCG64(i)).integers(0, 300, 5 + i % 9) for i in range(40)
    ]
    rows = [{"input_ids": array} for array in arrays]
    spelled = pipeline_of(rows, "train", 42, shuffle=True)
    assert_one_way(
        UniversalDataModule(
            arrays, tokenizer=tokenizer(), batch_size=8, seed=42
        ).train_dataloader(),
        spelled,
        what="token arrays",
    )
    bare = UniversalDataModule([jnp.asarray(array) for array in arrays], batch_size=8, seed=42)
    assert load_tokenizer(tokenizer()).pad_token_id is None  # so both pad with 0
    assert_one_way(bare.train_dataloader(), spelled, what="arrays of jax, without a tokenizer")


def test_law_9_a_preprocessed_dataset() -> None:
    prompt = PromptConfig(format_type="prompt_completion")
    rows = [{"prompt": text, "completion": " yes"} for text in texts(20)]
    module = UniversalDataModule(
        PreprocessedDataset(rows, PromptEngine(tokenizer(), prompt)),
        batch_size=8,
        seed=1,
        val_split=0.25,
    )
    chosen = [rows[i] for i in module.splits.train]
    dataset = DatasetConfig(name="train", data_files=chosen, prompt=prompt, tokenizer=TOKENIZER)
    spelled = (
        Pipeline(PipelineConfig(datasets=(dataset,), seed=1))
        .source()
        .tokenize()
        .load(LoadStageConfig(batch_size=8))
        .build()
    )
    assert_one_way(
        module.train_dataloader(), spelled, what="UniversalDataModule over PreprocessedDataset"
    )


def test_f34_from_a_torch_like_dataset_as_printed() -> None:
    data_module = UniversalDataModule(
        train_data=MyDataset(),
        task_spec=TaskSpec.vision_tiny(),
        batch_size=32,
        val_split=0.2,
        seed=42,
    )
    train_loader = data_module.train_dataloader()
    batches = list(train_loader)
    assert [batch["pixel_values"].shape for batch in batches] == [(32, 8, 8, 3)] * 2
    assert_exact_resume(data_module.train_dataloader, 2, stops=(0, 1))
    guessed = UniversalDataModule(train_data=MyDataset(), batch_size=32, val_split=0.2, seed=42)
    assert guessed.task_spec == TaskSpec.vision_tiny()
    assert_same_batches(batches, guessed.train_dataloader())


def test_f34_real_torch_datasets() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import TensorDataset as Torchs

    data = Torchs(torch.arange(20.0).reshape(10, 2), torch.arange(10))
    [(x, y)] = list(
        UniversalDataModule(data, batch_size=10, seed=1, num_workers=0).train_dataloader()
    )
    assert isinstance(x, np.ndarray)
    np.testing.assert_array_equal(x[:, 0], y * 2)
    tokens = [torch.randint(0, 1000, (16,)) for _ in range(50)]
    module = UniversalDataModule(train_data=tokens, batch_size=32, val_split=0.2, seed=42)
    assert next(iter(module.train_dataloader()))["labels"].shape == (32, 16)


def test_f34_with_an_external_validation_set_as_printed(caplog: pytest.LogCaptureFixture) -> None:
    data_module = UniversalDataModule(
        train_data=MyDataset(100),
        val_data=MyDataset(40),  # External val set
        task_spec=TaskSpec.vision_tiny(),
        batch_size=16,
        val_split=0.0,  # Ignored when val_data provided
        seed=42,
    )
    val = data_module.val_dataloader()
    assert val is not None
    assert [batch["labels"].tolist() for batch in val] == [
        [i % 10 for i in range(s, min(s + 16, 40))] for s in (0, 16, 32)
    ]
    assert len(data_module.train_dataloader()) == 6
    assert not caplog.records
    UniversalDataModule(MyDataset(), MyDataset(), val_split=0.5, seed=1)
    assert "val_split=0.5 has no effect: val_data is given" in caplog.text


def test_f34_legacy_lists_as_printed() -> None:
    train_data = [jax.random.randint(jax.random.key(i), (128,), 0, 1000) for i in range(50)]
    data_module = UniversalDataModule(train_data=train_data, batch_size=32, val_split=0.2, seed=42)
    batch = next(iter(data_module.train_dataloader()))
    assert batch["input_ids"].shape == (32, 128)
    np.testing.assert_array_equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])


@examples(25)
@given(st.integers(2, 300), st.floats(0.01, 0.99), st.integers(0, 9))
def test_splits_are_disjoint_whole_and_the_seeds(rows: int, val_split: float, seed: int) -> None:
    held_out = round(rows * val_split)
    data = np.arange(rows, dtype=np.float32)
    if held_out in (0, rows):
        with pytest.raises(ConfigError, match="leaves none to"):
            UniversalDataModule(TensorDataset(data), val_split=val_split, seed=seed)
        return
    splits = UniversalDataModule(TensorDataset(data), val_split=val_split, seed=seed).splits
    assert len(splits.val) == held_out
    assert sorted([*splits.train.tolist(), *splits.val.tolist()]) == list(range(rows))
    again = UniversalDataModule(TensorDataset(data), val_split=val_split, seed=seed).splits
    np.testing.assert_array_equal(splits.val, again.val)
    if rows > 100 and 10 < held_out < rows - 10:
        other = UniversalDataModule(TensorDataset(data), val_split=val_split, seed=seed + 1).splits
        assert splits.val.tolist() != other.val.tolist()


@pytest.mark.parametrize("val_split", [0, 0.25])
def test_arrays_of_tokens_by_number_are_rows_of_tokens(val_split: float) -> None:
    tokens = np.arange(1, 41).reshape(8, 5)

    class Rows:
        fingerprint = "own"

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> np.ndarray:
            return tokens[index]

    options: dict[str, Any] = {"batch_size": 2, "seed": 1, "val_split": val_split}
    modules = [UniversalDataModule(rows, **options) for rows in (list(tokens), tokens, Rows())]
    wanted, *others = (
        [*module.train_dataloader(), *(module.val_dataloader() or ())] for module in modules
    )
    for found in others:
        assert_same_batches(found, wanted)


@pytest.mark.parametrize("row", [(3, 4), (np.zeros((2, 2)), 1), [np.zeros((2, 2)), 1], "ab", {}])
def test_rows_that_are_no_arrays_of_tokens_reach_a_collator_as_they_are(row: Any) -> None:
    module = UniversalDataModule([row] * 2, batch_size=2, seed=1, collate_fn=lambda some: some)
    assert [[given is row for given in some] for some in module.train_dataloader()] == [[True] * 2]


def test_an_unseeded_module_draws_a_seed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "easypipe"):
        module = UniversalDataModule(MyDataset(), val_split=0.2)
    assert f"no seed was given, drew {module.seed}" in caplog.text
    assert_same_batches(
        module.train_dataloader(),
        UniversalDataModule(MyDataset(), val_split=0.2, seed=module.seed).train_dataloader(),
    )


def test_other_collators_and_tasks() -> None:
    masked = TaskSpec(
        name="mlm", modality="text", task_type="masked_lm", options={"mask_token_id": 3}
    )
    batch = next(
        iter(
            UniversalDataModule(
                WIKI, task_spec=masked, tokenizer=tokenizer(), batch_size=8, seed=1
            ).train_dataloader()
        )
    )
    assert (batch["input_ids"] == 3).any()
    mine = UniversalDataModule(
        [np.arange(5)] * 9, batch_size=4, seed=1, collate_fn=create_collate_fn(0, max_length=7)
    ).train_dataloader()
    assert next(iter(mine))["labels"].shape == (4, 7)
    cut = UniversalDataModule(
        WIKI, tokenizer=tokenizer(), max_length=6, batch_size=8, seed=1
    ).train_dataloader()
    assert max(batch["input_ids"].shape[1] for batch in cut) == 6
    assert UniversalDataModule(MyDataset(), seed=1).val_dataloader() is None


def test_law_9_conversations_are_read_as_the_pipeline_reads_them() -> None:
    rows = [{"messages": talk(f"{i} and {i}?", f"It is {2 * i}.")} for i in range(20)]
    module = UniversalDataModule(rows, tokenizer=chat_tokenizer(), batch_size=4, seed=3)
    named = TokenizerConfig(name_or_path=chat_tokenizer(), return_attention_mask=True)
    dataset = DatasetConfig(
        name="train", data_files=rows, content_field="messages", tokenizer=named
    )
    spelled = (
        Pipeline(PipelineConfig(datasets=(dataset,), seed=3))
        .source()
        .tokenize()
        .load(LoadStageConfig(batch_size=4))
        .build()
    )
    assert_one_way(module.train_dataloader(), spelled, what="rows of messages")
    labels = next(iter(module.train_dataloader()))["labels"]
    assert load_tokenizer(chat_tokenizer()).decode(labels[0][labels[0] >= 0]).startswith("It is ")


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
@pytest.mark.parametrize("streaming", [False, True])
def test_prompts_of_tokenized_rows_are_no_targets_as_in_a_pipeline(
    mask: str, streaming: bool
) -> None:
    """Without a tokenizer a collator makes the batches, with one the Pipeline does."""
    rows = [
        {"input_ids": [4 + i, 5, 6, 7, 8][: 3 + i % 3], mask: [0, 0, 1, i % 2, 1][: 3 + i % 3]}
        for i in range(12)
    ]
    options: dict[str, Any] = {"batch_size": 4, "seed": 3}
    plain = UniversalDataModule(rows, **options).train_dataloader()
    if not streaming:
        wanted = UniversalDataModule(rows, tokenizer=tokenizer(), **options).train_dataloader()
        assert_same_batches(plain, wanted)
    else:
        collate = CollatorRegistry.get_instance().get_collator(TaskSpec.lm_tiny())
        config = DataLoaderConfig(batch_size=12, collate_fn=collate)

        class Forward:
            def __iter__(self):
                return iter(rows)

        [batch] = DataLoaderFactory().create_dataloader(Forward(), config)
        kept = [[i for i, m in zip(r["input_ids"], r[mask], strict=True) if m] for r in rows]
        assert [own[own != -100].tolist() for own in batch["labels"]] == kept


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_training_rows_keep_their_order_without_shuffle(tokens: bool, shuffle: bool) -> None:
    rows = [{"input_ids": [4 + i, 5]} for i in range(10)]
    module = UniversalDataModule(
        rows,
        tokenizer=tokenizer() if tokens else None,
        shuffle=shuffle,
        batch_size=2,
        val_split=0.2,
        seed=3,
    )
    loader = module.train_dataloader()
    wanted = (4 + module.splits.train).tolist()
    passes = [[i for batch in loader for i in batch["input_ids"][:, 0].tolist()] for _ in range(2)]
    assert [sorted(found) for found in passes] == [wanted, wanted]
    assert [found == wanted for found in passes] == [not shuffle, not shuffle]


def test_a_bad_first_row_of_a_preprocessed_dataset_is_left_out() -> None:
    engine = PromptEngine(tokenizer(), PromptConfig(format_type="text"))
    options: dict[str, Any] = {"batch_size": 5, "seed": 3, "shuffle": False}
    module = UniversalDataModule(PreprocessedDataset([{"text": " "}, *WIKI], engine), **options)
    rows = UniversalDataModule(PreprocessedDataset(WIKI, engine), **options)
    assert_same_batches(module.train_dataloader(), list(rows.train_dataloader()))


def test_tokenizers_of_other_faces_and_libraries(tmp_path: Path) -> None:
    rows = [{"text": text} for text in texts(40)]
    own = train_tokenizer(rows, 300, tmp_path / "t")
    wanted = list(
        UniversalDataModule(
            rows, tokenizer=str(tmp_path / "t"), batch_size=8, seed=1
        ).train_dataloader()
    )
    assert_same_batches(
        UniversalDataModule(rows, tokenizer=own, batch_size=8, seed=1).train_dataloader(), wanted
    )

    class Theirs:
        name_or_path = str(tmp_path / "t")

        def __init__(self, more: int) -> None:
            self.more = more

        def get_vocab(self) -> dict[str, int]:
            return {str(i): i for i in range(own.get_vocab_size() + self.more)}

    assert_same_batches(
        UniversalDataModule(rows, tokenizer=Theirs(0), batch_size=8, seed=1).train_dataloader(),
        wanted,
    )
    with pytest.raises(
        ConfigError,
        match=r"tokenizer: it has 301 tokens, and .*t, which it names, has 300\. Write it",
    ):
        UniversalDataModule(rows, tokenizer=Theirs(1), batch_size=8, seed=1).train_dataloader()
    with pytest.raises(TokenizerError, match="Theirs does not name a tokenizer"):
        PromptEngine(Theirs(0))  # pyright: ignore[reportArgumentType]
    assert (
        PromptEngine(tmp_path / "t", PromptConfig(format_type="text"))
        .encode(rows[0])["input_ids"]
        .size
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train_data": [{"body": "a"}], "tokenizer": "x"},
            r"tokenizer: has no effect: .*have: body\)\. Name the column of text 'text'",
        ),
        (
            {"train_data": [{"messages": []}]},
            "tokenizer: the rows are text, but no tokenizer is given",
        ),
        ({"val_split": 1.0}, "val_split: 1.0 is not a share of the rows"),
        ({"val_split": "a"}, "val_split: 'a' is not a share of the rows"),
        (
            {"train_data": WIKI, "tokenizer": "x", "max_length": 5, "collate_fn": list},
            "max_length: has no effect: collate_fn makes the batches. Cut the texts there.",
        ),
        ({"train_data": []}, "train_data: has no rows"),
        ({"train_data": iter([1])}, "train_data: list_iterator does not return rows by number"),
        (
            {"batch_size": 101},
            "load.batch_size: 101, but 'loader of MyDataset' has 100 rows: no batch is ever full",
        ),
        ({"train_data": object()}, "train_data: object does not return rows by number"),
        (
            {"train_data": {"train": [1]}},
            r"train_data: dict holds columns or splits by name.*have: train",
        ),
        ({"train_data": WIKI}, "tokenizer: the rows are text, but no tokenizer is given"),
        ({"tokenizer": "x"}, "tokenizer: has no effect: the collator 'vision' does not take it"),
        ({"seed": None, "world_size": 2}, "seed: every rank would draw its own, and read other"),
        ({"max_length": 5}, "max_length: cuts texts that are encoded here"),
        ({"batchsize": 5}, "batchsize: unknown key"),
        (
            {"task_spec": TaskSpec.lm_tiny(), "tokenizer": 7, "train_data": WIKI},
            "tokenizer: int names no tokenizer",
        ),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UniversalDataModule(**({"train_data": MyDataset(), "seed": 1} | options)).train_dataloader()


def test_a_tokenizer_of_rows_without_a_text_that_is_known_is_for_an_own_collator() -> None:
    rows = [{"sentence": f"row {i}"} for i in range(20)]
    options: dict[str, Any] = {"tokenizer": tokenizer(), "batch_size": 4, "seed": 1}
    with pytest.raises(ConfigError, match=r"tokenizer: has no effect: .*Name the column of text"):
        UniversalDataModule(rows, **options)
    own = UniversalDataModule(rows, collate_fn=lambda some: {"n": np.array([len(some)])}, **options)
    assert [batch["n"].tolist() for batch in own.train_dataloader()] == [[4]] * 5


def test_state_is_kept_beside_a_checkpoint_as_the_document_does() -> None:
    data_module = UniversalDataModule(MyDataset(), batch_size=10, seed=42)
    loader = data_module.train_dataloader()
    wanted = list(data_module.train_dataloader())
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    custom_state = {"data_module_seed": data_module.seed, "loader": loader.state().to_json()}
    again = UniversalDataModule(
        MyDataset(), batch_size=10, seed=custom_state["data_module_seed"]
    ).train_dataloader()
    again.restore(custom_state["loader"])
    assert_same_batches(again, wanted[4:])


def test_the_documents_profile_runs() -> None:
    train_loader = UniversalDataModule(MyDataset(), batch_size=32, seed=1).train_dataloader()
    start = time.time()
    for _ in train_loader:
        pass
    dataloader_time = time.time() - start
    start = time.time()
    for _ in train_loader:
        time.sleep(0.01)  # Simulated step
    total_time = time.time() - start
    assert dataloader_time > 0
    assert total_time > 0.03
