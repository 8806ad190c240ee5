"""The loss on a mesh of eight devices: values, gradients and gradient *ratios* (a wrong collective
scales a gradient); its collectives.

The devices are made in a process of their own, because a process fixes its number of devices when
jax starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import forked

SETUP = """
import math, re, sys
sys.path.insert(0, TESTS)
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from easypipe.core.errors import ConfigError
from easypipe.kernels.loss import sharded
from easypipe.kernels.loss.api import LossSharding, fused_cross_entropy, fused_linear_cross_entropy, sequence_log_probs, token_entropy
from loss_support import Case, case, oracle

def mesh_of(*shape):
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

def near(ours, theirs, what):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-11, err_msg=str(what))
    assert abs(np.vdot(ours, theirs) / np.vdot(theirs, theirs) - 1) < 1e-11, what
"""

VALUES = """
T, D, V = 44, 16, 24                                    # 44 tokens divide by no more than 4 devices: padding is met
given = case(T, D, V)
options = dict(z_loss=0.1, label_smoothing=0.2, logit_soft_cap=3.0, chunk_size=3)
want = oracle(given, z_loss=0.1, label_smoothing=0.2, logit_soft_cap=3.0, cotangent=0.3)

def run(arrays, layout="dv", **more):
    def loss(arrays):
        out = fused_linear_cross_entropy(
            arrays["hidden"], arrays["head"], arrays["labels"], bias=arrays["bias"], weights=arrays["weights"],
            layout=layout, with_tokens=True, **options, **more)
        return out.loss * 0.3, out
    floats, rest = {k: v for k, v in arrays.items() if k != "labels"}, {"labels": arrays["labels"]}
    return jax.jit(jax.value_and_grad(lambda floats: loss(floats | rest), has_aux=True))(floats)

def check(arrays, what, layout="dv", **more):
    (_, out), grads = run(arrays, layout, **more)
    near(out.loss, want.loss, what)
    near(out.tokens.lse.reshape(-1), want.lse, what)
    near(out.tokens.log_probs.reshape(-1), want.log_probs, what)
    np.testing.assert_array_equal(out.tokens.correct.reshape(-1), want.correct)
    for name, grad in grads.items():
        grad = grad.T if name == "head" and layout == "vd" else grad
        near(grad.reshape(want.grads[name].shape), want.grads[name], (what, name))
    return grads

plain = given._asdict()
logits = given.hidden @ given.head + given.bias
odds = np.exp(logits - logits.max(-1, keepdims=True))
odds /= odds.sum(-1, keepdims=True)
entropies = np.where(given.labels < 0, 0.0, -(odds * np.log(odds)).sum(-1))
per_token = {name: array.reshape(4, 11, *array.shape[1:]) for name, array in plain.items() if name in ("hidden", "labels", "weights")}
batched = plain | per_token
table = plain | {"head": given.head.T}
for number, shape in enumerate([(2, 2, 2), (1, 8, 1), (1, 1, 8), (8, 1, 1), (1, 2, 4)]):
    mesh = mesh_of(*shape)
    sharded.SUM_BYTES = 400 if number == 0 else 8 << 20             # three rows of d_hidden are summed at once, or all
    with jax.set_mesh(mesh):
        dv, vd = NamedSharding(mesh, P("fsdp", "tensor")), NamedSharding(mesh, P("tensor", "fsdp"))
        placed, turned = plain | {"head": jax.device_put(plain["head"], dv)}, table | {"head": jax.device_put(table["head"], vd)}
        if number != 3:
            assert check(placed, shape, rule="fast", sharding=LossSharding())["head"].sharding.is_equivalent_to(dv, 2)
        if number != 4:
            assert check(turned, shape, "vd", rule="strict", sharding=LossSharding())["head"].sharding.is_equivalent_to(vd, 2)
        spread = jax.jit(lambda arrays: token_entropy(arrays["hidden"], arrays["head"], arrays["labels"], bias=arrays["bias"], sharding=LossSharding()))
        near(spread(placed), entropies, shape)
        if number == 0:
            check(placed, "by the compiler, fast", rule="fast")
            check(turned, "by the compiler, strict", "vd", rule="strict")
            split = LossSharding(tokens=("data",), sequence=("fsdp",))
            check(batched, split, rule="fast", sharding=split)
            check(batched, split, rule="strict", sharding=split)
            check(batched, "sequence and vocabulary share an axis", sharding=LossSharding(sequence=("tensor",)))
            check(plain, "tokens only", sharding=LossSharding(tokens=("tensor", "data"), embed=(), vocab=()))
            check(plain, "vocabulary only", sharding=LossSharding(tokens=(), embed=("fsdp",), vocab=("tensor", "data")))
print("all equal")
"""

INSIDE = """
given = case(40, 16, 24)
want = oracle(given)
mesh = mesh_of(2, 2, 2)
everywhere = ("data", "fsdp", "tensor")
for rule in ("fast", "strict"):
    for check_vma in (True, False):  # the user's own shard_map, over tokens
        def loss(hidden, head, bias, weights):
            def local(hidden, head, bias, weights, labels):
                one = fused_linear_cross_entropy(hidden, head, labels, bias=bias, weights=weights, reduction="sum", rule=rule, chunk_size=2)
                return jax.lax.psum(one, everywhere)
            split = P(everywhere)
            return jax.shard_map(local, mesh=mesh, in_specs=(split, P(), P(), split, split), out_specs=P(), check_vma=check_vma)(
                hidden, head, bias, weights, given.labels)
        arrays = given.hidden, given.head, given.bias, given.weights
        value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arrays)
        want = oracle(given, reduction="sum")
        near(value, want.loss, check_vma)
        for name, grad in zip(("hidden", "head", "bias", "weights"), grads):
            near(grad, want.grads[name], (rule, check_vma, name))

    single = [jnp.asarray(array, jnp.float32) for array in arrays]  # where the kernels of other platforms do not refuse the dtype
    jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*single)

