"""Where a model comes from: a seed, a module, or published weights, each tensor with its place.

With published weights, every device reads only its part of every array from the files.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from easypipe.core.config import to_dict
from easypipe.core.errors import ConfigError, StateError, require
from easypipe.core.values import JsonObject
from easypipe.core.visible import first_of
from easypipe.train import state as states
from easypipe.train.losses.loss import call_names
from easypipe.train.model.classifier import Classifier
from easypipe.train.model.config import ClassifierConfig, LoraConfig
from easypipe.train.model.decoder import AddedTokens, Decoder, ModelConfig
from easypipe.train.model.lora import add_lora
from easypipe.train.model.pretrained.added import added_ids
from easypipe.train.model.pretrained.config import PretrainedConfig
from easypipe.train.model.pretrained.families import Weight, from_hf, weights
from easypipe.train.model.pretrained.files import (
    CONFIG,
    GrownFiles,
    WeightFiles,
    in_words,
    model_folder,
    read_config,
    unlike,
)
from easypipe.train.optim.optimizers import Optimizer
from easypipe.train.parallel.mesh import make_mesh
from easypipe.train.record import from_anywhere

# A vocabulary that has to grow becomes a multiple of this, so that it divides over meshes like the
# old one.
MULTIPLE = 64
_IGNORED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")  # buffers of old versions


def load_pretrained(
    path_or_hub_name: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    param_dtype: Literal["float32", "bfloat16"] | None = None,
    remat: Literal["none", "dots", "full"] = "none",
    scan_layers: bool = True,
    revision: str | None = None,
) -> Decoder:
    """Loads a Decoder with the weights of a model in the format of `transformers`.

    They are those of a folder or of a Hub repository. Called on Int[B, S], the model returns
    logits. Families: Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text), and all others with
    their model_type, such as SmolLM2.

    Files are read a part at a time: the host never holds more than the parts of one array that its
    own devices take (an array has all layers of one projection).

    Args:
        path_or_hub_name: The folder or Hub name.
        mesh: The mesh for the arrays, which are sharded as for training, with the axes of
            `make_mesh`; None: whole on the first device.
        dtype: The dtype of products and activations.
        param_dtype: The dtype of the parameters; None: `dtype`.
        remat: As in ModelConfig.
        scan_layers: As in ModelConfig.
        revision: The branch, tag or commit of a Hub repository; None: main.

    Raises:
        MissingFileError: Files are missing.
        ConfigError: The model is of another kind; the message names the key of config.json.
        StateError: Weights are missing or unexpected, shapes are wrong, or files are damaged.
        SourceError: The Hub refuses.
    """
    try:
        named = PretrainedConfig(
            pretrained=path_or_hub_name,
            revision=revision,
            dtype=dtype,
            param_dtype=param_dtype or dtype,
            remat=remat,
            scan_layers=scan_layers,
        )
    except ConfigError as error:
        raise error.under("load_pretrained") from None
    found = find_pretrained(named)
    mesh = make_mesh(devices=jax.local_devices()[:1]) if mesh is None else mesh
    with states.on(mesh):
        layout = states.layout_of(nnx.eval_shape(found.build), mesh)
    return cast("Decoder", layout.merge(found.read(layout), {}))


@dataclass(frozen=True)
class Pretrained:
    """A published model whose config.json was read but whose weights were not.

    Attributes:
        named: The options of the model, with its commit.
        config: The ModelConfig of the model.
        hf_config: The text of its config.json.
    """

    named: PretrainedConfig
    config: ModelConfig
    hf_config: str

    def build(self, *, rows_alone: bool = False) -> Decoder:
        """Returns a decoder with initial values, for `nnx.eval_shape`.

        Its arrays show how weights are sharded.

        Args:
            rows_alone: Whether the rows of new tokens are separate arrays, which are trained while
                everything else is frozen.
        """
        decoder = Decoder(self.config, nnx.Rngs(0))
        decoder.hf_config = self.hf_config
        if rows_alone:
            decoder.added = AddedTokens(self.config, self.added)
        return decoder

    @functools.cached_property
    def added(self) -> range:
        """The ids of the new tokens. Errors are those of added_ids and resolved."""
        return added_ids(self.named.resolved()[1], self.named.add_tokens)

    def read(self, layout: states.ModelLayout) -> states.Arrays:
        """Reads the weights, by the decoder's names, sharded as in `layout`.

        Errors are those of load_pretrained.
        """
        named, arrays = weights(self.config), {**layout.params, **layout.rest}
        folder = model_folder(self.named.pretrained, self.named.revision)
        if not self.named.add_tokens:
            with WeightFiles(folder) as files:
                return self._read(files, named, arrays)
        with GrownFiles(folder, self.config.vocabulary, self.added) as files:
            found = self._read(files, named, arrays)
            for ours, of in (("added.embedding", "embedding"), ("added.lm_head", "head.kernel")):
                if ours in arrays:  # separate rows, initialized as in the table
                    wanted, mean = arrays[ours], files.mean(named[of].name).astype(np.float32)
                    mean = mean[:, None] if named[of].transposed else mean
                    rows = np.broadcast_to(mean, wanted.shape)
                    found[ours] = jax.make_array_from_callback(
                        wanted.shape, wanted.sharding, rows.__getitem__
                    )
            return found

    def _read(
        self,
        files: WeightFiles,
        named: dict[str, Weight],
        arrays: Mapping[str, jax.ShapeDtypeStruct],
    ) -> states.Arrays:
        _check(files, named, arrays, self.config)
        return {name: _placed(files, weight, arrays[name]) for name, weight in named.items()}


def find_pretrained(config: PretrainedConfig, *, has_adapters: bool = False) -> Pretrained:
    """Returns the model that load_pretrained would load, without reading its weights.

    Errors are those of load_pretrained.

    Args:
        config: The options of the model.
        has_adapters: Whether its parameters are frozen; `dtype` is then their default dtype too.
    """
    named, folder = config.resolved()
    hf, text = read_config(folder)
    frozen = has_adapters or config.only_added_tokens
    param_dtype = config.param_dtype or (config.dtype if frozen else "float32")
    shape = from_hf(hf, at=str(folder / CONFIG))
    if config.add_tokens:
        needed = added_ids(folder, config.add_tokens).stop
        if needed > shape.vocabulary:
            size = -(-needed // MULTIPLE) * MULTIPLE
            shape = dataclasses.replace(shape, vocab_size=size)
            text = json.dumps(hf | {"vocab_size": size}, sort_keys=True)
    try:
        shape = dataclasses.replace(
            shape,
            param_dtype=param_dtype,
            dtype=config.dtype,
            remat=config.remat,
            attention=config.attention,
            scan_layers=config.scan_layers,
        )
    except ConfigError as error:  # an attention that cannot run with these heads
        raise error.under("model") from None
    return Pretrained(named, shape, text)


def _check(
    files: WeightFiles,
    named: dict[str, Weight],
    params: Mapping[str, jax.ShapeDtypeStruct],
    config: ModelConfig,
) -> None:
    """Compares the tensors of the files with the weights that are needed.

    Raises:
        StateError: The message names every missing and unexpected weight, or every wrong shape.
    """
    shapes = {}
    for ours, weight in named.items():
        shape = params[ours].shape[1 if weight.stacked else 0 :]
        for layer in range(config.num_layers if weight.stacked else 1):
            shapes[weight.name.format(i=layer)] = shape[::-1] if weight.transposed else shape
    # Some files repeat the table that is also the head.
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    found = {
        name: files.shape(name)
        for name in files
        if name in shapes or not (name in ignored or name.endswith(_IGNORED))
    }
    others = unlike(shapes, found)
    wrong = others.pop("wrong")
    problem = f"shapes do not follow from config.json: {first_of(wrong)}"
    if any(others.values()):
        problem = f"weights are not those of its config.json; {in_words(others)}"
    if wrong or any(others.values()):
        fix = "Compare with config.json."
        raise StateError(at=str(files.folder), problem=problem, fix=fix)


def _placed(files: WeightFiles, weight: Weight, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads an array of the decoder part by part, with the sharding of `wanted`."""
    parts: dict[
        tuple[tuple[int, int], ...], np.ndarray
    ] = {}  # replicas share a part, which is read once

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = tuple(
            slice(*one.indices(size)[:2]) for one, size in zip(index, wanted.shape, strict=True)
        )
        key = tuple((one.start, one.stop) for one in bounds)
        if key not in parts:
            parts[key] = _read(files, weight, bounds, wanted.dtype)
        return parts[key]

    array = jax.make_array_from_callback(wanted.shape, wanted.sharding, part)
    # Waits before the next array is read: pending transfers would keep their host copies.
    return jax.block_until_ready(array)


