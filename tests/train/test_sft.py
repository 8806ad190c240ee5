"""Fine-tuning on conversations, end to end: configs/sft.yaml and sft_lora.yaml, and the loss of
packed conversations.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from easypipe import (
    DatasetConfig,
    Decoder,
    LoadStageConfig,
    ModelConfig,
    PackStageConfig,
    Pipeline,
    PipelineConfig,
    TokenizeStageConfig,
    train_bpe,
)
from easypipe.cli import main
from easypipe.core.schema import IGNORE, INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS
from easypipe.run import RunConfig, train
from easypipe.train import load_pretrained, save_pretrained
from easypipe.train.losses.loss import loss_sums

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
pytestmark = [
    pytest.mark.skipif(not (SHARED / "chat").is_dir(), reason="needs ../shared/data/chat"),
]

SHAPE = ModelConfig(
    vocab_size=1000, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1
)
SLOTS, ROWS = 768, 4
WIDE = 2 * SLOTS  # rows that hold several conversations

# The datasets of the shared folder, as DatasetConfig takes them.
DATA: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "data_files": str(SHARED / "chat" / "gsm8k_train_3000.jsonl"),
        "prompt_field": "question",
        "completion_field": "answer",
        "num_rows": 40,
        "length": {"policy": "trim_prompt_first"},
    },
    "tools": {
        "data_files": str(SHARED / "chat" / "openai_messages_tools_150.jsonl"),
        "content_field": "messages",
        # without generation markers: spans are proven
        "chat_template": str(SHARED / "templates" / "qwen2_5.jinja"),
        "num_rows": 40,
        "length": {"policy": "trim_oldest_turns"},
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is published; its tokenizer knows the words of ChatML, and has no chat
    template.
    """
    base = tmp_path_factory.mktemp("published")
    texts = [
        line
        for one in DATA.values()
        for line in Path(one["data_files"]).read_text().splitlines()[:150]
    ]
    train_bpe(
        texts, SHAPE.vocabulary, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], base / "tokenizer"
    )
    save_pretrained(Decoder(SHAPE, nnx.Rngs(0)), base / "model", tokenizer=str(base / "tokenizer"))
    return base / "model"


