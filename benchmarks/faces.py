"""What a training loop waits for the loaders of the faces: the time spent in `next(batches)`, as a
share of all of it.

The step is a sleep, as a device that computes leaves its host idle; 10 ms is what document 004
simulates. Each loader is read for one pass, with one worker thread. `images` are encoded PNGs that
are decoded, resized and normalised; `arrays` are 32 x 32 RGB images as they are.
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _common import Report, arguments, cut_documents, documents, one_parquet, tokenizer_folder


def text(folder: Path, texts: list[str]) -> Any:
    """Document 000: prompts padded to max_length, from the token cache."""
    from easypipe import DataPipeline

    config = {
        "type": "data_module",
        "version": "1.0",
        "dataset": {"name": str(one_parquet(folder, cut_documents(texts, 4000, 1300)))},
        "tokenizer": {"name_or_path": str(tokenizer_folder(folder, texts)), "max_length": 512},
        "prompt_template": {
            "format_type": "custom",
            "template": "Read.\n{text}",
            "label_column": "text",
        },
        "dataloader": {"batch_size": 16, "num_workers": 1, "seed": 1},
    }
    return DataPipeline.from_config(config).unwrap().get_dataloader("train", shuffle=True).unwrap()


def rows_of_tokens(folder: Path, texts: list[str]) -> Any:
    """Document 004's lists of arrays, through a collator."""
    from easypipe import UniversalDataModule

    tokens = np.random.Generator(np.random.PCG64(1)).integers(0, 1000, (4000, 512))
    return UniversalDataModule(
        list(tokens), batch_size=16, seed=1, num_workers=1
    ).train_dataloader()


def arrays(folder: Path, texts: list[str]) -> Any:
    from easypipe import TaskSpec, UniversalDataModule

    pixels = np.random.Generator(np.random.PCG64(1)).integers(0, 256, (16_000, 32, 32, 3), np.uint8)
    data = [{"pixel_values": image, "labels": i % 10} for i, image in enumerate(pixels)]
    return UniversalDataModule(
        data, task_spec=TaskSpec.vision_tiny(), batch_size=64, seed=1, num_workers=1
    ).train_dataloader()


def images(folder: Path, texts: list[str]) -> Any:
    from PIL import Image

    from easypipe import TaskSpec, UniversalDataModule

    generator = np.random.Generator(np.random.PCG64(1))
    encoded = []
    for _ in range(64):
        out = io.BytesIO()
        Image.fromarray(generator.integers(0, 256, (48, 48, 3), np.uint8)).save(out, "PNG")
        encoded.append(out.getvalue())
    data = [{"image": encoded[i % 64], "label": i % 10} for i in range(4000)]
    task = TaskSpec(
        name="images", modality="vision", task_type="classification", options={"image_size": 32}
    )
    return UniversalDataModule(
        data, task_spec=task, batch_size=16, seed=1, num_workers=1
    ).train_dataloader()


CASES: dict[str, Callable[[Path, list[str]], Any]] = {
    "text": text,
    "rows of tokens": rows_of_tokens,
    "arrays": arrays,
    "images": images,
}


def waited(loader: Any, step_s: float) -> tuple[float, float]:
    """(seconds in `next`, seconds in all) of one pass, behind its first batch, which starts the
    thread.
    """
    batches = iter(loader)
    next(batches)
    spent, begin = 0.0, time.perf_counter()
    while True:
        start = time.perf_counter()
        batch = next(batches, None)
        spent += time.perf_counter() - start
        if batch is None:
            return spent, time.perf_counter() - begin
        time.sleep(step_s)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--step-ms", type=float, default=10.0, help="how long a step takes")
    options = parser.parse_args()
    report = Report("faces", "s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EASYPIPE_CACHE"] = str(Path(folder) / "cache")
        texts = documents(options.text)
        for name, make in CASES.items():
            (Path(folder) / name).mkdir()
            loader = make(Path(folder) / name, texts)
            next(iter(loader))
            shares = []
            for _ in range(options.rounds):
                spent, total = waited(loader, options.step_ms / 1e3)
                report.seconds.setdefault(name, []).append(spent / (len(loader) - 1))
                shares.append(spent / total)
            report.target(
                f"{name}: share of a {options.step_ms:g} ms step, median",
                float(np.median(shares)),
                below=0.02,
            )
    report.finish(options.out)


if __name__ == "__main__":
    main()
