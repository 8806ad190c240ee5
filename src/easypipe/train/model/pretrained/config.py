"""Options of a published model, which a run trains further. This file imports no jax."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from easypipe.core.config import ListOf, config
from easypipe.core.errors import require
from easypipe.train.model.config import AttentionBackend
from easypipe.train.model.pretrained.files import commit_of, model_folder


@config
class PretrainedConfig:
    """A published model to train further, instead of a ModelConfig.

    Its shape comes from its own config.json, its initial values from its files. Its tokenizer is
    the default of data that names none.
    """

    pretrained: str | Path  # a `transformers` folder, or a Hub name
    # branch, tag or commit of a Hub repository; None takes main. A run records the commit
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of products and activations
    # dtype of the parameters; None takes `dtype` with adapters (train.lora), else float32
    param_dtype: Literal["float32", "bfloat16"] | None = None
    # what the backward pass computes again, as in ModelConfig
    remat: Literal["none", "dots", "full"] = "none"
    # implementation of attention; None chooses it by the device
    attention: AttentionBackend | None = None
    scan_layers: bool = True  # compile one layer and run it for each; False compiles each one
    # new tokens of its tokenizer; their rows of embeddings and head begin as the mean of the others
    add_tokens: ListOf[str] = ()
    # train the rows of add_tokens and nothing else; refused with train.lora, which trains them too
    only_added_tokens: bool = False

    def check(self) -> None:
        require(
            str(self.pretrained),
            "pretrained",
            "names no model",
            "Give a folder with config.json, or a Hub name.",
        )
        for i, token in enumerate(self.add_tokens):
            require(
                token and token not in self.add_tokens[:i],
                f"add_tokens[{i}]",
                f"{token!r} is listed twice" if token else "is empty",
                "Leave it out.",
            )
        require(
            self.add_tokens or not self.only_added_tokens,
            "only_added_tokens",
            "has no effect without add_tokens",
            "Leave it out, or name new tokens.",
        )

    def resolved(self) -> tuple[PretrainedConfig, Path]:
        """Returns the config with its commit, and the folder of the model's small files.

        Those are config.json and the tokenizer. Errors are those of `model_folder`.
        """
        folder = model_folder(self.pretrained, self.revision, weights=False)
        commit = commit_of(folder, self.pretrained)
        return (self if commit is None else replace(self, revision=commit)), folder
