"""Greedy generation: easypipe with its cache of keys and values, against the same model that reads
its whole row again for each token, and against transformers where it and torch are installed.

Tokens of all must be equal: a difference is printed. Times are of whole calls on a model that is
compiled and warm.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import Report, alternate, arguments


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--shape", type=int, nargs=2, default=(256, 4), metavar=("WIDTH", "LAYERS"))
    options = parser.parse_args()

    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from easypipe import Decoder, ModelConfig
    from easypipe.train import save_pretrained
    from easypipe.train.model.generate import cache_bytes, generate

    width, layers = options.shape
    shape = ModelConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=3 * width,
        num_layers=layers,
        num_heads=width // 64,
        num_kv_heads=max(1, width // 128),
    )
    model = Decoder(shape, nnx.Rngs(0))
    rng = np.random.Generator(np.random.PCG64(0))
    prompts = [rng.integers(0, 8192, 16 + 8 * n).tolist() for n in range(options.prompts)]
    lengths = np.array([len(prompt) for prompt in prompts])
    rows = np.zeros((len(prompts), int(lengths.max()) + options.new_tokens), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def whole_rows(tokens: Any) -> Any:
        every = jnp.arange(len(prompts))

        def add_one(step: Any, tokens: Any) -> Any:
            last = lengths + step - 1
            logits = model.logits(model.hidden(tokens)[every, last])
            return tokens.at[every, last + 1].set(logits.argmax(axis=-1).astype(tokens.dtype))

        return jax.lax.fori_loop(0, options.new_tokens, add_one, tokens)

    def by_cache() -> Any:
        return generate(model, prompts, max_new_tokens=options.new_tokens, temperature=0)

    def by_rows() -> Any:
        filled = np.asarray(whole_rows(rows))
        return [
            row[n : n + options.new_tokens].tolist() for row, n in zip(filled, lengths, strict=True)
        ]

    calls: dict[str, Callable[[], list[list[int]]]] = {"whole rows": by_rows, "easypipe": by_cache}
    said: dict[str, list[list[int]]] = {}
    new = options.new_tokens * len(prompts)
    memory = cache_bytes(shape, len(prompts), rows.shape[1])
    facts = {"prompts": len(prompts), "new tokens each": options.new_tokens, "cache, bytes": memory}
    report = Report("generating", "tokens/s", facts=facts)

    def run(name: str) -> float:
        said[name] = calls[name]()
        return new

    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
            saved = save_pretrained(model, Path(folder) / "model")
            calls["transformers"] = _transformers(saved, prompts, options.new_tokens)
        alternate(report, {name: functools.partial(run, name) for name in calls}, options.rounds)
    for name, tokens in said.items():
        same = sum(a == b for a, b in zip(tokens, said["easypipe"], strict=True))
        report.target(f"rows of {name} equal to easypipe's, share", same / len(prompts), at_least=1)
    report.target(
        "easypipe, of the rate of whole rows",
        report.ratio("easypipe", "whole rows"),
        at_least=10,
    )
    report.finish(options.out)


def _transformers(
    folder: Path, prompts: list[list[int]], new_tokens: int
) -> Callable[[], list[list[int]]]:
    """The same model under transformers, prompts padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])

    def call() -> list[list[int]]:
        with torch.no_grad():
            rows = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
            )
        return rows[:, longest:].tolist()

    return call


if __name__ == "__main__":
    main()
