"""The layer on the kernels: interpreted with float weights, lowered for CUDA with any."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax import oracle
from gdn_jax.layer import pallas
from gdn_jax.layer.params import LARGE
from gdn_jax.verify.draw import draw_inputs, draw_weights
from pallas_kernels import layer as layer_kernels
from pallas_kernels.kernels.delta_rule import delta_rule_decode
from tests import gpu_small
from tests.support.mosaic import VALUES
from tests.support.tools import assert_close, assert_same_bits, pretend_device

CFG = gdn.GDNConfig(96, 1, 2, 128, 64, conv_width=3)
SMALL = gdn.GDNConfig(64, 1, 1, 64, 64, conv_width=3)
"""Where the interpreter runs many steps: it takes its time by CTAs."""
INT4 = gdn.GDNConfig(128, 1, 2, 64, 128)


def weights(cfg: gdn.GDNConfig = CFG) -> gdn.GDNParams:
    return gdn.GDNParams(**{n: jnp.asarray(x) for n, x in draw_weights(cfg, 0).items()})


def int4(params: gdn.GDNParams) -> gdn.GDNParams:
    large = {name: gdn.quantize_q4(getattr(params, name)) for name in LARGE}
    return dataclasses.replace(params, **large)


def inputs(cfg: gdn.GDNConfig, B: int, T: int) -> jax.Array:
    return jnp.stack([jnp.asarray(draw_inputs(cfg, T, seed)) for seed in range(B)])


def live_state(cfg: gdn.GDNConfig, *lead: int) -> gdn.GDNState:
    rng = np.random.default_rng(1)
    shapes = (cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim), (cfg.conv_width - 1, cfg.conv_dim)
    return gdn.GDNState(*(jnp.asarray(rng.normal(size=(*lead, *s)), jnp.float32) for s in shapes))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card without clusters, whose kernels the interpreter runs."""
    pretend_device(monkeypatch, "8.0")
    step = functools.partial(layer_kernels.step, interpret=VALUES)
    monkeypatch.setattr(layer_kernels, "step", step)
    rule = functools.partial(delta_rule_decode, interpret=VALUES)
    monkeypatch.setattr(pallas, "delta_rule_decode", rule)


def test_one_token_agrees_with_float64_in_every_operator(interpreted: None) -> None:
    params, state, x = weights(), live_state(CFG, 2), inputs(CFG, 2, 1)[:, 0]
    y, after, trace = gdn.trace_step(params, state, x, CFG, backend="pallas")
    y2, after2 = gdn.decode_step(params, state, x, CFG, backend="pallas")
    plain = {f.name: np.asarray(getattr(params, f.name)) for f in dataclasses.fields(params)}
    for row in range(2):
        before = dict(S=np.asarray(state.S[row]), conv_hist=np.asarray(state.conv_hist[row]))
        ref = oracle.layer_trace(plain, CFG, np.asarray(x[row : row + 1]), **before)
        assert tuple(trace) == tuple(ref)
        for name, value in trace.items():
            assert_close(value[row], ref[name][0], 3e-6, name)
        for found in (y, y2):
            assert_close(found[row], ref["OUT"][0], 3e-6)
        for found in (after, after2):
            assert_close(found.S[row], ref["S"][0], 1e-6)
            assert_close(found.conv_hist[row], ref["HIST"][0], 1e-6)


@pytest.mark.slow
def test_slots_idle_rows_and_nan_elsewhere(interpreted: None) -> None:
    assert gpu_small.worst_of_layer(CFG, 3, "float32") <= gpu_small.LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_weights_are_read_as_they_are(interpreted: None, dtype: Any) -> None:
    params, state, xs = weights(SMALL), live_state(SMALL, 1), inputs(SMALL, 1, 2)
    halves = {name: getattr(params, name).astype(dtype) for name in LARGE}
    ys, _ = gdn.decode(dataclasses.replace(params, **halves), state, xs, SMALL, backend="pallas")
    wide = {name: w.astype(jnp.float32) for name, w in halves.items()}
    ref, _ = gdn.decode(dataclasses.replace(params, **wide), state, xs, SMALL, backend="xla")
    assert_close(ys, ref, 3e-6)


