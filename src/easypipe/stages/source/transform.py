"""The transform stage applies a transform to some datasets, between source() and tokenize()."""

from __future__ import annotations

from collections.abc import Sequence

from easypipe.core.errors import SourceError, require, require_known
from easypipe.core.protocols import BaseStage, PipelineContext, Sources, Transform
from easypipe.stages.config import datasets_of
from easypipe.transforms.columns.base import TransformedSource, as_transform


class TransformStage(BaseStage):
    """The transform stage; rows on which the transform fails are bad rows of their dataset.

    The dataset's on_error decides what happens to them.

    Args:
        transform: A transform, or several in order.
        datasets: The names of the datasets to transform; None means all.
    """

    def __init__(
        self,
        transform: Transform | Sequence[Transform],
        datasets: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.transform = as_transform(transform)
        self.datasets = (
            (datasets,)
            if isinstance(datasets, str)
            else None
            if datasets is None
            else tuple(datasets)
        )
        require(
            self.datasets != (),
            "transform.datasets",
            "an empty list",
            "Name datasets, or leave it out for all.",
        )

    @property
    def name(self) -> str:
        return "transform"

    def process(self, data: Sources, context: PipelineContext) -> Sources:
        """Applies the transform to the datasets.

        Raises:
            ConfigError: A dataset does not exist.
            SourceError: The columns of a dataset do not fit; the error names the dataset.
        """
        for name in self.datasets or ():
            require_known(name, data, "transform.datasets", f"no dataset {name!r}")
        options = datasets_of(context)
        result = dict(data)
        for name in self.datasets if self.datasets is not None else data:
            own = options.get(name)
            try:
                result[name] = TransformedSource(
                    data[name], self.transform, on_error="error" if own is None else own.on_error
                )
            except SourceError as error:
                error.add_note(f"while transforming dataset {name!r}")
                raise
        return result
