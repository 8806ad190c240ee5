"""Where the model of a run comes from: a shape and a seed, a module, or published weights.

Of published weights every device reads its part of every array from the files, and nothing else.
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

# buffers of old versions, computed anew here
MULTIPLE = 64  # of a vocabulary that has to grow: it divides over meshes as the old one did
_IGNORED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")


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
    """A Decoder with the weights of a model in the manner of `transformers`.

    They are those of a folder, or of a Hub repository; called on Int[B, S] it gives logits.

    Families: Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text), and whatever else calls itself
    by their names, such as SmolLM2.
    mesh: where the arrays lie, sharded as training shards them; None: whole on the first device.
    Its axes are those of `make_mesh`.
    dtype: of products and activations. param_dtype: of the parameters; None: `dtype`. remat,
    scan_layers: as in ModelConfig.
    revision: branch, tag or commit of a Hub repository; None: main.

    Files are read a part at a time: at no time does the host hold more than the parts of one array
    that its own devices take (an array has all layers of one projection). Raises MissingFileError
    for files that are not there; ConfigError for a model of another kind, with the key of
    config.json; StateError for missing or unexpected weights, wrong shapes and damaged files;
    SourceError for the Hub.
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
    """A model whose config.json is read and whose weights are not."""

    named: PretrainedConfig  # at its commit
    config: ModelConfig
    hf_config: str

    def build(self, *, rows_alone: bool = False) -> Decoder:
        """The decoder with new values, for `nnx.eval_shape`: its arrays say how the weights have to
        lie. rows_alone: new tokens are apart, to be trained where all else is frozen.
        """
        decoder = Decoder(self.config, nnx.Rngs(0))
        decoder.hf_config = self.hf_config
        if rows_alone:
            decoder.added = AddedTokens(self.config, self.added)
        return decoder

    @functools.cached_property
    def added(self) -> range:
        """Ids of the new tokens. Raises what added_ids and resolved raise."""
        return added_ids(self.named.resolved()[1], self.named.add_tokens)

    def read(self, layout: states.ModelLayout) -> states.Arrays:
        """The weights, by the decoder's names, laid out as `layout` says.

        Raises what load_pretrained does.
        """
        named, arrays = weights(self.config), {**layout.params, **layout.rest}
        folder = model_folder(self.named.pretrained, self.named.revision)
        if not self.named.add_tokens:
            with WeightFiles(folder) as files:
                return self._read(files, named, arrays)
        with GrownFiles(folder, self.config.vocabulary, self.added) as files:
            found = self._read(files, named, arrays)
            for ours, of in (("added.embedding", "embedding"), ("added.lm_head", "head.kernel")):
                if ours in arrays:  # the rows alone, which begin as those in the table
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
    """What load_pretrained would load.

    has_adapters: parameters are frozen, so that `dtype` serves them too where none is given.

    Raises what load_pretrained does.
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
    except ConfigError as error:  # an attention that cannot be for these heads
        raise error.under("model") from None
    return Pretrained(named, shape, text)


def _check(
    files: WeightFiles,
    named: dict[str, Weight],
    params: Mapping[str, jax.ShapeDtypeStruct],
    config: ModelConfig,
) -> None:
    """Raises StateError that names every missing and unexpected weight, or every one of the wrong
    shape.
    """
    shapes = {}
    for ours, weight in named.items():
        shape = params[ours].shape[1 if weight.stacked else 0 :]
        for layer in range(config.num_layers if weight.stacked else 1):
            shapes[weight.name.format(i=layer)] = shape[::-1] if weight.transposed else shape
    # some files repeat the table that is also the head
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
    """One array of the decoder, read part by part and laid out as `wanted` says."""
    parts: dict[
        tuple[tuple[int, int], ...], np.ndarray
    ] = {}  # replicas take the same part: it is read once

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
    # before the next array is read: transfers that wait would keep their host copies
    return jax.block_until_ready(array)


def _read(
    files: WeightFiles, weight: Weight, bounds: tuple[slice, ...], dtype: DTypeLike
) -> np.ndarray:
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

    def record(self) -> JsonObject | None:
        """What a checkpoint keeps of a published model: its name, its commit, its config.json."""
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
        """The state before the first step.

        made_of: as init_state takes it. Raises what load_pretrained raises for files. Call inside
        `state.on(layout.mesh)`.
        """
        if self.is_module:
            return states.state_from(self.build(), layout, optimizer)
        if self.pretrained is None:
            return states.init_state(self.build, layout, optimizer, made_of)
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


def origin_of(
    model: Model, seed: int, lora: LoraConfig | None = None, *, scores: bool = False
) -> Origin:
    """Raises ConfigError for what is no model, and what `find_pretrained` raises for published
    ones; makes no array. scores: it becomes a reward model.
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


def from_pretrained(
    found: Pretrained, seed: int, lora: LoraConfig | None, *, scores: bool = False
) -> Origin:
    """Raises ConfigError for adapters where only new tokens shall be trained."""
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
) -> tuple[type[nnx.Variable], Callable[[nnx.Module], nnx.Module]]:
    """(what is trained, what puts it into a module)."""

    def adapted(module: nnx.Module) -> nnx.Module:
        if scores:
            require(
                isinstance(module, Decoder),
                "train.preference.loss",
                f"reward, and {type(module).__name__} is no Decoder, which could score answers",
                "Choose another loss, or a ModelConfig or published model.",
            )
            cast("Decoder", module).add_score(seed)
        try:
            return module if lora is None else add_lora(module, lora, seed)
        except ConfigError as error:
            raise error.under("train.lora") from None

    return (nnx.Param if lora is None else nnx.LoRAParam), adapted