@pytest.mark.slow
def test_a_bank_steps_one_layer_in_place_and_leaves_the_others(interpreted: None) -> None:
    params, xs = weights(SMALL), inputs(SMALL, 2, 2)
    bank = gdn.LayerBank(SMALL, 3).preload(1, params)
    state = live_state(SMALL, 3, 2)
    part = jax.tree.map(lambda x: x[1], state)
    ref, ref_state = gdn.decode(params, part, xs, SMALL, backend="xla")
    for run in (
        lambda: bank.decode(state, 1, xs, backend="pallas"),
        lambda: bank.decode_host(state, 1, np.asarray(xs), backend="pallas"),
        lambda: stepped(bank, state, xs),
    ):
        ys, after = run()
        assert_close(ys, ref, 3e-6)
        for name in ("S", "conv_hist"):
            assert_close(getattr(after, name)[1], getattr(ref_state, name), 1e-6, name)
            others = np.array([0, 2])
            assert_same_bits(getattr(after, name)[others], getattr(state, name)[others])


@pytest.mark.slow
def test_slots_of_a_pool_on_the_kernels(interpreted: None) -> None:
    bank, xs = gdn.LayerBank(SMALL, 2).preload(1, weights(SMALL)), inputs(SMALL, 3, 2)
    pool, slots = gdn.StatePool.create(SMALL, 2, 5).alloc(4)
    full = live_state(SMALL, 2, 5)
    pool = dataclasses.replace(pool, S=full.S, conv_hist=full.conv_hist)
    read = jnp.asarray([int(slots[2]), -1, int(slots[0])], jnp.int32)
    write = jnp.asarray([int(slots[3]), -1, int(slots[0])], jnp.int32)
    results = [
        bank.step_slots(pool, 1, xs[:, 0], read, write_slots=write, backend=backend)
        for backend in ("pallas", "xla")
    ]
    for found, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        assert_close(found, wanted, 3e-6)
    np.testing.assert_array_equal(results[0][0][1], 0)
    untouched = np.setdiff1d(np.arange(5), write)
    assert_same_bits(results[0][1].S[:, untouched], pool.S[:, untouched])
    assert_same_bits(results[0][1].S[0], pool.S[0])
    for scheme in ("snapshot", "replay"):
        ys, record = bank.draft_slots(pool, 1, xs, read, scheme=scheme, backend="pallas")
        after = pool.commit({1: record}, read, jnp.asarray([1, 0, 2], jnp.int32))
        ref_ys, ref = bank.draft_slots(pool, 1, xs, read, scheme=scheme, backend="xla")
        wanted = pool.commit({1: ref}, read, jnp.asarray([1, 0, 2], jnp.int32))
        assert_close(ys, ref_ys, 3e-6)
        for name in ("S", "conv_hist"):
            assert_close(getattr(after, name), getattr(wanted, name), 1e-6, name)


@pytest.mark.parametrize("backend", ["pallas", "xla"])
@pytest.mark.parametrize(("read", "write"), [(1, -1), (-1, 1), (-1, -1)])
def test_a_row_without_a_slot_to_read_or_to_write_is_idle(
    interpreted: None, backend: str, read: int, write: int
) -> None:
    bank, x = gdn.LayerBank(SMALL, 2).preload(1, weights(SMALL)), inputs(SMALL, 1, 1)[:, 0]
    pool, _ = gdn.StatePool.create(SMALL, 2, 2).alloc(2)
    full = live_state(SMALL, 2, 2)
    pool = dataclasses.replace(pool, S=full.S, conv_hist=full.conv_hist)
    slots = (jnp.asarray([slot], jnp.int32) for slot in (read, write))
    y, after = bank.step_slots(pool, 1, x, next(slots), write_slots=next(slots), backend=backend)
    np.testing.assert_array_equal(y, 0)
    for name in ("S", "conv_hist"):
        assert_same_bits(getattr(after, name), getattr(pool, name), name)


@pytest.mark.slow
def test_a_replayed_draft_has_the_bits_of_steps(interpreted: None) -> None:
    bank = gdn.LayerBank(SMALL, 1).preload(0, weights(SMALL))
    xs, accepted = inputs(SMALL, 2, 3), jnp.asarray([3, 1], jnp.int32)
    pool, slots = gdn.StatePool.create(SMALL, 1, 2).alloc(2)
    serial = pool
    for t in range(3):
        going = jnp.where(t < accepted, slots, -1)
        _, serial = bank.step_slots(serial, 0, xs[:, t], going, backend="pallas")
    for scheme in ("snapshot", "replay"):
        _, record = bank.draft_slots(pool, 0, xs, slots, scheme=scheme, backend="pallas")
        after = pool.commit({0: record}, slots, accepted)
        for name in ("S", "conv_hist"):
            assert_same_bits(getattr(after, name), getattr(serial, name), f"{scheme} {name}")


def stepped(bank: gdn.LayerBank, state: gdn.GDNState, xs: jax.Array) -> Any:
    ys = []
    for t in range(xs.shape[1]):
        y, state = bank.step(state, 1, xs[:, t], backend="pallas")
        ys.append(y)
    return jnp.stack(ys, 1), state


