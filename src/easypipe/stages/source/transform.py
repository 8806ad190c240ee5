"""The transform stage: a transform over some datasets, between source() and tokenize()."""

from __future__ import annotations

from collections.abc import Sequence

from easypipe.core.errors import SourceError, require, require_known
from easypipe.core.protocols import BaseStage, PipelineContext, Sources, Transform
from easypipe.stages.config import datasets_of
from easypipe.transforms.columns.base import TransformedSource, as_transform


class TransformStage(BaseStage):
    """Lays a transform over datasets; rows on which it fails are bad rows of their dataset, and its
    on_error decides.
    """

    def __init__(
        self,
        transform: Transform | Sequence[Transform],
        datasets: str | Sequence[str] | None = None,
    ) -> None:
        """datasets: names of those that are transformed; None means all."""
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
        """Raises ConfigError for a dataset that does not exist, SourceError naming the dataset
        where columns do not fit.
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
