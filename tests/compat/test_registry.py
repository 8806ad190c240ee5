"""Collators by name and task, one's own among them."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from easypipe import CollatorRegistry, TaskSpec
from easypipe.compat.collators import default_collate
from easypipe.core.errors import ConfigError, SourceError
from pipelines import tokenizer

TOKENS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]


def task(modality: str, task_type: str = "classification", **options: object) -> TaskSpec:
    return TaskSpec(name="mine", modality=modality, task_type=task_type, options=options)


def test_there_is_one_registry_in_a_process():
    assert CollatorRegistry.get_instance() is CollatorRegistry.get_instance()
    assert CollatorRegistry() is not CollatorRegistry.get_instance()
    assert set(CollatorRegistry().describe()) == {
        "default",
        "masked_lm",
        "multimodal",
        "seq2seq",
        "text",
        "vision",
    }
    assert all(CollatorRegistry().describe().values())


def test_f32_tasks_find_their_collators():
    registry = CollatorRegistry()
    assert registry.find(TaskSpec.lm_tiny()).name == "text"
    assert registry.find(TaskSpec.vision_tiny()).name == "vision"
    for task_type in ("masked_lm", "seq2seq"):
        assert registry.find(task("text", task_type)).name == task_type
    assert registry.find(task("multimodal")).name == "multimodal"
    assert registry.find().name == "default"


def test_built_ins_make_batches():
    registry = CollatorRegistry()
    assert (
        registry.get_collator(TaskSpec.lm_tiny(), tokenizer=tokenizer())(
            [{"text": "the fox"}, *TOKENS]
        )["labels"].shape[0]
        == 3
    )
    assert registry.get_collator(collator_name="text", max_length=4)(TOKENS)["input_ids"].shape == (
        2,
        4,
    )
    assert registry.get_collator(task("text", "masked_lm"), mask_token_id=9, vocab_size=10)(TOKENS)[
        "labels"
    ].shape == (2, 3)
    hidden = {"mask_token_id": 9, "vocab_size": 10, "max_length": 2}
    with pytest.raises(SourceError, match="3 tokens do not fit max_length 2"):
        registry.get_collator(task("text", "masked_lm"), **hidden)(TOKENS)
    made = registry.get_collator(task("text", "seq2seq"), decoder_start_token_id=0)(
        [{"input_ids": [1], "labels": [2]}]
    )
    assert made["decoder_input_ids"].tolist() == [[0]]
    image = np.zeros((4, 4, 3), np.uint8)
    assert (
        registry.get_collator(
            collator_name="vision", normalize=True, mean=[0.5] * 3, std=[0.5] * 3
        )([(image, 1)])["pixel_values"].min()
        == -1
    )
    both = registry.get_collator(task("multimodal"), tokenizer=tokenizer(), normalize=False)(
        [{"image": image, "text": "a fox"}]
    )
    assert set(both) == {
        "pixel_values",
        "input_ids",
        "labels",
        "segment_ids",
        "position_ids",
        "attention_mask",
    }
    short = registry.get_collator(task("multimodal"), tokenizer=tokenizer(), max_length=2)
    assert short([{"image": image, "text": "a fox runs"}])["input_ids"].shape == (1, 2)
    lists = registry.get_collator(task("multimodal"), return_tensors=False)
    made = lists([{"image": image, "input_ids": [1, 2]}])
    assert {type(column) for column in made.values()} == {list}
    assert registry.get_collator() is default_collate


def test_options_of_a_task_are_its_collators():
    spec = task("vision", image_size=2, normalize=False)
    registry = CollatorRegistry()
    image = np.zeros((4, 4, 3), np.uint8)
    assert registry.get_collator(spec)([(image, 1)])["pixel_values"].shape == (1, 2, 2, 3)
    assert registry.get_collator(spec, image_size=3)([(image, 1)])["pixel_values"].shape == (
        1,
        3,
        3,
        3,
    )


def test_a_modality_of_ones_own(caplog: pytest.LogCaptureFixture):
    registry = CollatorRegistry()
    with caplog.at_level(logging.WARNING, "easypipe"):
        assert registry.get_collator(task("audio")) is default_collate
    assert (
        "task 'mine': no collator for modality 'audio'; rows are stacked as they are" in caplog.text
    )

    @registry.register("spectrogram", modality="audio", description="spectrograms")
    def first(task_spec: TaskSpec | None = None, rate: int = 16):
        return lambda rows: {"rate": rate, "task": task_spec}

    assert registry.get_collator(task("audio"), rate=8)([])["rate"] == 8
    assert registry.get_collator(task("audio"))([])["task"].name == "mine"

    @registry.register("waveform", modality="audio", task_type="tagging")
    def second():
        """Waves."""
        return lambda rows: "waves"

    assert registry.find(task("audio")).name == "spectrogram"
    assert registry.get_collator(task("audio", "tagging"))([]) == "waves"
    assert registry.describe()["waveform"] == "Waves."
    registry.register("third", modality="audio")(lambda: None)
    with pytest.raises(
        ConfigError,
        match=r"several collators fit modality 'audio' .* \(have: spectrogram, third\). Choose one "
        r"by collator_name",
    ):
        registry.find(task("audio"))
    assert registry.find(task("audio"), "third").name == "third"


def test_names_collide_unless_it_is_the_same_function_or_replaces(caplog: pytest.LogCaptureFixture):
    registry = CollatorRegistry()

    def mine():
        return default_collate

    def others():
        return default_collate

    registry.register("mine", modality="audio")(mine)
    registry.register("mine", modality="audio")(mine)  # a cell of a notebook, run again
    with pytest.raises(
        ConfigError,
        match=r"register\('mine'\): .*mine has this name already. Choose another name, or pass "
        r"replace=True",
    ):
        registry.register("mine", modality="audio")(others)
    registry.register("mine", modality="audio", replace=True)(others)
    assert registry.find(collator_name="mine").factory is others
    with caplog.at_level(logging.WARNING, "easypipe"):
        registry.register("vision", modality="vision")(others)
    assert "collator 'vision': easypipe's own is replaced by" in caplog.text
    assert registry.find(TaskSpec.vision_tiny()).factory is others
    assert CollatorRegistry.get_instance().find(TaskSpec.vision_tiny()).builtin


def test_unknown_names_and_options_are_refused():
    registry = CollatorRegistry()
    with pytest.raises(
        ConfigError, match=r"collator_name: no collator 'visoin'.*Did you mean 'vision'"
    ):
        registry.get_collator(collator_name="visoin")
    with pytest.raises(
        ConfigError,
        match=r"collator 'text', option 'padding_sid': unknown.*Did you mean 'padding_side'",
    ):
        registry.get_collator(collator_name="text", padding_sid="left")
    with pytest.raises(ConfigError, match="collator 'default', option 'tokenizer': unknown"):
        registry.get_collator(tokenizer="x")
    registry.register("needy", modality="text", task_type="needs")(lambda task_spec=None, *, it: it)
    with pytest.raises(
        ConfigError, match=r"collator 'needy', option 'it': is required.*TaskSpec\(options="
    ):
        registry.get_collator(collator_name="needy")
    with pytest.raises(
        ConfigError,
        match=r"task_spec: 'lm' is not a TaskSpec. Give one, or choose by collator_name",
    ):
        registry.get_collator("lm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="modality: is empty"):
        TaskSpec(name="a", modality="", task_type="b")
    with pytest.raises(ConfigError, match="name and modality are words"):
        registry.register("", modality="x")
