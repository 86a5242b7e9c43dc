"""The middle kernel and the history job beside the first: steps 2 to 6, against float64.

The interpreter takes a head as one CTA, without clusters; every tile is lowered for CUDA as well.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax import GDNConfig, oracle
from pallas_kernels.jobs import launch
from pallas_kernels.kernels import history, middle
from pallas_kernels.place import Place
from tests.support.cases import TILES
from tests.support.mosaic import VALUES
from tests.support.tools import assert_close, assert_same_bits

CASES = {
    "three_values_a_key": (GDNConfig(1, 2, 6, 64, 128), 3),
    "k_wider_than_v": (GDNConfig(1, 2, 2, 128, 64, conv_width=3), 1),
    "two_taps": (GDNConfig(1, 1, 2, 64, 64, conv_width=2, norm_eps=1e-3), 2),
    "square": (GDNConfig(1, 1, 1, 128, 128), 2),
}
LAYERS, SLOTS, LAYER = 2, 5, 1


def draw(cfg: GDNConfig, splits: int, B: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    C, HV, VD = cfg.conv_dim, cfg.num_v_heads, cfg.value_dim
    parts = {name: normal(splits, B, n) for name, n in (("qkv", C), ("z", VD))}
    parts |= {name: 3 * normal(1, B, HV) for name in ("b", "a")}
    small = dict(A_log=np.log(rng.uniform(0.01, 16, HV)), dt_bias=rng.uniform(-6, 2, HV))
    S = normal(LAYERS, SLOTS, HV, cfg.head_k_dim, cfg.head_v_dim)
    return dict(
        parts=parts,
        conv=normal(C, cfg.conv_width),
        small={n: x.astype(np.float32) for n, x in small.items()}
        | {"norm": 1 + 0.1 * normal(cfg.head_v_dim)},
        S=S,
        hist=normal(LAYERS, SLOTS, cfg.conv_width - 1, C),
    )


def in_place(
    state: Any,
    drawn: Any,
    read: Any,
    write: Any,
    *,
    cfg: GDNConfig,
    tile: int,
    trace: bool,
    interpret: Any = VALUES,
) -> Any:
    S, hist = map(jax.new_ref, state)
    slots = (jnp.asarray(x, jnp.int32) for x in (read, write) if x is not None)
    place, conv = Place(jnp.full((1,), LAYER, jnp.int32), *slots), jnp.asarray(drawn["conv"])
    B = drawn["parts"]["z"].shape[1]
    (job,) = launch([history.job(hist, conv, place, B)], name="history", interpret=interpret)
    onn, intermediates = middle.middle(
        middle.Projected(**drawn["parts"], pre=job[0], newest=job[1]),
        middle.Small(**drawn["small"]),
        S,
        hist,
        place,
        heads_of(cfg),
        tile=tile,
        trace=trace,
        interpret=interpret,
    )
    return onn, intermediates, S[...], hist[...]


jitted = jax.jit(in_place, static_argnames=("cfg", "tile", "trace"))


def run(drawn: Any, read: Any, write: Any, *, cfg: GDNConfig, trace: bool = False):
    state = jnp.asarray(drawn["S"]), jnp.asarray(drawn["hist"])
    return jitted(state, drawn, read, write, cfg=cfg, tile=cfg.head_v_dim, trace=trace)


def heads_of(cfg: GDNConfig) -> middle.Heads:
    return middle.Heads(
        cfg.num_k_heads, cfg.num_v_heads, cfg.head_k_dim, cfg.head_v_dim, cfg.norm_eps
    )


def expected(drawn: Any, cfg: GDNConfig, row: int, slot: int) -> dict[str, np.ndarray]:
    """The oracle's step on a token of width one, whose projections are the sums of the parts."""
    sums = {n: x.astype(np.float64).sum(0)[row][:, None] for n, x in drawn["parts"].items()}
    weights = {f"in_proj_{name}": x for name, x in sums.items()}
    small = {n: oracle.wide(x) for n, x in drawn["small"].items()}
    weights |= dict(A_log=small["A_log"], dt_bias=small["dt_bias"], norm_weight=small["norm"])
    weights |= dict(conv_weight=oracle.wide(drawn["conv"]), out_proj=np.zeros((1, cfg.value_dim)))
    S, hist = (oracle.wide(drawn[n][LAYER, slot]) for n in ("S", "hist"))
    return oracle.step(weights, cfg, S, hist, np.ones(1))


