"""Keys of other tools are told by our names."""

from __future__ import annotations

import pytest

from easypipe import ConfigError, PipelineConfig, TrainingConfig
from easypipe.cli import main
from easypipe.cli.keys import find
from easypipe.core.foreign_names import OURS, ours
from easypipe.interop.foreign.tools import TOOLS
from golden.compare import kept


def test_every_name_of_ours_is_a_key() -> None:
    assert not [path for path in {*OURS.values()} if find(path) is None]


def test_names_that_no_import_takes_have_ours_too() -> None:
    """Options of tokenizers, of `datasets`, and of scripts and configs that come with trainers."""
    lengths = "max_seq_len block_size context_length model_max_length"
    named = {
        "data.datasets.content_field": "text_column field_messages messages_column",
        "data.datasets.num_rows": "max_train_samples",
        "data.tokenize.num_workers": "num_proc",
        "data.pack.seq_length": lengths,
        "data.load.batch_size": "train_batch_size global_batch_size",
        "eval": "test_split_size",
        "data.load.accumulation_steps": "grad_accum",
        "train.optimizer.warmup_steps": "num_warmup_steps",
        "train.optimizer.clip_norm": "gradient_clipping",
        "train.optimizer.final_fraction": "min_lr_ratio",
    }
    known = {name: path for path, names in named.items() for name in names.split()}
    assert {*OURS} - {*known} <= {key for table in TOOLS.values() for key in table}
    for name, path in known.items():
        assert ours(name) == f"What other tools call {name!r} is {path} here."


def test_refusals_say_our_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"is data\.pack\.seq_length here"):
        PipelineConfig(datasets=[{"data_files": "a.txt"}], pack={"max_seq_length": 8})
    with pytest.raises(ConfigError, match=r"is train\.optimizer\.warmup_steps here"):
        TrainingConfig(optimizer={"warmup_ratio": 0.1})
    assert main(["config", "cutoff_len"]) == 2
    assert "is data.pack.seq_length here" in capsys.readouterr().err


def test_a_refusal_names_what_an_import_writes() -> None:
    """Both tables say what a key of theirs is here; tests/golden/foreign.py keeps what each does."""
    becomes: dict[str, str] = {}
    for name, outcomes in kept("foreign")["imported"].items():
        key = name.partition(" of ")[0]
        becomes[key] = becomes.get(key, "") + " ".join(outcomes)
    assert {*becomes} == {key for table in TOOLS.values() for key in table}
    both = {*OURS} & {*becomes}
    assert len(both) > 50
    other = {
        key for key in both if OURS[key].replace("datasets.", "datasets.0.") not in becomes[key]
    }
    assert other == {"fp16", "train_on_inputs", "assistant_only_loss"}  # of one dataset, or off
    assert "data.datasets.0.prompt.train_on" in becomes["train_on_inputs"]
    assert "train_on" in becomes["assistant_only_loss"]
