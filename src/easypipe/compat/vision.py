"""Document 004, images: decoded, resized, normalized and batched, alone or together with tokens.

Pillow (the extra `[vision]`) decodes; rows that are already arrays do not need it.

B rows · H, W height and width · C channels, last unless `channels_last` is False
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from easypipe.compat.collators import (
    Tensors,
    as_array,
    called,
    check_form,
    default_collate,
    draws,
    handed_out,
    is_number,
    recipe_of,
    require_some,
    stacked,
)
from easypipe.compat.foreign import Rows
from easypipe.core.errors import (
    ConfigError,
    SourceError,
    place,
    raising,
    require,
    require_known,
)
from easypipe.core.schema import LABELS, PIXEL_VALUES, OutputSchema
from easypipe.core.values import Array, Batch, Collate, Identity, Item, attribute_of
from easypipe.loader.rows.items import describe_collator

# Mean and standard deviation of the channels of the training images, scaled to [0, 1].
PRESETS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
IMAGE_COLUMNS = (PIXEL_VALUES, "image", "img")
LABEL_COLUMNS = (LABELS, "label")
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in Pillow's grey

Preset = Literal["imagenet", "cifar10"]


@dataclass(frozen=True, kw_only=True)
class VisionDataCollator:
    """The collator of create_vision_collate."""

    normalize: bool = True
    preset: str = "imagenet"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    image_size: tuple[int, int] | None = None
    channels: Literal[1, 3] = 3
    channels_last: bool = True
    return_tensors: Tensors = True
    schema: OutputSchema = field(default_factory=OutputSchema)

    def __post_init__(self) -> None:
        size = (self.image_size,) * 2 if isinstance(self.image_size, int) else self.image_size
        given = {"mean": self.mean, "std": self.std, "image_size": size}
        for name, values in given.items():  # also lists, and one number for both sides
            numbers = values is None or (
                isinstance(values, Sequence | np.ndarray)
                and all(is_number(one, int if name == "image_size" else float) for one in values)
            )
            require(numbers, name, f"{values!r} are not its numbers", "Give a tuple of them.")
            object.__setattr__(self, name, None if values is None else tuple(values))
        problem, fix = f"no preset {self.preset!r}", "Give mean and std for others."
        require_known(self.preset, PRESETS, "preset", problem, fix)
        require(
            self.channels in (1, 3),
            "channels",
            f"{self.channels} channels",
            "1 is grey, 3 is RGB.",
            [1, 3],
        )
        mean, std, size = self.mean, self.std, self.image_size
        missing, fix = "mean" if mean is None else "std", "Give both mean and std, or neither."
        require((mean is None) == (std is None), missing, "is missing", fix)
        for name, values in (("mean", mean), ("std", std)):
            count = self.channels if values is None else len(values)
            problem = f"{count} values for {self.channels} channels"
            fix = f"Give {self.channels}, or set channels={count}."
            require(count == self.channels, name, problem, fix)
        least = min(std or (1,))
        require(least > 0, "std", f"{std} divides by {least}", "Give numbers above 0.")
        problem = "has no effect without normalize"
        require(self.normalize or mean is None, "mean", problem, "Leave it out.")
        require(
            size is None or (len(size) == 2 and min(size) >= 1),
            "image_size",
            f"{size} is not (height, width)",
            "Give two numbers of pixels.",
        )
        check_form(self.return_tensors, self.schema)

    @property
    def recipe(self) -> Identity:
        return "vision", self

    @property
    def statistics(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The (mean, standard deviation) of each channel.

        For grey images, the preset's values are weighted like colours in the conversion to grey.
        """
        mean, std = (
            PRESETS[self.preset] if self.mean is None or self.std is None else (self.mean, self.std)
        )
        if self.channels == 1 and len(mean) == 3:
            mean, std = ((float(np.dot(LUMA, values)),) for values in (mean, std))
        return np.asarray(mean, np.float32), np.asarray(std, np.float32)

    def __call__(self, rows: Sequence[Item]) -> Batch:
        """Makes a batch from rows.

        It has `pixel_values` Float32[B, H, W, C], and `labels` Int32[B] if rows have them; other
        columns are stacked.

        Raises:
            SourceError: A row has no image, or images differ in size.
        """
        require_some(rows)
        found = [_parts(row, i) for i, row in enumerate(rows)]
        images = [self._image(image, i) for i, (image, _, _) in enumerate(found)]
        for i, image in enumerate(images):
            if image.shape != images[0].shape:
                problem = (
                    f"{image.shape[0]} x {image.shape[1]} pixels, the first has "
                    f"{images[0].shape[0]} x {images[0].shape[1]}"
                )
                raise SourceError(
                    at=f"row {i} of the batch",
                    problem=problem,
                    fix="Set image_size=(height, width).",
                )
        pixels = np.stack(images)
        if self.normalize:
            mean, std = self.statistics
            pixels = (pixels - mean) / std
        batch: Batch = {
            PIXEL_VALUES: pixels
            if self.channels_last
            else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
        }
        labels = [label for _, label, _ in found]
        if any(label is not None for label in labels):
            batch[LABELS] = _labels(labels)
        if found[0][2]:
            batch |= default_collate([others for _, _, others in found])
        return handed_out(batch, self.schema, self.return_tensors)

    def _image(self, given: Item, number: int) -> NDArray[np.float32]:
        """Returns an image as Float32[H, W, C] in [0, 1]; arrays of floats are unchanged.

        Raises:
            SourceError: It is not an image.
        """
        at = f"row {number} of the batch"
        array = _decoded(given, at, self.channels) if _is_encoded(given) else as_array(given)
        if array.dtype.kind not in "uif" or array.ndim not in (2, 3):
            raise SourceError(
                at=at,
                problem=f"{array.dtype} of shape {array.shape} is not an image",
                fix="Give [H, W], [H, W, C] or [C, H, W].",
            )
        array = _channels_last(array, at)
        if (
            array.dtype.kind in "ui"
            and array.size
            and not (array.min() >= 0 and array.max() <= 255)
        ):
            problem = f"whole numbers from {array.min()} to {array.max()}"
            raise SourceError(
                at=at, problem=problem, fix="Give 0 to 255, or floats, which are taken as they are."
            )
        pixels: Any = (
            array.astype(np.float32) / 255 if array.dtype.kind in "ui" else array.astype(np.float32)
        )
        if pixels.shape[2] == 3 and self.channels == 1:
            pixels = np.dot(pixels, np.asarray(LUMA, np.float32))[:, :, None]
        elif pixels.shape[2] == 1 and self.channels == 3:
            pixels = np.repeat(pixels, 3, axis=2)
        return pixels if self.image_size is None else _resized(pixels, self.image_size)