def _read(
    files: WeightFiles, weight: Weight, bounds: tuple[slice, ...], dtype: DTypeLike
) -> np.ndarray:
    """Reads a part of an array, whose layers may be separate tensors."""
    if not weight.stacked:
        return _turned(files, weight.name, weight.transposed, bounds).astype(dtype)
    layers, inner = range(bounds[0].start, bounds[0].stop), bounds[1:]
    out = np.empty((len(layers), *(one.stop - one.start for one in inner)), jnp.dtype(dtype))
    for place, layer in enumerate(layers):
        out[place] = _turned(files, weight.name.format(i=layer), weight.transposed, inner)
    return out


def _turned(
    files: WeightFiles, name: str, transposed: bool, bounds: tuple[slice, ...]
) -> np.ndarray:
    """Reads a part of a tensor, transposed if it is so in the file."""
    found = files.read(name, bounds[::-1] if transposed else bounds)
    return found.T if transposed else found


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
    """The starting point of a run.

    Attributes:
        build: Makes the module with its adapters; its arrays have their initial values, except
            those that `pretrained` reads.
        config: The config of a Decoder.
        classifier: The config of a Classifier.
        is_module: Whether the arrays of `build` belong to the caller, so that they are copied.
        pretrained: The published model, if it is one.
        trained: The type of variable that is trained.
    """

    build: Callable[[], nnx.Module]
    config: ModelConfig | None = None
    classifier: ClassifierConfig | None = None
    is_module: bool = False
    pretrained: Pretrained | None = None
    trained: type[nnx.Variable[jax.Array]] = nnx.Param

    @property
    def shape(self) -> ModelConfig | ClassifierConfig | None:
        """The config by which checkpoints identify the model; None for a module from Python."""
        return self.config or self.classifier

    def record(self) -> JsonObject | None:
        """Returns a published model's name, commit and config.json, for checkpoints."""
        found = self.pretrained
        return (
            None
            if found is None
            else {
                "config": to_dict(found.named)
                | {"pretrained": from_anywhere(str(found.named.pretrained))},
                "hf_config": found.hf_config,
            }
        )

    def state(
        self, layout: states.ModelLayout, optimizer: Optimizer, made_of: str | None = None
    ) -> states.TrainState:
        """Returns the state before the first step.

        Call it inside `state.on(layout.mesh)`. Errors of files are those of load_pretrained.

        Args:
            layout: The layout of the model.
            optimizer: The optimizer.
            made_of: See init_state.
        """
        if self.is_module:
            return states.state_from(self.build(), layout, optimizer)
        if self.pretrained is None:
            return states.init_state(self.build, layout, optimizer, made_of)
        read = self.pretrained.read(layout)
        new = {
            name: value for name, value in layout.params.items() if name not in read
        }  # arrays of adapters
        born = jax.jit(
            lambda: {name: layout.split(self.build())[0][name] for name in new},
            out_shardings=states.shardings(new),
        )
        arrays = {**read, **born()}
        params, rest = (
            {name: arrays[name] for name in part} for part in (layout.params, layout.rest)
        )
        return states.state_around(params, rest, layout, optimizer)


