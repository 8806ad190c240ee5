"""Opens a run's folder again: loads the model, tokenizer and adapters of one of its checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, MissingFileError, StateError, require
from easypipe.core.values import Json
from easypipe.train import state as states
from easypipe.train.checkpoint.checkpoint import Checkpoints
from easypipe.train.checkpoint.files import CHECKPOINTS
from easypipe.train.config import TrainingConfig
from easypipe.train.model.config import ClassifierConfig
from easypipe.train.model.decoder import ModelConfig
from easypipe.train.model.lora import fingerprint
from easypipe.train.model.pretrained.added import tokenizer_with
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.train.model.pretrained.origin import (
    Model,
    Origin,
    Pretrained,
    from_pretrained,
    origin_of,
)
from easypipe.train.model.pretrained.save import Seen
from easypipe.train.optim.optimizers import Optimizer, make_optimizer
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.record import found_beside


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The model of a run at a step.

    Attributes:
        model: The model, with its adapters.
        step: The step of the checkpoint.
        tokenizer: The name or path of the tokenizer that made the tokens; None if it is not known.
        seen: The record of the data that the run has seen, for save_pretrained.
        base: The folder or Hub name of the published model that the run started from, if any.
    """

    model: Any
    step: int
    tokenizer: str | None
    seen: Seen
    base: str | None


def load_trained(
    run: str | Path, step: int | None = None, *, base: Model | None = None, mesh: Mesh | None = None
) -> Trained:
    """Loads the model of a run's folder, with its adapters, and averaged if the optimizer averages.

    Args:
        run: The output_dir of the run.
        step: The step of the checkpoint; None: the newest.
        base: The model that the run started from, if that was a module or a function from Python.
        mesh: The mesh on which to place the arrays; None: whole on the first device.

    Raises:
        MissingFileError: The folder has no checkpoints.
        ConfigError: The step has no checkpoint, or the model is not known here.
        StateError: The checkpoint is damaged, or its adapters were trained on another base.
    """
    folder = Path(os.path.expanduser(run)) / CHECKPOINTS
    if not folder.is_dir():
        raise MissingFileError(
            at=str(folder),
            problem="no such folder",
            fix="Give the output_dir of a run that has saved a checkpoint.",
        )
    with Checkpoints(folder, keep=None) as checkpoints:
        steps = checkpoints.steps()
        require(
            steps,
            str(folder),
            "the run has saved no checkpoint yet",
            "Wait until it has, or train it again.",
        )
        require(
            step is None or step in steps,
            str(folder),
            f"no checkpoint of step {step}",
            "Give one of these, or none.",
            have=steps,
        )
        step = steps[-1] if step is None else step
        saved = checkpoints.run(step)
        mesh = make_mesh(devices=jax.local_devices()[:1]) if mesh is None else mesh
        with states.on(mesh):
            model = _model(checkpoints, step, saved, base, mesh)
    origin = saved.get("origin")
    return Trained(
        model=model,
        step=step,
        tokenizer=_tokenizer(saved, Path(os.path.expanduser(run))),
        seen=Seen.recorded(saved),
        base=origin and str(origin["config"]["pretrained"]),
    )


def _tokenizer(saved: Json, run: Path) -> str | None:
    """Returns the tokenizer of a run; makes it again if it has new tokens and is gone."""
    name = saved.get("tokenizer")
    found = name and found_beside(name, run)
    if found and not Path(found).exists() and (origin := saved.get("origin")) is not None:
        named = _named(origin, run)
        if named.add_tokens:
            return str(tokenizer_with(named.resolved()[1], named.add_tokens, run / "tokenizers"))
    return found


def _named(origin: Json, run: Path) -> PretrainedConfig:
    """Returns the published model that a run started from, as recorded in its checkpoint."""
    named = from_dict(PretrainedConfig, origin["config"])
    return replace(named, pretrained=found_beside(str(named.pretrained), run))


def _model(
    checkpoints: Checkpoints, step: int, saved: Json, base: Model | None, mesh: Mesh
) -> nnx.Module:
    """Loads the model of a checkpoint. Call it inside `state.on(mesh)`.

    Raises:
        StateError: The adapters were trained on other weights.
    """
    at, identity = str(checkpoints.folder / str(step)), saved["identity"]["train"]
    config = from_dict(TrainingConfig, saved["train"])
    origin = _origin(saved, config, base, at)
    layout = states.layout_of(nnx.eval_shape(origin.build), mesh, origin.trained)
    optimizer = Optimizer(optax.identity())
    if config.optimizer.averages and identity["optimizer"].get("name") == config.optimizer.name:
        optimizer = make_optimizer(
            config.optimizer, identity["steps"], layout.decays, layout.hidden, layout.stacked
        )
    abstract = states.abstract_state(layout, optimizer)
    wanted = layout.without_frozen(states.flatten(abstract))
    arrays = checkpoints.load(step, wanted, partial=True)
    if layout.frozen:
        rest = origin.state(layout, optimizer).rest
        frozen = {name: rest[name] for name in layout.frozen}
        here = fingerprint(frozen)
        if others := sorted(n for n, bits in saved["frozen"].items() if here.get(n) != bits):
            raise StateError(
                at=at,
                problem=f"its adapters were trained on other weights: {', '.join(others[:4])} "
                "differ",
                fix="Give the model that the run began with: load_trained(run, base=...).",
            )
        arrays |= {f"rest/{name}": array for name, array in frozen.items()}
    state = states.unflatten(arrays, abstract)
    return layout.merge(optimizer.eval_params(state.optimizer, state.params), state.rest)


def _origin(saved: Json, config: TrainingConfig, base: Model | None, at: str) -> Origin:
    """Returns the model that the run started from, as its checkpoint describes it.

    Raises:
        ConfigError: It was a module or a function from Python, and `base` was not given.
    """
    described, published = saved["identity"]["model"], saved.get("origin")
    scores = config.preference is not None and config.preference.scores
    if base is not None:
        model = base
    elif described is None:
        raise ConfigError(
            at=at,
            problem="its model was a module or a function from Python, which is not known here",
            fix="Give the same as `base`: load_trained(run, base=...).",
        )
    elif "num_classes" in described:
        model = from_dict(ClassifierConfig, described)
    else:
        model = from_dict(ModelConfig, described)
        if published is not None:
            named = _named(published, Path(at).parents[1])
            found = Pretrained(named, model, published["hf_config"])
            return from_pretrained(found, config.seed, config.lora, scores=scores)
    return origin_of(model, config.seed, config.lora, scores=scores)
