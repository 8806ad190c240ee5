"""The pictures of docs/gallery.md: `python docs/gallery.py FOLDER` trains two small runs in FOLDER,
writes their pages, and takes pictures of them with the Chromium of this machine: minutes.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image

from easypipe.cli import main

PICTURES = Path(__file__).parent / "gallery"
CONFIG = "quickstart.yaml"
MODEL = ("model.hidden_size=96", "model.intermediate_size=256", "model.num_layers=1")
DATA = (
    "data.mix.weights=null",
    "data.mix.weight_schedule=[{step: 0, weights: {code: 0.3, docs: 0.7}}, "
    "{step: 40, weights: {code: 0.8, docs: 0.2}}]",
    "data.mix.stop_strategy=restart",
    "data.save=null",
    "data.load.batch_size=4",
)
TRAIN = ("train.steps=80", "train.eval_every=20", "train.eval_batches=2", "train.measure=[sources]")
OTHER = ("train.output_dir=faster", "train.optimizer.learning_rate=8e-3")
# the name of a picture: a page, the height of its part, and what of it is hidden
PAGES = {
    "report": ("report.html", 1000, ""),
    "flow": ("report.html", 470, ".controls, .curves, #tables, h1, h2"),
    "compare": ("compare.html", 800, ""),
    "preview": ("preview.html", 760, ""),
    "plan": ("plan.html", 760, ""),
    "discover": ("discover.html", 760, ""),
}
PLOTS = ("loss", "mixture")


def run(folder: Path, *words: str, settings: tuple[str, ...] = ()) -> None:
    sets = [part for one in settings for part in ("--set", one)]
    with contextlib.chdir(folder):
        assert main([*words, *sets]) == 0, words


def runs(folder: Path) -> Path:
    """Trains both runs and writes every page; returns the folder of the project."""
    project = folder / "project"
    run(folder, "quickstart", "--output-dir", "project", settings=(*MODEL, *DATA, *TRAIN))
    run(project, "train", CONFIG, "--samples", "0", settings=(*MODEL, *DATA, *TRAIN, *OTHER))
    run(project, "report", "run", "--out", "report.html")
    run(project, "report", "run", "faster", "--out", "compare.html")
    run(project, "preview", CONFIG, "-n", "3", "--html", "preview.html")
    run(project, "plan", CONFIG, "--html", "plan.html", settings=DATA)
    run(project, "discover", "data/docs", "--html", "discover.html")
    return project


def shot(page: Path, height: int, hidden: str) -> Image.Image:
    """A page as Chromium shows it, 1,100 pixels wide, without the elements of a selector."""
    browser = os.environ.get("EASYPIPE_CHROMIUM") or shutil.which("chromium")
    assert browser is not None, "needs Chromium; EASYPIPE_CHROMIUM names it"
    text = page.read_text().replace(f"{page.parent}/", "")  # paths of this machine
    page = page.with_stem("shown")
    page.write_text(text + (f"<style>{hidden} {{ display: none }}</style>" if hidden else ""))
    made = page.with_suffix(".png")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--user-data-dir={page.parent / 'browser'}", "--virtual-time-budget=4000"]
    flags += [f"--window-size=1100,{height}", f"--screenshot={made}"]
    subprocess.run([browser, *flags, page.as_uri()], check=True, timeout=300)  # noqa: S603 (paths of this script's)
    return Image.open(made)


def small(picture: Image.Image) -> bytes:
    """A PNG of few colours."""
    made = io.BytesIO()
    picture.convert("RGB").quantize(64).save(made, "png", optimize=True)
    return made.getvalue()


def make(folder: Path) -> None:
    project = runs(folder.absolute())
    PICTURES.mkdir(exist_ok=True)
    for name in PLOTS:
        picture = Image.open(project / "run" / f"{name}.png").resize((960, 600))
        (PICTURES / f"{name}.png").write_bytes(small(picture))
    for name, (page, height, hidden) in PAGES.items():
        (PICTURES / f"{name}.png").write_bytes(small(shot(project / page, height, hidden)))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
