"""Images to batches: decoded, resized, normalised."""

from __future__ import annotations

import io

import numpy as np
import pytest

from easypipe import create_vision_collate
from easypipe.compat.collators import create_causal_lm_collate
from easypipe.compat.vision import PRESETS, MultimodalCollator
from easypipe.core.errors import ConfigError, SourceError

Image = pytest.importorskip("PIL.Image")

PIXELS = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def test_every_way_to_give_an_image_gives_the_same_pixels(tmp_path):
    (tmp_path / "a.png").write_bytes(png(PIXELS))
    ways = [
        PIXELS,
        PIXELS.transpose(2, 0, 1),
        png(PIXELS),
        Image.fromarray(PIXELS),
        str(tmp_path / "a.png"),
        tmp_path / "a.png",
    ]
    ways += [
        {"bytes": png(PIXELS), "path": None},
        {"bytes": png(PIXELS), "path": "a name within an archive.png"},
        {"bytes": None, "path": str(tmp_path / "a.png")},
        PIXELS.astype(np.float32) / 255,
    ]
    batch = create_vision_collate(normalize=False)(
        [{"image": way, "label": i} for i, way in enumerate(ways)]
    )
    assert batch["pixel_values"].shape == (len(ways), 6, 8, 3)
    assert batch["pixel_values"].dtype == np.float32
    np.testing.assert_array_equal(
        batch["pixel_values"],
        np.broadcast_to(PIXELS / np.float32(255), batch["pixel_values"].shape),
    )
    assert batch["labels"].tolist() == list(range(len(ways)))
    assert batch["labels"].dtype == np.int32


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets(preset):
    mean, std = PRESETS[preset]
    batch = create_vision_collate(preset=preset)([{"pixel_values": PIXELS}])
    np.testing.assert_allclose(
        batch["pixel_values"][0], (PIXELS / 255 - mean) / std, rtol=1e-5, atol=1e-6
    )


def test_custom_normalisation_layout_and_further_columns():
    collate = create_vision_collate(mean=[0.5] * 3, std=[0.25] * 3, channels_last=False)
    batch = collate([{"pixel_values": PIXELS, "labels": 1, "id": 7}])
    np.testing.assert_allclose(
        batch["pixel_values"][0], ((PIXELS / 255 - 0.5) / 0.25).transpose(2, 0, 1), rtol=1e-4
    )
    assert batch["id"].tolist() == [7]
    assert collate([(PIXELS, 4)])["labels"].tolist() == [4]


def test_grey_and_colour():
    grey = PIXELS[:, :, 0]
    as_colour = create_vision_collate(normalize=False)([{"image": grey}])["pixel_values"]
    assert as_colour.shape == (1, 6, 8, 3)
    assert (as_colour[..., 0] == as_colour[..., 2]).all()
    as_grey = create_vision_collate(normalize=False, channels=1)(
        [{"image": PIXELS}, {"image": png(PIXELS)}]
    )["pixel_values"]
    assert as_grey.shape == (2, 6, 8, 1)
    np.testing.assert_allclose(as_grey[0], as_grey[1], atol=1.01 / 255)  # Pillow rounds
    mean, std = create_vision_collate(channels=1).statistics
    np.testing.assert_allclose((mean, std), [[0.4589], [0.2260]], atol=2e-3)
    np.testing.assert_allclose(
        create_vision_collate(channels=1)([(grey,)])["pixel_values"][0, ..., 0],
        (grey / 255 - mean) / std,
        rtol=1e-4,
    )


