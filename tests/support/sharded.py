"""A layer and its operators mapped over four devices: a program of its own, for it needs them."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import gdn_jax as gdn

CFG, SHARE = gdn.GDNConfig(64, 2, 4, 16, 8), gdn.GDNConfig(64, 1, 2, 16, 8)
B, T = 4, 5
LIMIT = 5e-6
"""As MAX_REL["layer"]: over heads the output projection's sum is taken in two parts."""
TAPS = jax.random.normal(jax.random.key(1), (32, 4))
INT4 = gdn.quantize_q4(jax.random.normal(jax.random.key(2), (64, 32)))


def grouped(x: jax.Array) -> jax.Array:
    """Rows q, k, v of all heads [C, ..] as those of the first key head's group, then the second."""
    parts = jnp.split(x, (CFG.key_dim, 2 * CFG.key_dim))
    halves = [jnp.split(part, 2) for part in parts]
    return jnp.concatenate([half[i] for i in range(2) for half in halves])


def ungrouped(state: gdn.GDNState) -> gdn.GDNState:
    """The history's channels in the order of all heads again."""
    order = np.argsort(np.asarray(grouped(jnp.arange(CFG.conv_dim))))
    return dataclasses.replace(state, conv_hist=state.conv_hist[..., order])


def layer(params: gdn.GDNParams, xs: jax.Array, cfg: gdn.GDNConfig) -> Any:
    """Outputs and states of the four functions, from states that begin here."""
    state = gdn.init_state(cfg, len(xs))
    return {
        "decode_step": gdn.decode_step(params, state, xs[:, 0], cfg),
        "trace_step": gdn.trace_step(params, state, xs[:, 0], cfg)[:2],
        "decode": gdn.decode(params, state, xs, cfg),
        "prefill": gdn.prefill(params, state, xs, cfg, chunk_size=16),
    }


def over_heads(params: gdn.GDNParams, xs: jax.Array) -> Any:
    """The share of one device, its partial sums added up."""
    found = layer(params, xs, SHARE)
    return {name: (jax.lax.psum(y, "heads"), state) for name, (y, state) in found.items()}


def operators(q: jax.Array, v: jax.Array, g: jax.Array) -> Any:
    """The rule in both forms, the second packed too, the convolution and int4 products.

    States and histories begin here.
    """
    wide = v.reshape(len(v), T, -1)
    hist = jnp.zeros((len(v), 3, wide.shape[-1]))
    q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
    operands = (q, q, v, -jnp.exp(g), jax.nn.sigmoid(g))
    lines = [x.reshape(1, -1, *x.shape[2:]) for x in operands]
    starts = jnp.arange(0, len(q) * T + 1, T, dtype=jnp.int32)
    return {
        "recurrent": gdn.recurrent_gated_delta_rule(*operands),
        "chunk": gdn.chunk_gated_delta_rule(*operands, chunk_size=16),
        "convolution": gdn.causal_conv1d(wide, hist, TAPS),
        "int4": [gdn.q4_matmul(wide, INT4, activations=name) for name in ("f32", "q8")],
        "packed": gdn.chunk_gated_delta_rule(*lines, chunk_size=16, cu_seqlens=starts)[1],
    }


def assert_equal(found: Any, expected: Any, what: str) -> None:
    """Every array within :data:`LIMIT` of the other's largest value."""
    for x, ref in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, ref = np.asarray(x), np.asarray(ref)
        assert np.abs(x - ref).max() <= LIMIT * np.abs(ref).max(), what


def main() -> None:
    """Every mapping against one device; an assertion or what jax says where one does not hold."""
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    keys = jax.random.split(jax.random.key(0), 5)
    params = gdn.init_params(keys[0], CFG)
    xs = jax.random.normal(keys[1], (B, T, CFG.d_model))
    shapes = [(B, T, 2, 16), (B, T, 4, 8), (B, T, 4)]
    rule = [jax.random.normal(k, s) for k, s in zip(keys[2:], shapes, strict=True)]
    expected = jax.jit(lambda p, xs: layer(p, xs, CFG))(params, xs)
    expected_rule = jax.jit(operators)(*rule)

    shares = dataclasses.replace(
        params, **{n: grouped(getattr(params, n)) for n in ("in_proj_qkv", "conv_weight")}
    )
    by_head = dict.fromkeys((f.name for f in dataclasses.fields(params)), P("heads"))
    by_head |= {"norm_weight": P(), "out_proj": P(None, "heads")}
    by_head = jax.tree.unflatten(jax.tree.structure(params), list(by_head.values()))
    leaves = P("rows", "heads"), P("rows", None, "heads")
    state = jax.tree.unflatten(jax.tree.structure(gdn.init_state(CFG)), leaves)
    by_name = dict.fromkeys(expected, (P("rows"), state))
    cases = {
        "rows": ((P(), P("rows")), P("rows"), lambda p, xs: layer(p, xs, CFG), (params, xs)),
        "heads": (
            (by_head, P("rows")),
            by_name,
            over_heads,
            (shares, xs),
        ),
        "operators": (P("rows"), P("rows"), operators, rule),
    }
    for check, name in itertools.product((True, False), cases):
        specs, out, run, operands = cases[name]
        mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check)
        found = jax.jit(mapped)(*operands)
        if name == "heads":
            found = {n: (y, ungrouped(state)) for n, (y, state) in found.items()}
        ref = expected_rule if name == "operators" else expected
        assert_equal(found, ref, f"over {name}, check_vma={check}")


if __name__ == "__main__":
    main()
