"""A run's folder, opened again: the model of one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from easypipe.core.config import from_dict
from easypipe.core.errors import ConfigError, MissingFileError, StateError
from easypipe.train import state as states
from easypipe.train.checkpoint.checkpoint import Checkpoints
from easypipe.train.checkpoint.files import CHECKPOINTS
from easypipe.train.config import TrainingConfig
from easypipe.train.model.classifier_config import ClassifierConfig
from easypipe.train.model.decoder import ModelConfig
from easypipe.train.model.lora import fingerprint
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.train.model.pretrained.load import Pretrained
from easypipe.train.model.pretrained.origin import Model, Origin, from_pretrained, origin_of
from easypipe.train.model.pretrained.save import Seen
from easypipe.train.optim.optimizers import Optimizer, make_optimizer
from easypipe.train.parallel.mesh import make_mesh


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run had at a step. tokenizer: the name of the one that made its tokens, None where it
    is not known.
    """

    model: Any
    step: int
    tokenizer: str | None
    seen: Seen  # what its data was, for save_pretrained
    base: str | None  # folder or Hub name of the published model that it began with


def load_trained(
    run: str | Path, step: int | None = None, *, base: Model | None = None, mesh: Mesh | None = None
) -> Trained:
    """The model of a run's folder at `step`, None for the newest; with its adapters, and averaged
    where the optimizer averages.

    base: the model that the run began with, where that was a module or a function from Python.
    mesh: where the arrays lie; None: whole on the first device. Raises MissingFileError for a
    folder without checkpoints; ConfigError for a step that has none, and for a model that is not
    known here; StateError for damage, and for a base that is not the one the adapters were trained
    on.
    """
    folder = Path(run).expanduser() / CHECKPOINTS
    if not folder.is_dir():
        raise MissingFileError(
            at=str(folder),
            problem="no such folder",
            fix="Give the output_dir of a run that has saved a checkpoint.",
        )
    with Checkpoints(folder, keep=None) as checkpoints:
        steps = checkpoints.steps()
        if not steps or (step is not None and step not in steps):
            raise ConfigError(
                at=str(folder),
                problem=f"no checkpoint of step {step}",
                have=steps,
                fix="Give one of these, or none.",
            )
        step = steps[-1] if step is None else step
        saved = checkpoints.run(step)
        config = from_dict(TrainingConfig, saved["train"])
        origin = _origin(saved, config, base, str(folder / str(step)))
        mesh = make_mesh(devices=jax.local_devices()[:1]) if mesh is None else mesh
        with states.on(mesh):
            layout = states.layout_of(nnx.eval_shape(origin.build), mesh, origin.trained)
            optimizer = Optimizer(optax.identity())
            if (
                config.optimizer.name == "schedule_free"
                and saved["identity"]["train"]["optimizer"].get("name") == "schedule_free"
            ):
                optimizer = make_optimizer(
                    config.optimizer,
                    saved["identity"]["train"]["steps"],
                    layout.decays,
                    layout.hidden,
                )
            wanted = layout.without_frozen(states.flatten(states.abstract_state(layout, optimizer)))
            arrays = checkpoints.load(step, wanted, partial=True)
            if layout.frozen:
                rest = origin.state(layout, optimizer).rest
                _check_base(
                    saved["frozen"],
                    {name: rest[name] for name in layout.frozen},
                    str(folder / str(step)),
                )
                arrays |= {f"rest/{name}": rest[name] for name in layout.frozen}
            state = states.unflatten(arrays, states.abstract_state(layout, optimizer))
            model = layout.merge(optimizer.eval_params(state.optimizer, state.params), state.rest)
    origin_name = saved.get("origin")
    return Trained(
        model=model,
        step=step,
        tokenizer=saved.get("tokenizer"),
        seen=Seen.recorded(saved),
        base=origin_name and str(origin_name["config"]["pretrained"]),
    )


def _origin(saved: Any, config: TrainingConfig, base: Model | None, at: str) -> Origin:
    """What the run began with, as its checkpoint describes it."""
    if base is not None:
        return origin_of(base, config.seed, config.lora)
    if saved["identity"]["model"] is None:
        fix = "Give the same as `base`: load_trained(run, base=...)."
        raise ConfigError(
            at=at,
            problem="its model was a module or a function from Python, which is not known here",
            fix=fix,
        )
    described = saved["identity"]["model"]
    if "num_classes" in described:
        return origin_of(from_dict(ClassifierConfig, described), config.seed, config.lora)
    shape = from_dict(ModelConfig, described)
    if saved.get("origin") is None:
        return origin_of(shape, config.seed, config.lora)
    named = from_dict(PretrainedConfig, saved["origin"]["config"])
    return from_pretrained(
        Pretrained(named, shape, saved["origin"]["hf_config"]), config.seed, config.lora
    )


def _check_base(saved: dict[str, int], frozen: states.Arrays, at: str) -> None:
    here = fingerprint(frozen)
    others = [name for name, bits in saved.items() if here.get(name) != bits]
    if others:
        problem = (
            f"its adapters were trained on other weights: {', '.join(sorted(others)[:4])} differ"
        )
        raise StateError(
            at=at,
            problem=problem,
            fix="Give the model that the run began with: load_trained(run, base=...).",
        )
