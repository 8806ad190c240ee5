"""README and docs keep their word: every Python block runs, every YAML block loads, every page is
in the navigation.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import forked
from easypipe.cli import main
from easypipe.core.config import allowing_code, from_dict, is_config, load_yaml, parse_yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
GENERATED = {
    "reference/config.md",
    "reference/options.md",
    "reference/cli.md",
    "reference/api.md",
    "changelog.md",
}

pytestmark = pytest.mark.slow


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of each fenced block of `language`. A block without a language that runs is
    marked ```text.
    """
    return blocks_of(page.read_text(encoding="utf-8"), language)


def blocks_of(text: str, language: str) -> list[tuple[int, str]]:
    """(line, text) of each block; those in a tab are indented, and their text is here without."""
    fenced = re.compile(rf"^( *)```{language}\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    return [
        (text.count("\n", 0, found.start()) + 2, re.sub(f"(?m)^{found[1]}", "", found[2]))
        for found in fenced.finditer(text)
    ]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `easypipe quickstart` writes before it prepares and trains; the examples
    use its files.
    """
    from easypipe.cli.quickstart import TOKENIZER, VOCAB_SIZE, training_texts, write_project
    from easypipe.transforms.tokenizer.bpe import train_bpe

    folder = tmp_path_factory.mktemp("docs") / "easypipe-quickstart"
    write_project(folder)
    train_bpe(training_texts(folder), VOCAB_SIZE, [], folder / TOKENIZER)
    return folder


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_python_blocks_run(page: Path, project: Path, tmp_path: Path) -> None:
    """The blocks of a page run one after the other in one process, as a reader would paste them,
    beside a quickstart folder.
    """
    shutil.copytree(project, tmp_path / project.name)
    code = "".join(
        "\n" * (line - 1 - done) + text for line, text, done in _with_lines(blocks(page, "python"))
    )
    script = tmp_path / f"page_{page.stem}.py"  # its line numbers are those of the page
    script.write_text(code, encoding="utf-8")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "EASYPIPE_CACHE": str(tmp_path / "cache")}
    done = forked.run([sys.executable, script.name], cwd=tmp_path, env=env)
    assert done.returncode == 0, (
        f"{page.name} (line numbers are the page's):\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )


def sections_of_peers() -> Iterator[tuple[str, str]]:
    """(page and heading, code) of each section with blocks marked ```py: code of other libraries."""
    for page in PAGES:
        for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            if found := blocks_of(section, "py"):
                yield f"{page.name}: {section.splitlines()[0]}", "".join(text for _, text in found)


@pytest.mark.skipif("EASYPIPE_PEERS" not in os.environ, reason="nox -s peers installs them")
@pytest.mark.parametrize(("place", "code"), [*sections_of_peers()])
def test_blocks_of_other_libraries_run(
    place: str, code: str, project: Path, tmp_path: Path
) -> None:
    shutil.copytree(project, tmp_path / project.name)
    script = tmp_path / "section.py"  # a file: workers of some libraries import it again
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{place}\n{done.stderr[-6000:]}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "yaml")], ids=lambda page: page.name
)
def test_yaml_blocks_load(page: Path) -> None:
    from easypipe.compat.data_pipeline import DataPipelineConfig
    from easypipe.run import RunConfig

    for line, text in blocks(page, "yaml"):
        with allowing_code():  # none is called while a config loads
            values = parse_yaml(text, at=f"{page.name}:{line}")
            from_dict(
                DataPipelineConfig if values.get("type") == "data_module" else RunConfig, values
            )


def test_an_imported_config_is_shown_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    section = text.partition("## axolotl\n")[2].partition("\n## ")[0]
    [(_, theirs)], [(_, ours)] = blocks_of(section, "yml"), blocks_of(section, "yaml")
    monkeypatch.chdir(tmp_path)
    Path("lora-8b.yml").write_text(theirs, encoding="utf-8")
    assert main(["import", "axolotl", "lora-8b.yml"]) == 0
    assert capsys.readouterr().out == ours
    example = ROOT / "tests/interop/foreign/axolotl-lora-8b.yaml"
    values = load_yaml(example)
    assert load_yaml(tmp_path / "lora-8b.yml") == {
        key: value for key, value in values.items() if value is not None
    }


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = set(_leaves(site["nav"]))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert named == written | GENERATED


def test_links_between_pages_lead_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target in re.findall(
            r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8")
        ):
            there = (page.parent / target).resolve()
            known = {(DOCS / name).resolve() for name in GENERATED}
            if not there.exists() and there not in known:
                wrong.append(f"{page.name}: {target}")
    assert not wrong, wrong


def test_the_readme_of_an_index_page_has_no_link_to_a_file_beside_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for one in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", text)
    assert "tests easypipe's guarantees on your config" in text


def test_the_gallery_shows_every_picture_and_each_is_small() -> None:
    """docs/gallery.py makes them."""
    drawn = {path.stem: path.stat().st_size for path in (DOCS / "gallery").iterdir()}
    gallery = ast.parse((DOCS / "gallery.py").read_text())
    made = {
        name
        for one in gallery.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in ("PAGES", "PLOTS")
        for name in ast.literal_eval(one.value)
    }
    shown = re.findall(r"\]\(gallery/(\w+)\.png\)", (DOCS / "gallery.md").read_text())
    assert set(drawn) == made == set(shown)
    assert max(drawn.values()) < 100_000


def test_messages_of_the_troubleshooting_page_are_said() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## Slow")[0]
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r'"\s*f?"', "", source)  # texts that go on in the next line
    named = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(named) > 10
    assert not [message for message in named if message not in source]


@pytest.mark.parametrize("name", _script("notebooks").TUTORIALS)
def test_a_notebook_holds_the_blocks_of_its_page(name: str) -> None:
    """In their order; test_python_blocks_run runs them."""
    page = DOCS / f"{name}.md"
    notebooks = _script("notebooks")
    made = notebooks.notebook(page)
    code = [cell["source"] for cell in made["cells"] if cell["cell_type"] == "code"]
    python = [text.strip("\n") for _, text in blocks(page, "python")]
    assert [source for source in code if not source.startswith("%%")] == python
    for language in ("bash", "console"):
        for _, text in blocks(page, language):
            typed = text.replace("$ ", "").replace(notebooks.CHECKOUT, notebooks.INSTALL)
            typed = typed.splitlines()
            assert any(typed[0] in source for source in code)
    assert not any("](" in cell["source"] and ".md" in cell["source"] for cell in made["cells"])


@pytest.mark.parametrize("name", _script("notebooks").TUTORIALS)
def test_a_tutorial_trains(name: str) -> None:
    """A page that only shows batches is a how-to."""
    notebooks = _script("notebooks")
    cells = notebooks.notebook(DOCS / f"{name}.md")["cells"]
    code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    own = [source for source in code if source != notebooks.SETUP.strip("\n")]
    trains = re.compile(r"\beasypipe (quickstart|train)\b|\bTrainer\(|(?<![\w.])train\(")
    assert any(trains.search(source) for source in own)


def test_every_config_class_is_explained() -> None:
    """The generated reference has words for each class, of its own and not dataclass's list of
    fields.
    """
    reference = _reference()
    silent = [
        cls.__qualname__
        for cls in reference.config_classes()
        if not any(reference.docstring_parts(cls))
    ]
    assert not silent, f"say what these are for in their docstrings: {silent}"


def test_reference_pages_name_everything() -> None:
    import easypipe

    reference = _reference()
    page = reference.config_page()
    assert all(f"## {cls.__name__}\n" in page for cls in reference.config_classes())
    assert any(is_config(cls) for cls in reference.config_classes())
    options = reference.options_page()
    assert all(
        f"| `{option}` | " in options
        for option in ("shuffle_buffer_size", "cache_tokenized", "num_streams", "accumulate_steps")
    )
    api = reference.api_page()
    assert api.count(":::") == len(easypipe.__all__) - 1  # all but __version__


def test_every_key_has_its_line() -> None:
    """Its type, its default and what it means, in one table on one page."""
    reference = _reference()
    silent = [
        f"{cls.__name__}.{name}"
        for cls in reference.config_classes()
        for name in reference.field_names(cls)
        if len(reference.key_words(cls).get(name, "")) < 8
    ]
    assert not silent, f"say what these mean, beside the field or in the docstring: {silent}"
    page = reference.config_page()
    for cls in reference.config_classes():
        section = page.partition(f"## {cls.__name__}\n")[2].partition("\n## ")[0]
        for name in reference.field_names(cls):
            [row] = [line for line in section.splitlines() if line.startswith(f"| `{name}` |")]
            assert all(cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]), row


def test_every_option_of_the_command_line_has_its_line() -> None:
    reference = _reference()
    page = reference.cli_page()
    for name, command in reference.cli_commands().items():
        section = page.partition(f"## easypipe {name}\n")[2].partition("\n## ")[0]
        assert f"easypipe {name}" in section.partition("```console")[2], f"no example: {name}"
        for parameter in command.params:
            assert parameter.help or parameter.name == "help", f"{name}: {parameter.name}"
            if parameter.opts[0].startswith("-") and parameter.name != "help":
                assert f"`{parameter.opts[0]}`" in section, f"{name}: {parameter.name}"


def test_every_public_name_says_what_it_is() -> None:
    import easypipe

    aliases = {"Result"}  # which have no docstring of their own
    silent = [
        name
        for name in easypipe.__all__
        if name not in {*aliases, "__version__"}
        and not (getattr(easypipe, name).__doc__ or "").strip()
    ]
    assert not silent, f"public names without a docstring: {silent}"


def _with_lines(found: list[tuple[int, str]]) -> Iterator[tuple[int, str, int]]:
    """(first line, text, lines written before it)."""
    done = 0
    for line, text in found:
        yield line, text, done
        done = line - 1 + text.count("\n")


def _leaves(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for item in node:
            yield from _leaves(item)
    elif isinstance(node, dict):
        for item in node.values():
            yield from _leaves(item)


def _reference() -> ModuleType:
    return _script("reference")


@pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="the way of a row is drawn with Python 3.11, where comprehensions are functions",
)
def test_the_pictures_of_the_architecture_are_as_the_code_is() -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "architecture.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
