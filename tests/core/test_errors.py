from __future__ import annotations

import inspect
import pickle
import re
import sys
import unicodedata
from importlib import metadata
from pathlib import Path

import pytest

from easypipe.core import errors
from easypipe.core.visible import first_of, visible


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = re.findall(r"[├└]── (\w+)\s+\((\w+)\)", errors.__doc__ or "")
    assert drawn
    for name, base in drawn:
        cls = getattr(errors, name)
        assert base in {c.__name__ for c in cls.__mro__}, f"{name} is not a {base}"
        assert issubclass(cls, errors.EasypipeError)
        error = cls(at="file.txt, row 3", problem="bad", have=["a", "b"], fix="Do this.")
        assert str(error) == "file.txt, row 3: bad (have: a, b). Do this."
    defined = {
        n
        for n, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, errors.EasypipeError)
    }
    assert defined - {"EasypipeError"} == {name for name, _ in drawn}


def test_an_error_crosses_processes_whole() -> None:
    error = errors.SchemaError(at="a", problem="b", have=[1, 2], fix="c.")
    error.add_note("row 3")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is errors.SchemaError
    assert (str(copied), copied.have) == ("a: b (have: 1, 2). c.", ["1", "2"])
    assert copied.__notes__ == ["row 3"]


def test_place_and_suggestion() -> None:
    assert errors.place("a.jsonl", row=3, column="text") == "a.jsonl, row 3, column 'text'"
    assert errors.did_you_mean("cod", ["code", "text"]) == "Did you mean 'code'?"
    assert errors.did_you_mean("zzz", ["code"]) is None
    assert errors.did_you_mean("anything", []) is None


def test_a_few_names_are_told() -> None:
    assert errors.few("abcdefgh") == list("abcdefgh")
    assert errors.few("abcdefghi") == [*"abcdefgh", "..."]


def test_what_a_path_was_perhaps_meant_to_be(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").touch()
    (tmp_path / ".hidden").touch()
    told = ["rows.txt"]
    assert errors.near_path(tmp_path / "row.txt" / "x") == (told, "Did you mean 'rows.txt'?")
    assert errors.near_path(tmp_path / "rows.txt" / "x") == (told, None), "it is there, as a file"


@pytest.mark.parametrize(
    ("error", "fix", "told"),
    [
        (OSError("no"), "Do it.", "a: cannot be read: no. Do it."),
        (PermissionError("no"), "Do it.", "a: cannot be read: no. Check the path and permissions."),
        (PermissionError("no"), "Check permissions.", "a: cannot be read: no. Check permissions."),
    ],
)
def test_access_that_is_denied_has_advice_of_its_own(error: OSError, fix: str, told: str) -> None:
    with (
        pytest.raises(errors.StorageError) as caught,
        errors.raising(errors.StorageError, "a", "cannot be read", fix),
    ):
        raise error
    assert str(caught.value) == told


def test_every_package_of_the_extra_is_named() -> None:
    """Those of pyproject.toml, as they are imported, and jaxlib, which comes with jax."""
    told = [
        re.match(r"[\w-]+", one)
        for one in metadata.requires("easypipe") or ()
        if "'train'" in one.replace('"', "'")
    ]
    imported = {one[0].removesuffix("-checkpoint") for one in told if one} | {"jaxlib"}
    assert imported == {*errors.TRAIN_EXTRA}
    for name in sorted(imported):
        with (
            pytest.raises(
                errors.MissingExtraError, match=rf"{name}: is not installed.*'easypipe\[train\]'"
            ),
            errors.naming_extra(),
        ):
            raise ModuleNotFoundError(name=f"{name}.inner")
    with pytest.raises(ModuleNotFoundError), errors.naming_extra():
        raise ModuleNotFoundError(name="torch")


def test_a_sentence_ends_once() -> None:
    assert str(errors.EasypipeError(at="a", problem="b.", fix="c.")) == "a: b. c."
    assert str(errors.EasypipeError(at="a", problem="b ...", fix="c.")) == "a: b ... c."


def test_names_of_several_words_are_near_by_their_words() -> None:
    prompt = ["format_type", "template", "label_column", "template_date"]
    assert errors.did_you_mean("chat_template", prompt) == "Did you mean 'template'?"
    assert errors.did_you_mean("label", prompt) == "Did you mean 'label_column'?"
    # the last word counts
    assert (
        errors.did_you_mean("template", ["template_date", "chat_template"])
        == "Did you mean 'chat_template'?"
    )
    tokenizer = ["padding", "padding_side"]  # a letter too few is nearer than a word too many
    assert errors.did_you_mean("padding_sid", tokenizer) == "Did you mean 'padding_side'?"
    assert errors.did_you_mean("lr", ["lora", "learning_rate"]) == "Did you mean 'learning_rate'?"


def test_no_character_hides_or_steers_what_is_shown() -> None:
    every = [chr(point) for point in range(sys.maxunicode + 1)]
    hidden = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # of Unicode's categories; Bidi marks are in Cf
    for c in every:
        assert visible(c) == (f"\\u{{{ord(c):x}}}" if unicodedata.category(c) in hidden else c)
    assert visible("a\n\x1b[0mb\u2029", keep="\n") == "a\n\\u{1b}[0mb\\u{2029}"


@pytest.mark.parametrize(("most", "text"), [(3, "a, b, c"), (2, "a, b and 1 more")])
def test_the_first_of_some_names(most: int, text: str) -> None:
    assert first_of(["a", "b", "c"], most) == text