def create_vision_collate(
    *,
    normalize: bool = True,
    preset: Preset = "imagenet",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    image_size: int | Sequence[int] | None = None,
    channels: Literal[1, 3] = 3,
    channels_last: bool = True,
    return_tensors: Tensors = True,
    schema: OutputSchema | None = None,
) -> VisionDataCollator:
    """Makes a collator of rows with an image, and maybe a label, to batches of pixels.

    The image is called `pixel_values`, `image` or `img`, the label `labels` or `label`; or rows are
    (image, label) tuples. Images are encoded bytes, paths, Pillow images, those of `datasets`
    ({"bytes", "path"}), or arrays [H, W], [H, W, C] or [C, H, W]: integers from 0 to 255, or
    floats, which are not scaled.

    Args:
        normalize: Subtract the mean and divide by the standard deviation of each channel, from
            `preset` or your own `mean` and `std`.
        image_size: The size to resize to (bilinear, antialiased); None: all images of a batch must
            have the same size.
        channels: 1 converts colours to grey, 3 repeats grey.
        channels_last: [B, H, W, C], as JAX expects it; False: [B, C, H, W].
    """
    own: Any = {"mean": mean, "std": std, "image_size": image_size}  # converted to tuples
    return VisionDataCollator(
        normalize=normalize,
        preset=preset,
        **own,
        channels=channels,
        channels_last=channels_last,
        return_tensors=return_tensors,
        schema=schema or OutputSchema(),
    )


@dataclass(frozen=True, kw_only=True)
class MultimodalCollator:
    """A collator of rows with an image and tokens, each with a separate collator.

    `labels` are those of the text.
    """

    vision: VisionDataCollator
    text: Collate

    @property
    def recipe(self) -> Identity:
        own = recipe_of(self.text) or describe_collator(self.text)
        return "multimodal", self.vision.recipe, own

    @property
    def draws(self) -> bool:
        return draws(self.text)

    def __call__(self, rows: Rows, *, keys: Sequence[int] | None = None) -> Batch:
        pixels, words = [], []
        for i, row in enumerate(rows):
            column = next((name for name in IMAGE_COLUMNS if name in row), None)
            if column is None:
                raise SourceError(
                    at=place(f"row {i} of the batch", column="image"),
                    problem="there is none",
                    have=row,
                )
            pixels.append({column: row[column]})
            words.append({name: value for name, value in row.items() if name != column})
        return self.vision(pixels) | called(self.text, words, keys)