def overrides(model: Path, folder: Path, run: str, data: str) -> list[str]:
    """What makes a small run of a shipped config."""
    held_out = {**DATA[data], "num_rows": None, "split": "train[45:60]"}
    return [
        f"data.datasets={json.dumps([{'name': data, **DATA[data]}])}",
        f"eval.held_out.datasets={json.dumps([{'name': 'held_out', **held_out}])}",
        f"data.cache_dir={folder / 'cache'}",
        f"data.tokenize.max_length={SLOTS - 1}",
        f"data.pack.seq_length={SLOTS}",
        f"data.load.batch_size={ROWS}",
        "data.load.num_epochs=null",
        f"model.pretrained={model}",
        "model.dtype=float32",
        f"train.output_dir={folder / run}",
        "train.steps=6",
        "train.optimizer.learning_rate=0.02",
        "train.optimizer.warmup_steps=0",
    ]


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize("data", sorted(DATA))
@pytest.mark.parametrize("config", ["sft.yaml", "sft_lora.yaml"])
def test_the_shipped_configs_fine_tune(
    config: str, data: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "configs" / config
    changes = overrides(model, tmp_path, "run", data)
    asked = ["--samples", "1", *(["--prompt", "Hi!"] if config == "sft.yaml" else [])]
    assert main(["train", str(path), *asked, *(f"--set={change}" for change in changes)]) == 0
    # a model of conversations answers what it is asked, and has nothing to begin with by itself
    last = capsys.readouterr().out.splitlines()[-1]
    talks, prompted = data == "tools", "--prompt" in asked
    assert last.startswith("talk to it: " if talks and not prompted else "  » ")
    assert ("Hi!" in last) == (prompted and not talks)
    seen = losses(tmp_path / "run")
    assert len(seen) == 6
    assert seen[-1] < seen[0] - 0.02
    entries = json.loads((tmp_path / "run" / "ledger.json").read_text())["entries"]
    books = {
        (entry["stage"], entry["dataset"]): entry["out"]
        for entry in entries
        if entry["unit"] == "tokens"
    }
    for dataset in (data, "eval.held_out.held_out"):
        trained = books["loss_mask", dataset]
        assert trained["targets"] > 0
        assert trained["masked"] > 0
        assert books["labels", dataset]["targets"] > 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < last["trained_share"] < 0.9
    assert last["eval"]["held_out"]["num_targets"] > 0

    if data == "gsm8k":
        return  # one dataset is enough for what follows
    again = RunConfig.load(path, overrides(model, tmp_path, "from_python", data))
    assert (again.train.lora is not None) == (config == "sft_lora.yaml")
    result = train(again)
    assert losses(tmp_path / "from_python") == seen
    frozen = np.array_equal(load_pretrained(model).embedding[...], result.model.embedding[...])
    assert frozen == (config == "sft_lora.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "data.datasets.0.content_field=mesages",
            r"dataset 'tools', column 'mesages': no such column \(have: .*Did you mean "
            r"'messages'\?",
        ),
        (
            "data.datasets.0.chat_template=chatlm",
            r"chat_template: 'chatlm' is neither a file nor .* Did you mean 'chatml'\?",
        ),
        (
            f"data.datasets.0.chat_template={SHARED / 'templates' / 'gemma.jinja'}",
            r"row 0, column 'messages': refused_by_template: .*Give a chat_template that takes "
            r"such conversations, or set on_error to",
        ),
        (
            "train.lora.targets=[q_proj]",
            r"train\.lora\.targets\[0\]: no projection fits 'q_proj' .* 'query' here\.$",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_a_line(
    change: str, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [*overrides(model, tmp_path, "run", "tools"), "eval={}"]
    given = [f"--set={one}" for one in (*changes, change)]
    assert main(["train", str(ROOT / "configs" / "sft_lora.yaml"), *given]) == 2
    assert re.search(message, capsys.readouterr().err.strip()), message


def test_tokens_that_the_model_has_not(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [
        *overrides(model, tmp_path, "run", "tools"),
        f"data.default_tokenizer={SHARED / 'tokenizers' / 'gpt2'}",
        "eval={}",
    ]
    assert (
        main(["train", str(ROOT / "configs" / "sft.yaml"), *(f"--set={one}" for one in changes)])
        == 2
    )
    said = "model.pretrained: has a vocabulary of 1000, but the tokenizer"
    assert said in capsys.readouterr().err


# Loss


def padded(batch: Any) -> dict[str, np.ndarray]:
    """ROWS rows of WIDE slots, whatever the batch has, so that one program serves all."""
    out = {}
    for name in (INPUT_IDS, LABELS, SEGMENT_IDS, POSITION_IDS):
        given = np.asarray(batch[name])
        out[name] = np.full((ROWS, WIDE), IGNORE if name == LABELS else 0, np.int32)
        out[name][: given.shape[0], : given.shape[1]] = given
    return out


@pytest.mark.parametrize("data", sorted(DATA))
def test_packed_conversations_have_the_loss_of_one_a_row(
    data: str, model: Path, tmp_path: Path
) -> None:
    """Token-weighted over an epoch, within 1e-5 in float32; the same documents, the same
    targets.
    """
    graph, params = nnx.split(Decoder(SHAPE, nnx.Rngs(3)), nnx.Param)
    step = jax.jit(lambda params, batch: loss_sums(nnx.merge(graph, params), batch))
    config = PipelineConfig(
        datasets=(DatasetConfig(name=data, tokenizer=str(model), **DATA[data]),),
        seed=2,
        cache_dir=tmp_path,
        tokenize=TokenizeStageConfig(max_length=SLOTS - 1),
    )
    found = {}
    for packed in (False, True):
        pipeline = Pipeline.from_config(config).source().tokenize()
        if packed:
            pipeline.pack(PackStageConfig(seq_length=WIDE, strategy="first_fit"))
        batches = [
            padded(batch)
            for batch in pipeline.load(LoadStageConfig(batch_size=ROWS, drop_last=False)).build()
        ]
        sums = [step(params, batch) for batch in batches]
        targets = sorted(
            np.concatenate([batch[LABELS][batch[LABELS] != IGNORE] for batch in batches]).tolist()
        )
        found[packed] = (
            sum(float(out.loss_sum) for out in sums) / len(targets),
            targets,
            len(batches),
        )
        assert sum(int(out.num_targets) for out in sums) == len(targets)
    (alone, targets, many), (together, same, few) = found[False], found[True]
    assert targets == same
    assert few < many
    np.testing.assert_allclose(together, alone, rtol=1e-5)
