"""Keys of other tools are told by our names."""

from __future__ import annotations

import pytest

from easypipe import ConfigError, PipelineConfig, TrainingConfig
from easypipe.cli import main
from easypipe.cli.keys import find
from easypipe.core.foreign_names import OURS


def test_every_name_of_ours_is_a_key() -> None:
    assert not [path for path in {*OURS.values()} if find(path) is None]


def test_refusals_say_our_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"is data\.pack\.seq_length here"):
        PipelineConfig(datasets=[{"data_files": "a.txt"}], pack={"max_seq_length": 8})
    with pytest.raises(ConfigError, match=r"is train\.optimizer\.warmup_steps here"):
        TrainingConfig(optimizer={"warmup_ratio": 0.1})
    assert main(["config", "cutoff_len"]) == 2
    assert "is data.pack.seq_length here" in capsys.readouterr().err
