"""Where the model of a run comes from: a shape and a seed, a module, or the files of a published
model; with adapters, where asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
from flax import nnx

from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError
from easypipe.train import state as states
from easypipe.train.losses.loss import call_names
from easypipe.train.model.classifier import Classifier
from easypipe.train.model.config import ClassifierConfig, LoraConfig, PretrainedConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.lora import add_lora
from easypipe.train.model.pretrained.load import Pretrained, find_pretrained
from easypipe.train.optim.optimizers import Optimizer

if TYPE_CHECKING:
    from flax import linen

Model = (
    ModelConfig
    | ClassifierConfig
    | PretrainedConfig
    | str
    | Path
    | nnx.Module
    | Callable[[nnx.Rngs], nnx.Module]
)  # or a linen.Module, also a callable


@dataclass(frozen=True, kw_only=True)
class Origin:
    """`build` makes the module with its adapters; its arrays have their first values, except where
    `pretrained` reads those.
    """

    build: Callable[[], nnx.Module]
    config: ModelConfig | None = None  # of a Decoder
    classifier: ClassifierConfig | None = None  # of a Classifier
    is_module: bool = False  # `build` gives arrays that belong to somebody else
    pretrained: Pretrained | None = None
    trained: type[nnx.Variable] = nnx.Param

    @property
    def shape(self) -> ModelConfig | ClassifierConfig | None:
        """What checkpoints tell models apart by; None of a module from Python."""
        return self.config or self.classifier

    def record(self) -> dict[str, object] | None:
        """What a checkpoint keeps of a published model: its name, its commit, its config.json."""
        found = self.pretrained
        return (
            None
            if found is None
            else {"config": to_dict(found.named), "hf_config": found.hf_config}
        )

    def state(self, layout: states.ModelLayout, optimizer: Optimizer) -> states.TrainState:
        """The state before the first step. Raises what load_pretrained raises for files. Call
        inside `state.on(layout.mesh)`.
        """
        if self.is_module:
            return states.state_from(self.build(), layout, optimizer)
        if self.pretrained is None:
            return states.init_state(self.build, layout, optimizer)
        read = self.pretrained.read(layout)
        new = {name: value for name, value in layout.params.items() if name not in read}  # adapters
        born = jax.jit(
            lambda: {name: layout.split(self.build())[0][name] for name in new},
            out_shardings=states.shardings(new),
        )
        arrays = {**read, **born()}
        params, rest = (
            {name: arrays[name] for name in part} for part in (layout.params, layout.rest)
        )
        return states.state_around(params, rest, layout, optimizer)


def origin_of(model: Model, seed: int, lora: LoraConfig | None = None) -> Origin:
    """Raises ConfigError for what is no model, and what `find_pretrained` raises for published
    ones; makes no array.
    """
    if isinstance(model, str | Path):
        model = PretrainedConfig(pretrained=model)
    trained, adapted = _adapting(seed, lora)
    if isinstance(model, ModelConfig):
        return Origin(
            build=lambda: adapted(Decoder(model, nnx.Rngs(seed))), config=model, trained=trained
        )
    if isinstance(model, ClassifierConfig):
        classifier = model
        return Origin(
            build=lambda: adapted(Classifier(classifier, nnx.Rngs(seed))),
            classifier=classifier,
            trained=trained,
        )
    if isinstance(model, PretrainedConfig):
        return from_pretrained(find_pretrained(model, has_adapters=lora is not None), seed, lora)
    if isinstance(model, nnx.Module):
        module = model
        config = module.config if isinstance(module, Decoder) else None
        return Origin(
            build=lambda: adapted(nnx.clone(module, variables=False)),
            config=config,
            is_module=True,
            trained=trained,
        )
    linen = sys.modules.get("flax.linen")  # whoever has such a module has loaded it
    if linen is not None and isinstance(model, linen.Module):
        bridged = cast("linen.Module", model)
        return Origin(build=lambda: adapted(_from_linen(bridged, nnx.Rngs(seed))), trained=trained)
    if callable(model):
        return Origin(build=lambda: adapted(model(nnx.Rngs(seed))), trained=trained)
    problem = f"{type(model).__name__} is no model"
    have = (
        "ModelConfig",
        "ClassifierConfig",
        "PretrainedConfig",
        "a folder or Hub name",
        "nnx.Module",
        "linen.Module",
        "a function of nnx.Rngs",
    )
    raise ConfigError(at="model", problem=problem, have=have)


def _from_linen(module: linen.Module, rngs: nnx.Rngs) -> nnx.Module:
    """Its arrays take their shapes from a call with one short row."""
    row = jnp.zeros((1, 8), jnp.int32)
    taken = {
        name: row
        for name in call_names(nnx.bridge.ToNNX(module))
        if name in ("segment_ids", "position_ids")
    }
    bridged = nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=rngs), row, **taken)
    return cast("nnx.Module", bridged)


def from_pretrained(found: Pretrained, seed: int, lora: LoraConfig | None) -> Origin:
    trained, adapted = _adapting(seed, lora)
    return Origin(
        build=lambda: adapted(found.build()), config=found.config, pretrained=found, trained=trained
    )


def _adapting(
    seed: int, lora: LoraConfig | None
) -> tuple[type[nnx.Variable], Callable[[nnx.Module], nnx.Module]]:
    """(what is trained, what puts it into a module)."""

    def adapted(module: nnx.Module) -> nnx.Module:
        try:
            return module if lora is None else add_lora(module, lora, seed)
        except ConfigError as error:
            raise error.under("train.lora") from None

    return (nnx.Param if lora is None else nnx.LoRAParam), adapted
