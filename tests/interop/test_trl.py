"""TRL itself: on the rows of tests/trl_oracle.py it gives what the oracle says, and its trainers'
losses of the same logits are ours.

Runs where trl is installed: `nox -s trl` has it in an environment of its own.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trl_oracle
from chat_support import MARKED, REASONING
from easypipe.core.aligned import DESIRABLE
from easypipe.train.config import PreferenceConfig
from easypipe.train.losses.preference import (
    LOSSES,
    REFERENCE,
    REFERENCE_ELSEWHERE,
    log_probs,
    preference_loss,
)
from easypipe.train.losses.unpaired import answers_elsewhere, unpaired_loss
from easypipe.transforms.prompt.templates import CHATML
from trl_oracle import SHAPES, hf_tokenizer, rows

if os.environ.get("EASYPIPE_TRL") != "required":
    pytest.importorskip("trl", reason="needs trl: nox -s trl")

TEMPLATES = {"chatml": CHATML, "think": REASONING, "marked": MARKED}


def prepared(trainer: Any, config: Any, data: list[dict[str, Any]], tokenizer: Any) -> list[Any]:
    """The rows that a trainer of TRL makes, by the method that its constructor calls."""
    own = SimpleNamespace(
        _tokenizer=tokenizer, completion_only_loss=True, chat_template=None, calculate_KL=False
    )
    given = datasets.Dataset.from_list(data)
    further = (False, None) if trainer.__name__ == "SFTTrainer" else ()
    return list(trainer._prepare_dataset(own, given, tokenizer, config, *further, "rows"))


def options(tmp_path: Any, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(tmp_path),
        "max_length": None,
        "report_to": "none",
        "bf16": False,
    } | more


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shape", [name for name in SHAPES if "prompts" not in name])
def test_trl_makes_what_the_oracle_says(shape: str, template: str, tmp_path: Any) -> None:
    import trl

    data, tokenizer = rows(shape), hf_tokenizer(TEMPLATES[template])
    if "tools" in data[0] and template != "chatml":
        pytest.skip("a template without tools")
    if "chosen" in data[0]:
        found = prepared(trl.DPOTrainer, trl.DPOConfig(**options(tmp_path)), data, tokenizer)
        for row, made in zip(data, found, strict=True):
            for name, (ids, mask) in zip(
                ("chosen", "rejected"), trl_oracle.dpo(row, tokenizer), strict=True
            ):
                assert [*made["prompt_ids"], *made[f"{name}_ids"]] == ids
                assert mask.count(0) == len(made["prompt_ids"])
        return
    if "label" in data[0]:
        found = prepared(trl.KTOTrainer, trl.KTOConfig(**options(tmp_path)), data, tokenizer)
        for row, made in zip(data, found, strict=True):
            ids, mask = trl_oracle.sft(row, tokenizer)
            assert [*made["prompt_ids"], *made["completion_ids"]] == ids
            assert mask.count(0) == len(made["prompt_ids"])
        return
    ways = (
        (False, True)
        if template != "think" and shape.split()[-1] in ("messages", "talk")
        else (False,)
    )
    for only in ways:
        config = trl.SFTConfig(**options(tmp_path, assistant_only_loss=only))
        found = prepared(trl.SFTTrainer, config, data, tokenizer)
        for row, made in zip(data, found, strict=True):
            ids, mask = trl_oracle.sft(row, tokenizer, assistant_only=only)
            assert made["input_ids"] == ids
            assert [int(label != -100) for label in made["labels"]] == mask


VOCABULARY = 11


class Bigrams:
    """A model whose logits are a row of a table for each token, as ours takes it."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def hidden(self, input_ids: Any, *_: Any) -> Any:
        return self.table[input_ids]

    def lm_head(self) -> Any:
        return jnp.eye(VOCABULARY, dtype=self.table.dtype)


def bigrams(table: np.ndarray) -> Any:
    """The same, as what TRL's trainers call: log-probabilities of the labels."""
    import torch

    class Model(torch.nn.Module):
        is_gradient_checkpointing = False

        def forward(self, input_ids: Any, labels: Any = None, **_: Any) -> Any:
            logits = torch.tensor(table)[input_ids[:, :-1]]
            logs, targets = logits.log_softmax(-1), labels[:, 1:]
            found = logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            return SimpleNamespace(
                log_probs=torch.where(targets >= 0, found, 0.0),
                entropy=-(logs.exp() * logs).sum(-1),
                mean_logits=logits.mean(-1),
                is_top1=logits.argmax(-1) == targets,
            )

    return Model()


def trl_trainer(table: np.ndarray, reference: np.ndarray, **own: Any) -> Any:
    """What `_compute_loss` of TRL's trainers asks its trainer for."""

    def gather(value: Any) -> Any:
        return value

    return SimpleNamespace(
        model=bigrams(table),
        ref_model=bigrams(reference),
        accelerator=SimpleNamespace(device="cpu", gather=gather, gather_for_metrics=gather),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **own,
    )