@pytest.mark.parametrize("name", CASES)
def test_steps_two_to_six_agree_with_float64(name: str) -> None:
    cfg, splits = CASES[name]
    drawn, read, write = draw(cfg, splits, 3), [3, -1, 0], [3, -1, 2]
    for x in (drawn["S"], drawn["hist"]):
        x[0], x[1, [1, 2, 4]] = np.nan, np.nan
    onn, trace, S, hist = run(drawn, read, write, cfg=cfg, trace=True)
    for row in (0, 2):
        ref = expected(drawn, cfg, row, read[row])
        for h in range(cfg.num_v_heads):
            assert_close(S[LAYER, write[row], h], ref["S"][h], 1e-6, f"S of head {h}")
            mine = slice(h * cfg.head_v_dim, (h + 1) * cfg.head_v_dim)
            # A head whose values cancel has little to normalise: limits are those of the operator.
            assert_close(trace["ON"][row, mine], ref["ON"][h], 3e-6, f"ON of head {h}")
            assert_close(onn[row, mine], ref["ONN"][h], 3e-6, f"ONN of head {h}")
        assert_close(hist[LAYER, write[row]], ref["HIST"], 1e-6, "HIST")
        for entry in ("XC", "Z", "B", "A", "BETA", "G", "XCV", "Q", "K"):
            assert_close(trace[entry][row], ref[entry].reshape(-1), 1e-6, entry)
    np.testing.assert_array_equal(onn[1], 0)
    untouched = np.ones((LAYERS, SLOTS), bool)
    untouched[LAYER, [2, 3]] = False
    assert_same_bits(S[untouched], drawn["S"][untouched])
    assert_same_bits(hist[untouched], drawn["hist"][untouched])


def test_reading_back_changes_nothing_and_runs_repeat() -> None:
    cfg, splits = CASES["three_values_a_key"]
    drawn = draw(cfg, splits, 2)
    onn, none, S, hist = run(drawn, [1, 4], [1, 4], cfg=cfg)
    again, entries, S2, hist2 = run(drawn, [1, 4], [1, 4], cfg=cfg, trace=True)
    assert (none, set(entries)) == ({}, set(middle.READ_BACK))
    # XLA compiles the interpreted kernel anew, and not to the same roundings.
    for found, wanted in ((again, onn), (S2, S), (hist2, hist)):
        assert_close(found, wanted, 1e-6)
    assert_same_bits(run(drawn, [1, 4], [1, 4], cfg=cfg), (onn, none, S, hist))


def test_without_slots_a_row_is_its_own() -> None:
    cfg, splits = CASES["square"]
    drawn = draw(cfg, splits, 2)
    named = run(drawn, [0, 1], [0, 1], cfg=cfg)
    for found, wanted in zip(run(drawn, None, None, cfg=cfg), named, strict=True):
        if not isinstance(found, dict):
            assert_close(found, wanted, 1e-6)


def test_nan_of_a_row_stays_there() -> None:
    cfg, splits = CASES["two_taps"]
    drawn = draw(cfg, splits, 2)
    clean = run(drawn, [0, 1], [0, 1], cfg=cfg)
    drawn["parts"]["qkv"][1, 1, 5] = np.nan
    spoilt = run(drawn, [0, 1], [0, 1], cfg=cfg)
    assert np.isnan(spoilt[0][1]).any()
    for found, wanted in zip(spoilt, clean, strict=True):
        if not isinstance(found, dict):
            row = (0,) if found.ndim == 2 else (LAYER, 0)
            assert_same_bits(found[row], wanted[row])


def shapes(cfg: GDNConfig, splits: int, B: int) -> Any:
    drawn = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, draw(cfg, splits, B)))
    slots = jax.ShapeDtypeStruct((B,), jnp.int32)
    return (drawn["S"], drawn["hist"]), drawn, slots, slots


EVERY_TILE = [(n, t, True) for n, (cfg, _) in CASES.items() for t in TILES if t <= cfg.head_v_dim]


# Reading back only adds to the program.
@pytest.mark.parametrize(
    ("name", "tile", "trace"), [*EVERY_TILE, ("three_values_a_key", 64, False)]
)
def test_every_tile_lowers_for_cuda_in_place(name: str, tile: int, trace: bool) -> None:
    cfg, splits = CASES[name]
    traced = functools.partial(in_place, cfg=cfg, tile=tile, trace=trace, interpret=None)
    lowered = jax.jit(traced, donate_argnums=0)
    text = lowered.trace(*shapes(cfg, splits, 3)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2
    assert "output_operand_alias" in text