def test_resize_makes_one_size():
    batch = create_vision_collate(image_size=(4, 5))(
        [{"image": PIXELS}, {"image": PIXELS[:4]}, {"image": np.full((9, 9, 3), 255, np.uint8)}]
    )
    assert batch["pixel_values"].shape == (3, 4, 5, 3)
    flat = create_vision_collate(normalize=False, image_size=4)(
        [{"image": np.full((9, 9, 3), 51, np.uint8)}]
    )["pixel_values"]
    np.testing.assert_allclose(flat, 0.2, rtol=1e-5)
    with pytest.raises(
        SourceError, match=r"row 1 of the batch: 4 x 8 pixels, the first has 6 x 8. Set image_size"
    ):
        create_vision_collate()([{"image": PIXELS}, {"image": PIXELS[:4]}])
    with pytest.raises(SourceError, match="row 0 of the batch, column 'labels': None is not a"):
        create_vision_collate()([(PIXELS,), (PIXELS, 3)])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": b"not an image"}, "row 0 of the batch: is not an image that Pillow reads"),
        (
            {"image": {"bytes": b"not an image", "path": "a.png"}},
            r"row 0 of the batch \(a\.png\): is not an image that Pillow reads: its bytes are of no "
            "format that is known",
        ),
        ({"image": "/no/such/file.png"}, "is not an image that Pillow reads"),
        ({"picture": PIXELS}, "row 0 of the batch: no image .have: picture"),
        (
            {"image": np.zeros((3, 5, 3), np.uint8)},
            r"shape \(3, 5, 3\) could be \[C, H, W\] or \[H, W, C\]",
        ),
        ({"image": np.zeros((5, 5, 4), np.uint8)}, "has neither 1 nor 3 channels"),
        ({"image": np.zeros(5, np.uint8)}, "uint8 of shape .5,. is not an image"),
        ({"image": [[0, 1], [2]]}, "row 0 of the batch: object of shape .. is not an image"),
        ({"image": PIXELS, "label": [[1], 2]}, r"column 'labels': \[\[1\], 2\] is not a number"),
    ],
)
def test_bad_images_are_named(row, message):
    with pytest.raises(SourceError, match=message):
        create_vision_collate()([row])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "imagnet"}, "preset: no preset 'imagnet'.*Did you mean 'imagenet'"),
        ({"mean": [0.5] * 3}, "std: is missing"),
        ({"mean": [0.5], "std": [0.5]}, "mean: 1 values for 3 channels"),
        ({"mean": [0.5] * 3, "std": [0.5, 0.5, 0.0]}, "std: .* divides by 0"),
        (
            {"normalize": False, "mean": [0.5] * 3, "std": [0.5] * 3},
            "has no effect without normalize",
        ),
        ({"channels": 4}, "channels: 4 channels"),
        ({"image_size": (4, 0)}, "image_size"),
        ({"return_tensors": "pt"}, "'pt' is not made here"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        create_vision_collate(**options)


def test_a_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(SourceError, match="decompression bomb"):
        create_vision_collate()([{"image": png(PIXELS)}])


def test_jax_arrays():
    import jax

    assert isinstance(
        create_vision_collate(return_tensors="jax")([(PIXELS, 1)])["pixel_values"], jax.Array
    )


def test_multimodal_rows():
    collate = MultimodalCollator(vision=create_vision_collate(), text=create_causal_lm_collate())
    batch = collate(
        [{"image": PIXELS, "input_ids": [1, 2, 3]}, {"image": PIXELS, "input_ids": [4, 5]}]
    )
    assert batch["pixel_values"].shape == (2, 6, 8, 3)
    assert batch["labels"].tolist() == [[2, 3, -100], [5, -100, -100]]
    with pytest.raises(SourceError, match="row 0 of the batch, column 'input_ids': there is none"):
        collate([{"image": PIXELS}])


def test_16_bits_a_pixel_keep_their_range():
    deep = np.array([[0, 65535], [32768, 257]], np.uint16)
    batch = create_vision_collate(normalize=False, channels=1)([Image.fromarray(deep)])
    np.testing.assert_allclose(batch["pixel_values"][0, :, :, 0], deep / 65535, atol=1e-6)
    assert create_vision_collate(normalize=False)([Image.fromarray(deep)])[
        "pixel_values"
    ].shape == (1, 2, 2, 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": np.full((4, 4), 300)}, "whole numbers from 300 to 300. Give 0 to 255"),
        ({"image": np.full((4, 4), -1)}, "whole numbers from -1 to -1"),
        (
            {"image": PIXELS, "label": "cat"},
            r"row 0 of the batch, column 'labels': 'cat' is not a number",
        ),
        (
            {"image": Image.fromarray(np.zeros((2, 2), np.float32))},
            "mode 'F' does not say what is white",
        ),
    ],
)
def test_what_numbers_do_not_say_is_refused(row, message):
    with pytest.raises(SourceError, match=message):
        create_vision_collate()([row])
