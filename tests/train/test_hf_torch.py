"""Against torch itself, every logit of 512 tokens, both ways. Torch is not part of the test extra:
`nox -s parity`.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from easypipe.train import load_pretrained, save_pretrained
from easypipe.train.model.config import LoraConfig
from easypipe.train.model.decoder import Decoder, ModelConfig
from easypipe.train.model.generate import generate
from easypipe.train.model.lora import adapters, add_lora
from easypipe.train.model.pretrained.peft import load_adapters, save_adapters
from train.hf_support import CONFIGS, NINE, tensors, token_ids, torch_logits, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="torch is not installed: nox -s parity"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers is not installed: nox -s parity",
    ),
]


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_torch_before_and_after_saving(family, tmp_path):
    config, ids = CONFIGS[family], token_ids(seed=1)
    model = load_pretrained(write_model(tmp_path / "in", config, tensors(config, seed=1), files=2))
    logits = np.asarray(nnx.jit(Decoder.__call__)(model, jnp.asarray(ids)))
    want = torch_logits(tmp_path / "in", ids)
    difference = np.abs(logits - want).max()
    print(
        f"{family}: largest difference of {logits.size} logits up to {np.abs(want).max():.1f}: "
        f"{difference:.1e}"
    )
    assert difference < 1e-4
    saved = save_pretrained(model, tmp_path / "out", max_shard_bytes=20_000)
    np.testing.assert_array_equal(torch_logits(saved, ids), want)


@pytest.mark.parametrize("family", NINE)
def test_64_greedy_tokens_equal_those_of_transformers(family, tmp_path):
    """Behind short prompts, and behind one that is longer than a window and than what is read at
    once.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = NINE[family]
    prompts = [[5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6], (np.arange(150) * 7 % 60 + 1).tolist()]
    folder = write_model(tmp_path, config, tensors(config))
    theirs = AutoModelForCausalLM.from_pretrained(
        str(folder), attn_implementation="eager", dtype=torch.float32
    )
    options = {"do_sample": False, "max_new_tokens": 64, "eos_token_id": None, "pad_token_id": 0}
    want = [
        theirs.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert generate(load_pretrained(folder), prompts, max_new_tokens=64, temperature=0) == want


@pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed: nox -s parity"
)
def test_adapters_equal_those_of_peft_both_ways(tmp_path):
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    config, ids = CONFIGS["qwen3"], token_ids(seed=3)[:, :128]
    folder = write_model(tmp_path / "base", config, tensors(config))
    call, rows = nnx.jit(Decoder.__call__), torch.from_numpy(ids.astype(np.int64))

    def base():
        return AutoModelForCausalLM.from_pretrained(
            str(folder), attn_implementation="eager", dtype=torch.float32
        )

    ours = add_lora(
        load_pretrained(folder), LoraConfig(rank=3, alpha=5.0, targets=("query", "gate", "down")), 0
    )
    for i, linear in enumerate(adapters(ours).values()):
        linear.lora_b[...] = 0.1 * jax.random.normal(jax.random.key(i), linear.lora_b.shape)
    opened = peft.PeftModel.from_pretrained(
        base(), str(save_adapters(ours, tmp_path / "ours", base=folder))
    )
    with torch.no_grad():
        assert np.abs(np.asarray(call(ours, ids)) - opened(rows).logits.numpy()).max() < 1e-4
    made = peft.LoraConfig(
        r=4,
        lora_alpha=7,
        target_modules=["q_proj", "o_proj"],
        use_rslora=True,
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(base(), made).eval()
    theirs.save_pretrained(str(tmp_path / "theirs"))
    with torch.no_grad():
        want = theirs(rows).logits.numpy()
    assert (
        np.abs(
            np.asarray(call(load_adapters(load_pretrained(folder), tmp_path / "theirs"), ids))
            - want
        ).max()
        < 1e-4
    )


def test_torch_opens_a_model_that_was_made_here(tmp_path):
    model = Decoder(
        ModelConfig(vocab_size=64, hidden_size=24, intermediate_size=40, num_layers=2, head_dim=8),
        nnx.Rngs(0),
    )
    ids = token_ids(seed=2)
    want = torch_logits(save_pretrained(model, tmp_path / "out"), ids)
    assert (
        np.abs(np.asarray(nnx.jit(Decoder.__call__)(model, jnp.asarray(ids))) - want).max() < 1e-4
    )