def lowered(function: Any, *args: Any) -> str:
    text = jax.jit(function, donate_argnums=0).trace(*args)
    return text.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "B"),
    [
        *(("int4", B) for B in (1, 3, 8, 64)),
        *((kind, B) for kind in ("float32", "bfloat16", "mixed") for B in (1, 8)),
    ],
)
def test_a_stack_is_three_kernels_and_no_slice(monkeypatch, kind: str, B: int) -> None:
    pretend_device(monkeypatch)
    params = weights(INT4)
    if kind == "bfloat16":
        params = dataclasses.replace(
            params, **{name: getattr(params, name).astype(kind) for name in LARGE}
        )
    elif kind != "float32":
        small = int4(params)
        params = gdn.params_to_kernel(small if kind == "int4" else dataclasses.replace(
            params, in_proj_z=small.in_proj_z))  # fmt: skip
    bank = gdn.LayerBank(INT4, 4)
    for layer in range(4):
        bank = bank.preload(layer, params)

    def token(state: gdn.GDNState, bank: gdn.LayerBank, x: jax.Array) -> Any:
        for layer in range(4):
            x, state = bank.step(state, layer, x)
        return x, state

    text = lowered(token, bank.init_state(B), bank, jnp.zeros((B, INT4.d_model)))
    assert text.count("@mosaic_gpu_v2") == 3
    assert "dynamic_slice" not in text
    assert "dynamic_update_slice" not in text


def test_a_replay_runs_the_kernel_and_its_columns(monkeypatch) -> None:
    pretend_device(monkeypatch)
    pool, record = jax.eval_shape(lambda: drafted(weights(), "replay"))
    text = lowered(lambda pool, record: pool.commit({0: record}, *rows_of_two()), pool, record)
    assert text.count("@mosaic_gpu_v2") == 1


def drafted(params: gdn.GDNParams, scheme: str) -> Any:
    pool, slots = gdn.StatePool.create(CFG, 1, 2).alloc(2)
    bank = gdn.LayerBank(CFG, 1).preload(0, params)
    _, record = bank.draft_slots(pool, 0, inputs(CFG, 2, 3), slots, scheme=scheme, backend="pallas")
    return pool, record


def rows_of_two() -> tuple[jax.Array, jax.Array]:
    return jnp.asarray([0, 1], jnp.int32), jnp.asarray([3, 1], jnp.int32)


def test_a_scan_over_tokens_keeps_the_kernels_inside(monkeypatch) -> None:
    pretend_device(monkeypatch)
    params = gdn.params_to_kernel(int4(weights(INT4)))

    def run(state: gdn.GDNState, xs: jax.Array) -> Any:
        return gdn.decode(params, state, xs, INT4)

    text = lowered(run, gdn.init_state(INT4), jnp.zeros((1, 5, INT4.d_model)))
    assert text.count("@mosaic_gpu_v2") == 3
    assert text.count("stablehlo.while") == 1


def test_who_runs_what(monkeypatch) -> None:
    x, state = jnp.zeros((1, INT4.d_model)), gdn.init_state(INT4)
    params = weights(INT4)

    def chosen(params: gdn.GDNParams, backend: str | None = None) -> str:
        return pallas.backend_for("decode_step", params, INT4, backend)

    assert chosen(params) == "xla"
    with pytest.raises(gdn.BackendUnavailableError, match="no CUDA GPU, the device is cpu"):
        gdn.decode_step(params, state, x, INT4, backend="pallas")
    pretend_device(monkeypatch)
    exchange = int4(params)
    assert chosen(params) == "pallas"
    assert chosen(gdn.params_to_kernel(exchange)) == "pallas"
    # Laying weights out costs more than a step: only a named backend does it.
    assert (chosen(exchange), chosen(exchange, "pallas")) == ("xla", "pallas")
    wide = dataclasses.replace(INT4, conv_width=5)
    assert gdn.select_backend("decode_step", wide) == "xla"
    with pytest.raises(gdn.BackendUnavailableError, match="W is 5, the kernel needs 2 or 3 or 4"):
        gdn.select_backend("decode_step", wide, backend="pallas")
    odd = dataclasses.replace(INT4, d_model=96)
    params = int4(weights(odd))
    assert pallas.backend_for("decode_step", params, odd, None) == "xla"
    with pytest.raises(gdn.BackendUnavailableError, match=r"in_proj_qkv.*\[\d+, 96\].*multiples"):
        pallas.backend_for("decode_step", params, odd, "pallas")
