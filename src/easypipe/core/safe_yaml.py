# pyright: strict
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""Safe YAML: limits on size and depth, no tags or duplicate keys; 1e-4 is a number."""

from __future__ import annotations

import re
from typing import Any

import yaml

# limits of a text: its nesting, the values that aliases may repeat, all its values (100,000 take
# two seconds), and its length (10 million characters take up to ten)
DEEPEST, MOST_REPEATED, MOST_VALUES, LONGEST = 100, 100_000, 300_000, 10_000_000


def read_yaml(text: str) -> Any:
    """Returns the value of a YAML text.

    Raises:
        yaml.YAMLError: The text is not YAML, or breaks one of the rules above.
    """
    if len(text) > LONGEST:
        raise yaml.YAMLError(f"it has more than {LONGEST:,} characters")
    return yaml.load(text, Loader=_SafeLoader)  # noqa: S506  (what yaml.safe_load does, with duplicate keys refused)


def wrong_yaml(error: yaml.YAMLError, text: str) -> tuple[int | None, str]:
    """Returns the line of a YAML error, counted from 1 (None if unknown), and its message."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return line, f"unacceptable character #x{error.character:04x}: {error.reason}"
    if not isinstance(error, yaml.MarkedYAMLError):
        return None, str(error)
    mark = error.problem_mark or error.context_mark
    words = [str(part) for part in (error.context, error.problem) if part]
    return None if mark is None else mark.line + 1, ", ".join(words)


class _SafeLoader(yaml.SafeLoader):
    """A YAML loader that keeps small files from growing into large values.

    Every error is a YAMLError that names its line.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = self.composed = self.repeated = 0  # counted in nodes
        self.sizes: dict[int, int] = {}  # by the id of a node, which the document keeps alive

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node; rejects deep nesting and aliases that repeat too many values."""
        before, self.depth = self.composed + self.repeated, self.depth + 1
        if self.depth > DEEPEST:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                problem=f"nested more than {DEEPEST} deep", problem_mark=mark
            )
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        if id(node) in self.sizes:  # an alias
            self.repeated += self.sizes[id(node)]
        else:
            self.composed += 1
            self.sizes[id(node)] = self.composed + self.repeated - before
        for count, most, what in (
            (self.repeated, MOST_REPEATED, "its aliases repeat"),
            (self.composed, MOST_VALUES, "it has"),
        ):
            if count > most:
                raise yaml.MarkedYAMLError(
                    problem=f"{what} more than {most:,} values", problem_mark=node.start_mark
                )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Constructs the value of a node; every failure becomes an error that names the line."""
        try:
            made: Any = super().construct_object(node, deep)  # pyright: ignore[reportUnknownMemberType]
            if isinstance(made, str) and any("\ud800" <= c <= "\udbff" for c in made):
                # JSON writes one letter as two escapes, "\ud83d\ude00"
                made = made.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
            if isinstance(made, int) and made.bit_length() > 128:
                raise ValueError("it has more than 128 bits")
            return made
        except yaml.YAMLError:
            raise
        except Exception as error:  # noqa: BLE001  (int() and date() raise errors of several types)
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"not a valid {kind}: {error or type(error).__name__}",
                problem_mark=node.start_mark,
            ) from None


def _mapping(loader: _SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Constructs a mapping; rejects duplicate keys and keys that are lists or mappings."""
    seen: set[Any] = set()
    for key_node, _ in node.value:
        # keys next to a merge key (<<) override those that it merges
        merges = key_node.tag == "tag:yaml.org,2002:merge"
        key: Any = "<<" if merges else loader.construct_object(key_node)
        mark = key_node.start_mark
        if not isinstance(key, str | int | float | None):
            raise yaml.MarkedYAMLError(problem="a key is not text", problem_mark=mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"key {key!r} appears twice", problem_mark=mark)
        seen.add(key)
    loader.flatten_mapping(node)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def _sequence(loader: _SafeLoader, node: yaml.SequenceNode) -> list[Any]:
    """Constructs a list; rejects one that contains itself."""
    return yaml.SafeLoader.construct_sequence(loader, node, deep=True)


_SafeLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_SafeLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SEQUENCE_TAG, _sequence)
# YAML 1.1 reads 1:30 as 90, 010 as 8, and 1e-4 as a text. Nobody means the first two: here they are
# texts, which are invalid for a numeric option. 1e-4 is a number.
_NUMBERS = {
    "int": r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)",
    "float": r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+|[-+]?[0-9][0-9_]*\.[0-9_]*"
    r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}
_SafeLoader.yaml_implicit_resolvers = {
    letter: [one for one in kinds if one[0].rpartition(":")[2] not in _NUMBERS]
    for letter, kinds in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in _NUMBERS.items():
    _SafeLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list("-+.0123456789")
    )