def origin_of(
    model: Model, seed: int, lora: LoraConfig | None = None, *, scores: bool = False
) -> Origin:
    """Returns the starting point of a run; makes no array.

    Errors of published models are those of `find_pretrained`.

    Args:
        model: Anything that `easypipe.Trainer` accepts as a model.
        seed: The seed of the initial values.
        lora: The options of adapters, if any.
        scores: Whether the model becomes a reward model.

    Raises:
        ConfigError: It is not a model.
    """
    if isinstance(model, str | Path):
        model = PretrainedConfig(pretrained=model)
    trained, adapted = _adapting(seed, lora, scores=scores)
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
        found = find_pretrained(model, has_adapters=lora is not None)
        return from_pretrained(found, seed, lora, scores=scores)
    if isinstance(model, nnx.Module):
        module = model
        config = module.config if isinstance(module, Decoder) else None
        return Origin(
            build=lambda: adapted(nnx.clone(module, variables=False)),
            config=config,
            is_module=True,
            trained=trained,
        )
    linen = sys.modules.get("flax.linen")  # a caller with such a module has imported it
    if linen is not None and isinstance(model, linen.Module):
        bridged = cast("linen.Module", model)
        return Origin(build=lambda: adapted(_from_linen(bridged, nnx.Rngs(seed))), trained=trained)
    if callable(model):
        return Origin(build=lambda: adapted(model(nnx.Rngs(seed))), trained=trained)
    problem = f"{type(model).__name__} is not a model"
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
    """Bridges a Linen module; its arrays get their shapes from a call with one short row."""
    row = jnp.zeros((1, 8), jnp.int32)
    taken = {
        name: row
        for name in call_names(nnx.bridge.ToNNX(module))
        if name in ("segment_ids", "position_ids")
    }
    bridged = nnx.bridge.lazy_init(nnx.bridge.ToNNX(module, rngs=rngs), row, **taken)
    return cast("nnx.Module", bridged)