def padded(samples: Sequence[tuple[list[int], list[int]]]) -> tuple[Any, Any, Any]:
    """(ids, attention mask, completion mask) of prompts with their answers, one a row."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in samples)
    rows = []
    for prompt, answer in samples:
        rest = [0] * (width - len(prompt) - len(answer))
        rows.append(
            (
                [*prompt, *answer, *rest],
                [1] * (width - len(rest)) + rest,
                [0] * len(prompt) + [1] * len(answer) + rest,
            )
        )
    return tuple(torch.tensor(column) for column in zip(*rows, strict=True))


def drawn(count: int) -> tuple[np.ndarray, np.ndarray, list[tuple[list[int], list[int]]]]:
    """The tables of a model and its reference, and prompts with answers."""
    draw = np.random.default_rng(5)
    table, reference = draw.normal(size=(2, VOCABULARY, VOCABULARY))
    tokens = [draw.integers(1, VOCABULARY, draw.integers(1, 7)).tolist() for _ in range(2 * count)]
    return table, reference, list(zip(tokens[::2], tokens[1::2], strict=True))


def packed_row(samples: Sequence[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """One packed row of these."""
    ids = [token for prompt, answer in samples for token in (*prompt, *answer)]
    sizes = [len(prompt) + len(answer) for prompt, answer in samples]
    labels = [
        label
        for prompt, answer in samples
        for label in (*[-100] * (len(prompt) - 1), *answer, -100)
    ]
    columns = {
        "input_ids": ids,
        "labels": labels,
        "segment_ids": np.repeat(np.arange(len(sizes)) + 1, sizes),
        "position_ids": np.concatenate([np.arange(size) for size in sizes]),
    }
    return {name: jnp.asarray(column, jnp.int32)[None] for name, column in columns.items()}


def ours(loss: Any, table: np.ndarray, reference: np.ndarray, batch: dict[str, Any]) -> float:
    before = Bigrams(jnp.asarray(reference))
    batch = batch | {REFERENCE: log_probs(before, batch)}
    if DESIRABLE.name in batch:
        elsewhere = answers_elsewhere(batch)
        batch |= {REFERENCE_ELSEWHERE: log_probs(before, elsewhere)}
    out = loss(Bigrams(jnp.asarray(table)), batch)
    return float(out.loss_sum / out.num_targets)


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_judged_answers_cost_what_trl_says(name: Any) -> None:
    import torch
    from trl import KTOTrainer

    table, reference, samples = drawn(5)
    good = [True, False, False, True, True]
    # theirs puts the answer of the row before under a prompt, ours that of the next one
    back = samples[::-1]
    ids, attention, mask = padded(back)
    turned = [(p, back[i - 1][1]) for i, (p, _) in enumerate(back)]
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}
    inputs |= {f"KL_{name}": column for name, column in zip(inputs, padded(turned), strict=True)}
    inputs |= {"label": torch.tensor(good[::-1])}
    own = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    trainer = trl_trainer(table, reference, loss_type=name, calculate_KL=name == "kto", **own)
    trainer._compute_kl_logps = functools.partial(KTOTrainer._compute_kl_logps, trainer)
    theirs = KTOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    assert theirs.dtype == torch.float64
    if name == "kto":
        assert trainer._metrics["train"]["kl"][0] > 0.1
    with jax.enable_x64(True):
        batch = packed_row(samples)
        batch[DESIRABLE.name] = jnp.asarray([0, *good])[batch["segment_ids"]]
        found = ours(unpaired_loss(PreferenceConfig(loss=name, **own)), table, reference, batch)
    assert found == pytest.approx(theirs.item(), rel=0, abs=1e-6)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"orpo", "simpo", "reward"}))
def test_pairs_cost_what_trl_says(name: Any) -> None:
    import torch
    from trl import DPOTrainer

    table, reference, samples = drawn(6)
    pairs = [(samples[i], (samples[i][0], samples[i + 1][1])) for i in range(0, 6, 2)]
    ids, attention, mask = padded([*(a for a, _ in pairs), *(b for _, b in pairs)])
    inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}
    wrong = 0.2 if name in ("robust", "exo_pair") else 0.0
    own = {"loss_types": [name], "loss_weights": [1.0], "f_divergence_type": "reverse_kl"}
    trainer = trl_trainer(
        table, reference, beta=0.3, label_smoothing=wrong, ld_alpha=None, use_weighting=False, **own
    )
    theirs = DPOTrainer._compute_loss(trainer, trainer.model, inputs, False)
    assert theirs.dtype == torch.float64
    config = PreferenceConfig(loss=name, beta=0.3, label_smoothing=wrong)
    with jax.enable_x64(True):
        batch = packed_row([one for pair in pairs for one in pair])
        found = ours(preference_loss(config), table, reference, batch)
    assert found == pytest.approx(theirs.item(), rel=0, abs=1e-6)
