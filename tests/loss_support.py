"""What tests of the loss kernels share: inputs, and an oracle in NumPy, float64, with the gradients
written out by hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

IGNORE = -100


class Case(NamedTuple):
    """Float64 arguments of fused_linear_cross_entropy; `head` is [D, V]."""

    hidden: np.ndarray
    head: np.ndarray
    labels: np.ndarray
    bias: np.ndarray | None
    weights: np.ndarray | None


class Answer(NamedTuple):
    loss: np.ndarray
    grads: dict[str, np.ndarray]  # of hidden, head, bias, weights, for the cotangent given
    lse: np.ndarray
    log_probs: np.ndarray
    correct: np.ndarray


def case(
    tokens: int = 13,
    width: int = 5,
    vocab: int = 19,
    *,
    bias=True,
    weights=True,
    ignored=0.3,
    seed=0,
    size=1.0,
) -> Case:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, vocab, tokens).astype(np.int32)
    labels[rng.random(tokens) < ignored] = IGNORE
    hidden, head = size * rng.normal(size=(tokens, width)), rng.normal(size=(width, vocab))
    return Case(
        hidden,
        head,
        labels,
        rng.normal(size=vocab) if bias else None,
        rng.random(tokens) if weights else None,
    )


def oracle(
    given: Case,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    logit_soft_cap: float | None = None,
    temperature: float = 1.0,
    reduction: str = "mean",
    cotangent: Any = 1.0,
) -> Answer:
    """The textbook formulas, one after the other. A label outside [0, V) does not count."""
    hidden, head, labels, bias, _ = given
    vocab = head.shape[1]
    counted = (labels >= 0) & (labels < vocab)
    weights = np.where(counted, 1.0 if given.weights is None else given.weights, 0.0)
    x = hidden @ head + (0.0 if bias is None else bias)
    capped = x if logit_soft_cap is None else logit_soft_cap * np.tanh(x / logit_soft_cap)
    z = capped / temperature
    best = z.max(-1)
    lse = best + np.log(np.exp(z - best[:, None]).sum(-1))
    log_p, p = z - lse[:, None], np.exp(z - lse[:, None])
    onehot = np.arange(vocab) == np.where(counted, labels, -1)[:, None]
    target = (z * onehot).sum(-1)
    nll = np.where(counted, lse - target, 0.0)
    losses = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(-1) + z_loss * lse**2
    losses = np.where(counted, losses, 0.0)
    total = weights.sum()
    scale = 1 / total if reduction == "mean" and total else 1.0
    per_token = weights * losses * scale
    loss = per_token if reduction == "none" else per_token.sum()
    # d loss / d z = w · (p - (1-eps)·onehot - eps/V + 2·z·lse·p)
    g = np.broadcast_to(cotangent, labels.shape) * weights * scale
    dz = g[:, None] * (
        p * (1 + 2 * z_loss * lse)[:, None]
        - (1 - label_smoothing) * onehot
        - label_smoothing / vocab
    )
    dx = dz / temperature
    if logit_soft_cap is not None:
        dx *= 1 - (capped / logit_soft_cap) ** 2
    grads = {"hidden": dx @ head.T, "head": hidden.T @ dx, "bias": dx.sum(0)}
    less = loss if reduction == "mean" else 0.0
    grads["weights"] = np.where(counted, cotangent * scale * (losses - less), 0.0)
    return Answer(loss, grads, lse, -nll, counted & (target >= best))
