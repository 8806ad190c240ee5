"""Published weights onto a mesh: every device's part of every array is read from the files, and
nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from easypipe.core.errors import ConfigError, StateError
from easypipe.train import state as states
from easypipe.train.model.config import PretrainedConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.pretrained.families import Weight, from_hf, weights
from easypipe.train.model.pretrained.files import (
    CONFIG,
    WeightFiles,
    model_folder,
    read_config,
    short,
)
from easypipe.train.parallel.mesh import make_mesh

# buffers of old versions, computed anew here
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
    """A Decoder with the weights of a folder, or of a Hub repository, in the manner of
    `transformers`; called on Int[B, S] it gives logits.

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

    def build(self) -> Decoder:
        """The decoder with new values, for `nnx.eval_shape`: its arrays say how the weights have to
        lie.
        """
        decoder = Decoder(self.config, nnx.Rngs(0))
        decoder.hf_config = self.hf_config
        return decoder

    def read(self, layout: states.ModelLayout) -> states.Arrays:
        """The weights, by the decoder's names, laid out as `layout` says. Raises what
        load_pretrained does.
        """
        named, arrays = weights(self.config), {**layout.params, **layout.rest}
        with WeightFiles(model_folder(self.named.pretrained, self.named.revision)) as files:
            _check(files, named, arrays, self.config.num_layers, tied=self.config.tie_embeddings)
            return {name: _placed(files, weight, arrays[name]) for name, weight in named.items()}


def find_pretrained(config: PretrainedConfig, *, has_adapters: bool = False) -> Pretrained:
    """What load_pretrained would load. has_adapters: parameters are frozen, so that `dtype` serves
    them too where none is given.

    Raises what load_pretrained does.
    """
    named, folder = config.resolved()
    hf, text = read_config(folder)
    param_dtype = config.param_dtype or (config.dtype if has_adapters else "float32")
    shape = from_hf(hf, at=str(folder / CONFIG))
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
    num_layers: int,
    *,
    tied: bool,
) -> None:
    """Raises StateError that names every missing and unexpected weight, or every one of the wrong
    shape.
    """
    shapes = {}
    for ours, weight in named.items():
        shape = params[ours].shape[1 if weight.stacked else 0 :]
        for layer in range(num_layers if weight.stacked else 1):
            shapes[weight.name.format(i=layer)] = shape[::-1] if weight.transposed else shape
    missing = [name for name in shapes if name not in files]
    # some files repeat the table that is also the head
    tied_head = {"lm_head.weight"} if tied else set()
    unexpected = sorted(
        name
        for name in files
        if name not in shapes and name not in tied_head and not name.endswith(_IGNORED)
    )
    if missing or unexpected:
        parts = [
            f"{what}: {short(names)}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise StateError(
            at=str(files.folder),
            problem=f"weights are not those of its config.json; {'; '.join(parts)}",
            fix="Compare with config.json.",
        )
    wrong = [
        f"{name} is {list(files.shape(name))}, not {list(shape)}"
        for name, shape in shapes.items()
        if files.shape(name) != shape
    ]
    if wrong:
        raise StateError(
            at=str(files.folder),
            problem=f"shapes do not follow from config.json: {short(wrong)}",
            fix="Compare with config.json.",
        )


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