def from_pretrained(
    found: Pretrained, seed: int, lora: LoraConfig | None, *, scores: bool = False
) -> Origin:
    """Returns the Origin of a published model.

    Raises:
        ConfigError: Adapters are given, but only new tokens are to be trained.
    """
    alone = found.named.only_added_tokens
    require(
        lora is None or not alone,
        "model.only_added_tokens",
        "has no effect with train.lora, which trains adapters too",
        "Leave one of them out.",
    )
    trained, adapted = _adapting(seed, lora, scores=scores)
    rows_alone = alone or (lora is not None and len(found.named.add_tokens) > 0)
    return Origin(
        build=lambda: adapted(found.build(rows_alone=rows_alone)),
        config=found.config,
        pretrained=found,
        trained=nnx.LoRAParam if rows_alone else trained,
    )


def _adapting(
    seed: int, lora: LoraConfig | None, *, scores: bool
) -> tuple[type[nnx.Variable[jax.Array]], Callable[[nnx.Module], nnx.Module]]:
    """Returns the type of variable that is trained, and a function that adds adapters."""

    def adapted(module: nnx.Module) -> nnx.Module:
        if scores:
            require(
                isinstance(module, Decoder),
                "train.preference.loss",
                f"reward, and {type(module).__name__} is not a Decoder, which could score answers",
                "Choose another loss, or a ModelConfig or published model.",
            )
            cast("Decoder", module).add_score(seed)
        try:
            return module if lora is None else add_lora(module, lora, seed)
        except ConfigError as error:
            raise error.under("train.lora") from None

    return (nnx.Param if lora is None else nnx.LoRAParam), adapted