with jax.set_mesh(mesh):  # what the compiler would have to split is XLA's, and a kernel asked for says what it lacks
    placed = jax.device_put(jnp.asarray(given.hidden, jnp.float32), NamedSharding(mesh, P("data")))
    head = jnp.asarray(given.head, jnp.float32)
    jax.jit(fused_linear_cross_entropy).trace(placed, head, given.labels)
    try:
        fused_linear_cross_entropy(placed, head, given.labels, implementation="pallas_gpu")
    except ConfigError as error:
        assert "'pallas_gpu' cannot run: the compiler cannot split it over 8 devices: say by `sharding`" in str(error), error
    else:
        raise AssertionError("a kernel was left to the compiler")

with jax.set_mesh(mesh):  # logits at hand, and log-probs, over the mesh
    logits = given.hidden @ given.head + given.bias
    sharding = LossSharding(tokens=("data",), vocab=("tensor", "fsdp"))
    f = lambda logits: fused_cross_entropy(logits, given.labels, weights=given.weights, label_smoothing=0.2, sharding=sharding)
    want = oracle(given, label_smoothing=0.2)
    value, grad = jax.jit(jax.value_and_grad(f))(logits)
    near(value, want.loss, "logits")
    near(grad @ given.head.T, want.grads["hidden"], "logits")
    hidden, labels = given.hidden.reshape(4, 10, 16), given.labels.reshape(4, 10)
    f = lambda hidden: (sequence_log_probs(hidden, given.head, labels, bias=given.bias, sharding=LossSharding()) ** 2).sum()
    sums = oracle(given).log_probs.reshape(4, 10).sum(1)
    value, grad = jax.jit(jax.value_and_grad(f))(hidden)
    near(value, (sums**2).sum(), "log-probs")
    want = oracle(given._replace(weights=None), reduction="none", cotangent=-2 * np.repeat(sums, 10))
    near(grad.reshape(40, 16), want.grads["hidden"], "log-probs")
    try:
        fused_linear_cross_entropy(given.hidden, given.head[:, :23], np.minimum(given.labels, 22), sharding=LossSharding())
    except ConfigError as error:
        assert "sharding.vocab: a vocabulary of 23 does not divide over 2 devices: make it 24" in str(error), error
    else:
        raise AssertionError("an uneven vocabulary was accepted")
print("all equal")
"""

COLLECTIVES = """
T, D, V = 256, 64, 512
BYTES = {"f32": 4, "bf16": 2, "f64": 8, "s32": 4, "u32": 4, "pred": 1}

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"

def bytes_of(text):
    sizes = re.findall(r"(\\w+)\\[([\\d,]*)\\]", text)
    return sum(BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in sizes)

def collectives(program):
    \"\"\"(kind, bytes of the result on one device) of every collective of the program.\"\"\"
    return [(kind, bytes_of(result)) for result, kind in re.findall(rf"= (.*?) ({KINDS})(?:-start)?\\(", program)]

def program(shape, rule, dtype=jnp.float32):
    mesh = mesh_of(*shape)
    with jax.set_mesh(mesh):
        place = lambda spec: NamedSharding(mesh, spec)
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=place(spec)) for shape, dtype, spec in
                  (((T, D), dtype, P(("data", "fsdp"))), ((D, V), dtype, P("fsdp", "tensor")), ((T,), jnp.int32, P(("data", "fsdp"))))]
        f = lambda h, w, l: fused_linear_cross_entropy(h, w, l, rule=rule, sharding=LossSharding(), implementation="chunked", z_loss=1e-4)
        return jax.jit(jax.value_and_grad(f, argnums=(0, 1))).lower(*arrays).compile()

for rule in ("fast", "strict"):
    for shape in ((1, 1, 8), (1, 4, 2), (2, 2, 2)):
        data, fsdp, tensor = shape
        tokens, head = T // (data * fsdp), 4 * D * V // tensor
        stats = ("all-gather", 16 * tokens * tensor)                  # 16 bytes per token and shard
        expected = [stats, ("all-reduce", 4 * tokens * D)]            # and the gradient of the hidden states
        if fsdp > 1:                                                  # the head, for forward and backward; its gradient
            expected += [("all-gather", head)] * (1 if rule == "fast" else 2) + [("reduce-scatter", head // fsdp)]
        if data > 1:
            expected += [("all-reduce", head // fsdp)]
        found = collectives(program(shape, rule).as_text())
        large = [one for one in found if one[1] > 8]
        assert len(found) <= len(large) + 3, found                    # scalars: the loss and its divisor
        assert stats in large, (rule, shape, found)
        for one in set(large):
            assert large.count(one) <= expected.count(one), (rule, shape, one, found, expected)
print("all equal")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [VALUES, INSIDE, COLLECTIVES], ids=["values", "inside", "collectives"]
)
def test_on_eight_devices(program):
    setup = SETUP.replace("TESTS", repr(str(Path(__file__).parents[1])))
    done = forked.run([sys.executable, "-c", setup + program])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all equal" in done.stdout
