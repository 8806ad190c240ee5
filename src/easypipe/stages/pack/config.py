"""PackStageConfig: how documents are packed into rows; which strategies and options conflict."""

from __future__ import annotations

from typing import Literal

from easypipe.core.config import config
from easypipe.core.errors import ConfigError, require
from easypipe.plan.pack import PackSpec

DEFAULT_PACKERS = 16


@config
class PackStageConfig:
    """How documents are packed into rows of `seq_length` tokens.

    docs/packing.md describes the strategies.

    Args:
        enabled: False skips the stage.
        strategy: `concat` (older name: `stream`) lays documents end to end and cuts them wherever a
            row ends; the others cut only documents longer than a row.
        num_packers: Open rows of `pool` (default 16). With other strategies it has no effect, and a
            warning says so.
        oversize: What happens to a document longer than a row; `concat` accepts only `split`. With
            `split`, tokenize() cuts conversations between turns to fit rows, unless they have their
            own max_length or length.
        train_continued: With `split`, also train on the later pieces of a document that begins with
            a prompt or a first turn. They are in other rows, without that prompt; by default they
            have no targets.
        segments: With `concat`, what a segment is: a `document`, or the whole `row`. In the latter
            case documents of a row see each other, positions run through the row, and every token
            except the first of all is a label.
        eos_token_id: The token added to every document that does not already end with it. None
            takes the tokenizer's; a different one is an error.
        pad_token_id: The token that fills the rest of a row; such slots have segment 0. None takes
            the tokenizer's, or its EOS if it has no padding token.
        include_segment_ids: False leaves `segment_ids` out of batches, for models that do not use
            them: documents of a row then see each other, and a warning says so. Labels never cross
            documents, and saved rows keep the column.
        shuffle_packed: Permute the rows within a window of documents; without it, rows of long
            documents come first with `first_fit`.
        shuffle_buffer_factor: At loading, also permute rows across windows, within blocks of this
            many batches. load.shuffle_buffer_size, which counts rows, overrides it. It needs
            shuffle_packed.
    """

    enabled: bool = True
    seq_length: int = 2048  # tokens of a row
    strategy: Literal["greedy", "pool", "first_fit", "concat", "stream"] = "greedy"
    num_packers: int | None = None
    oversize: Literal["split", "truncate", "drop", "error"] = "split"
    train_continued: bool = False
    segments: Literal["document", "row"] = "document"
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    include_segment_ids: bool = True
    shuffle_packed: bool = True
    shuffle_buffer_factor: int | None = None

    def check(self) -> None:
        factor = self.shuffle_buffer_factor
        require(
            factor is None or factor >= 1,
            "shuffle_buffer_factor",
            f"{self.shuffle_buffer_factor} batches hold nothing",
            "Give at least 1.",
        )
        require(
            factor is None or self.shuffle_packed,
            "shuffle_buffer_factor",
            "has no effect without shuffle_packed",
            "Leave it out.",
        )
        require(
            1 <= self.seq_length <= 1 << 24,
            "seq_length",
            f"{self.seq_length} is not a row length",
            f"Give 1 to {1 << 24} tokens.",
        )
        require(
            self.num_packers is None or self.num_packers >= 1,
            "num_packers",
            f"{self.num_packers} open rows hold nothing",
            "Give at least 1.",
        )
        require(
            not self.concat or self.oversize == "split",
            "oversize",
            f"{self.oversize!r} has no effect on strategy {self.strategy!r}, which cuts "
            "documents "
            "where rows end",
            "Leave it out, or set max_length to truncate when tokenizing.",
        )
        if self.train_continued and (self.concat or self.oversize != "split"):
            what = (
                f"strategy {self.strategy!r}, which trains them"
                if self.concat
                else f"oversize {self.oversize!r}, which makes none"
            )
            raise ConfigError(
                at="train_continued", problem=f"has no effect on {what}", fix="Leave it out."
            )
        require(
            self.segments != "row" or self.concat,
            "segments",
            f"'row' has no effect on strategy {self.strategy!r}, which keeps documents apart",
            "Leave it out, or set strategy to 'concat'.",
        )

    @property
    def concat(self) -> bool:
        """Whether documents are concatenated across the ends of rows."""
        return self.strategy in ("concat", "stream")

    @property
    def holds(self) -> bool:
        """Whether a prompt or conversation that continues in another row has no targets there."""
        return (
            self.enabled
            and self.oversize == "split"
            and not self.concat
            and not self.train_continued
        )

    def spec(self) -> PackSpec:
        """Returns the options for the plan."""
        return PackSpec(
            seq_length=self.seq_length,
            strategy="stream" if self.strategy == "concat" else self.strategy,
            num_packers=DEFAULT_PACKERS if self.num_packers is None else self.num_packers,
            oversize=self.oversize,
            shuffle_rows=self.shuffle_packed,
        )