def _parts(row: Item, number: int) -> tuple[Any, Any, Batch]:
    """Returns (image, label or None, other columns) of a row.

    Raises:
        SourceError: The row has no image.
    """
    at = f"row {number} of the batch"
    if isinstance(row, tuple) and len(row) in (1, 2):
        return row[0], row[1] if len(row) == 2 else None, {}
    if not isinstance(row, Mapping):
        return row, None, {}
    column = next((name for name in IMAGE_COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise SourceError(
            at=at,
            problem="no image",
            have=row,
            fix=f"Name its column one of {', '.join(IMAGE_COLUMNS)}.",
        )
    label = next((name for name in LABEL_COLUMNS if row.get(name) is not None), None)
    return (
        row[column],
        None if label is None else row[label],
        {k: v for k, v in row.items() if k not in (column, label)},
    )


def _is_encoded(given: Item) -> bool:
    """Returns whether Pillow must decode an image."""
    encoded = isinstance(given, bytes | bytearray | str | Path | Mapping)
    return encoded or attribute_of(given, "convert") is not None


def _decoded(given: Item, at: str, channels: int) -> Array:
    """Returns an encoded image as UInt8[H, W, channels].

    An image with 16 bits per pixel, which is grey, is Float32[H, W] in [0, 1].

    Raises:
        SourceError: Pillow cannot read it.
    """
    Image = _pillow(at)
    if isinstance(given, Mapping):
        at += f" ({given['path']})" if given.get("path") else ""
        given = given.get("bytes") or given.get("path")
    with raising(
        SourceError,
        at,
        "is not an image that Pillow reads",
        "Leave such rows out of the dataset.",
        (
            OSError,
            ValueError,
            SyntaxError,
            AttributeError,
            Image.DecompressionBombError,
        ),
    ):
        if attribute_of(given, "convert") is not None:
            opened = given
        elif isinstance(given, bytes | bytearray):
            try:
                opened = Image.open(io.BytesIO(given))
            except Image.UnidentifiedImageError:  # its text names an object in memory
                raise ValueError("its bytes are of no format that is known") from None
        else:
            opened = Image.open(given)
        if opened.mode.startswith("I;16"):  # convert() would clip its numbers at 255
            return np.asarray(opened).astype(np.float32) / 65535
        if opened.mode in ("I", "F"):
            raise SourceError(
                at=at,
                problem=f"an image of mode {opened.mode!r} does not say what is white",
                fix="Give an array of floats.",
            )
        pixels = np.asarray(opened.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


def _channels_last(array: Array, at: str) -> Array:
    """Returns an array as [H, W, 1 or 3].

    Raises:
        SourceError: It does not have 1 or 3 channels (opacity is an error), or the axis of the
            channels is ambiguous.
    """
    if array.ndim == 2:
        return array[:, :, None]
    first, last = array.shape[0] in (1, 3), array.shape[2] in (1, 3)
    if first == last:
        problem = f"shape {array.shape} " + (
            "could be [C, H, W] or [H, W, C]" if first else "has neither 1 nor 3 channels"
        )
        raise SourceError(
            at=at,
            problem=problem,
            fix="Give [H, W, C] with more than 3 rows of pixels and 1 or 3 channels.",
        )
    return array if last else array.transpose(1, 2, 0)


def _resized(pixels: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """Returns the image in a new size (bilinear, antialiased)."""
    if pixels.shape[:2] == size:
        return pixels
    Image = _pillow("image_size")
    planes = [
        np.asarray(
            Image.fromarray(np.ascontiguousarray(pixels[:, :, c])).resize(
                (size[1], size[0]), Image.Resampling.BILINEAR
            )
        )
        for c in range(pixels.shape[2])
    ]
    return np.stack(planes, axis=2)


def _labels(given: Sequence[Item]) -> Array:
    """Returns the labels of the images: numbers of classes, or other targets.

    Raises:
        SourceError: A label is not a number.
    """
    labels = stacked(given, LABELS)
    if isinstance(labels, list):
        i = next(
            (i for i, label in enumerate(labels) if as_array(label).dtype.kind not in "biuf"), 0
        )
        at = place(f"row {i} of the batch", column=LABELS)
        raise SourceError(
            at=at,
            problem=f"{labels[i]!r} is not a number",
            fix="Give every class a number, in the dataset.",
        )
    return labels.astype(np.int64) if labels.dtype.kind in "ib" else labels


def _pillow(at: str) -> Any:
    """Returns Pillow's module Image.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            at=at,
            problem="Pillow is not installed",
            fix="Install it with: pip install 'easypipe[vision]'",
        ) from error
    return Image


VisionCollator = VisionDataCollator  # its earlier name

__all__ = [
    "PRESETS",
    "MultimodalCollator",
    "VisionCollator",
    "VisionDataCollator",
    "create_vision_collate",
]
