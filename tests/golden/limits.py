"""What every key of every config takes: which values, alone and beside each value of another key,
and which key a refusal names.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from easypipe.compat.classify import ClassifyConfig
from easypipe.compat.data_pipeline import DataPipelineConfig
from easypipe.compat.loaders import DataLoaderConfig
from easypipe.core.config import is_config
from easypipe.core.errors import EasypipeError
from easypipe.loader.collate import CollateConfig
from easypipe.run import RunConfig
from easypipe.stages.config import PipelineConfig
from golden.cases import golden
from option_effects import config_classes

ROOTS = (RunConfig, ClassifyConfig, DataPipelineConfig, DataLoaderConfig, CollateConfig)
NUMBERS = (-1, 0, 1, 2, 3)
OF_TYPE: dict[Any, tuple[Any, ...]] = {
    int: NUMBERS,
    float: (*NUMBERS, -0.5, 0.5, 1.5),
    bool: (False, True),
    str: ("", "a"),
}
OF_NAME = {"weights": ({}, {"a": 0.0}, {"a": 0.5, "b": 1.5}, {"a": -1.0})}
REQUIRED: dict[str, dict[str, Any]] = {
    "BestConfig": {"metric": "loss"},
    "ClassifyConfig": {
        "task": {"name": "a", "modality": "vision", "task_type": "classification"},
        "data": {"data_files": "a.parquet"},
        "train": {},
    },
    "DataPipelineConfig": {
        "type": "data_module",
        "version": "1.0",
        "dataset": {"name": "a"},
        "tokenizer": {"name_or_path": "a"},
        "prompt_template": {"format_type": "prompt_completion"},
    },
    "DatasetConfig": {"data_files": "a.jsonl"},
    "DatasetSection": {"name": "a"},
    "EarlyStoppingConfig": {"metric": "loss"},
    "FewShotConfig": {"examples": ({"question": "a", "answer": "b"},)},
    "HoldOutConfig": {"fraction": 0.5},
    "ImagesConfig": {"data_files": "a.parquet"},
    "LmEvalConfig": {"tasks": ("a",)},
    "ParameterGroup": {"match": "a"},
    "PipelineConfig": {"datasets": ({"data_files": "a.jsonl"},)},
    "PretrainedConfig": {"pretrained": "a"},
    "RopeScaling": {"kind": "linear", "factor": 2.0},
    "RunConfig": {"data": {"datasets": ({"data_files": "a.jsonl"},)}, "train": {}},
    "TaskSpec": {"name": "a", "modality": "text", "task_type": "causal_lm"},
    "TokenizerConfig": {"name_or_path": "a"},
    "TokenizerSection": {"name_or_path": "a"},
    "WeightSchedulePoint": {"step": 1, "weights": {"a": 1.0}},
}
ACCEPTED = "ok"


def classes() -> dict[str, type]:
    """The classes that the configs of runs, and of other libraries' names, are made of."""
    return dict(sorted(config_classes(*ROOTS).items()))


def values_of(name: str, hint: Any) -> list[Any]:
    """What is tried of a key: of a choice everything, of numbers some on both sides of its limits."""
    if name in OF_NAME:
        return [*OF_NAME[name]]
    if typing.get_origin(hint) is Literal:
        return [*typing.get_args(hint)]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [value for one in typing.get_args(hint) for value in values_of("", one)]
    if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is str:
        return [(), ("a",), ("a", "a")]
    return [*OF_TYPE.get(hint, ())]


def keys_of(cls: type) -> dict[str, list[Any]]:
    """The values to try of each key that has no keys itself."""
    hints = typing.get_type_hints(cls)
    found = {one.name: values_of(one.name, hints[one.name]) for one in dataclasses.fields(cls)}
    return {key: values for key, values in found.items() if values}


def keys_of_sections(cls: type) -> dict[str, list[Any]]:
    """The same by dotted keys, of the sections that a config is made of."""
    hints = typing.get_type_hints(cls)
    return {
        f"{one.name}.{key}": values
        for one in dataclasses.fields(cls)
        for part in (hints[one.name], *typing.get_args(hints[one.name]))
        if is_config(part)
        for key, values in keys_of(part).items()
    }


def put(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with values by dotted keys; a section that is a list has its first part changed."""
    made = dict(base)
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if not rest:
            made[head] = value
        elif isinstance(section := made.get(head, {}), tuple):
            made[head] = (put(section[0], {rest: value}), *section[1:])
        else:
            made[head] = put(section, {rest: value})
    return made


def answer(cls: type, values: Mapping[str, Any]) -> str:
    """ "ok", or the keys that refusals name."""
    try:
        made = cls(**values)
    except EasypipeError as error:
        return f"at {error.at}"
    problems = made.problems() if isinstance(made, PipelineConfig | DataPipelineConfig) else []
    return " and ".join(f"at {problem.at}" for problem in problems) or ACCEPTED


def limits(cls: type) -> dict[str, dict[str, str]]:
    """By a key and its value (first: of none), what each other key answers to the values tried,
    where that differs from what it answers alone.
    """
    base = REQUIRED.get(cls.__name__, {})
    own = keys_of(cls)
    tried = {
        **own,
        **(keys_of_sections(cls) if cls in (PipelineConfig, DataPipelineConfig) else {}),
    }
    alone = {
        (key, repr(value)): answer(cls, put(base, {key: value}))
        for key, values in tried.items()
        for value in values
    }
    found = {"": dict(_lines(alone))}
    for key, values in own.items():
        for value in values:
            if alone[key, repr(value)] != ACCEPTED:
                continue
            beside = {
                (other, repr(one)): answer(cls, put(base, {key: value, other: one}))
                for other, others in tried.items()
                if other.partition(".")[0] != key
                for one in others
            }
            changed = {at: says for at, says in beside.items() if says != alone[at]}
            if changed:
                found[f"{key}={value!r}"] = dict(_lines(changed))
    return found


def _lines(answers: Mapping[tuple[str, str], str]) -> Iterator[tuple[str, str]]:
    by_key: dict[str, dict[str, list[str]]] = {}
    for (key, value), says in answers.items():
        by_key.setdefault(key, {}).setdefault(says, []).append(value)
    for key, said in by_key.items():
        yield key, "; ".join(f"{says}: {', '.join(values)}" for says, values in said.items())


@golden(*classes())
def limits_of(folder: Path, name: str) -> Any:
    return limits(classes()[name])
