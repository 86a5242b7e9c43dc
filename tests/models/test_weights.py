"""Drawn weights, the sizes of public models, and the kernels' layout of a whole model."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.models.config import MODEL_PRESETS
from gdn_jax.models.kernels import lay_out
from gdn_jax.models.loading import stored
from gdn_jax.models.loading.load import config_of, load_params
from gdn_jax.models.loading.weights import weight_table
from gdn_jax.models.synthetic import model_params_like
from tests.support.made_model import TINY, by_stored_name, wide_tensors, write_model
from tests.support.tools import assert_same_bits

CFG = config_of(TINY)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors, changes = wide_tensors()
    return write_model(tmp_path_factory.mktemp("wide"), tensors, **changes)


@pytest.mark.parametrize(
    ("name", "count", "tensors"),
    [
        # What the public checkpoints have without vision and multi-token prediction.
        ("qwen3.5-27b", 26_895_998_464, 851),
        ("qwen3.5-9b", 8_953_803_264, 427),
        ("qwen3.5-0.8b", 752_393_024, 320),
    ],
)
def test_sizes_of_public_models(name: str, count: int, tensors: int) -> None:
    table = weight_table(MODEL_PRESETS[name])
    assert sum(math.prod(weight.shape) for weight in table.values()) == count
    assert len(table) == tensors


@pytest.mark.parametrize(("weights", "kernel"), [("f32", False), ("q4", False), ("q4", True)])
def test_drawn_weights_are_those_of_a_loaded_model_in_kind(
    wide: Path, weights: str, kernel: bool
) -> None:
    cfg = config_of(wide)
    loaded = load_params(wide, cfg, weights=weights)
    loaded = lay_out(loaded) if kernel else loaded
    drawn, again, other = (
        model_params_like(cfg, jax.random.key(i), weights, kernel=kernel) for i in (0, 0, 1)
    )
    assert jax.tree.structure(drawn) == jax.tree.structure(loaded)
    for a, b in zip(jax.tree.leaves(drawn), jax.tree.leaves(loaded), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert_same_bits(drawn, again)
    assert not np.array_equal(drawn.embedding, other.embedding)
    assert not np.array_equal(drawn.blocks[0].input_norm, drawn.blocks[1].input_norm)
    mixer = drawn.blocks[0].mixer
    assert isinstance(mixer, gdn.GDNParams)
    assert float(mixer.A_log.max()) <= math.log(16)
    w: Any
    for w in (drawn.head, drawn.blocks[1].gate_proj, drawn.blocks[1].down_proj, mixer.in_proj_z):
        w = gdn.from_kernel(w) if isinstance(w, gdn.Q4Kernel) else w
        w = gdn.dequantize(w) if isinstance(w, gdn.Q4Array) else w
        x = np.asarray(w, np.float64) * math.sqrt(w.shape[-1])
        # Of 8192 numbers or more: five standard deviations of the mean and of the mean square.
        assert abs(x.mean()) < 5 / math.sqrt(x.size)
        assert abs((x * x).mean() - 1) < 5 / math.sqrt(x.size)
        assert np.abs(np.corrcoef(x[:16]) - np.eye(16)).max() < 0.8


def test_the_layout_of_the_kernels_keeps_every_bit_and_frees_the_old_one(wide: Path) -> None:
    cfg = config_of(wide)
    once, twice = (load_params(wide, cfg, weights="q4") for _ in range(2))
    laid_out = lay_out(once)
    for name, wanted in by_stored_name(twice).items():
        found = by_stored_name(laid_out)[name]
        if isinstance(wanted, gdn.Q4Array):
            assert isinstance(found, gdn.Q4Kernel), name
            found = gdn.from_kernel(found)
        assert_same_bits(found, wanted, name)
    for x in by_stored_name(once).values():
        if isinstance(x, gdn.Q4Array):
            assert x.packed.is_deleted()
            assert x.scales.is_deleted()
    assert laid_out.nbytes == twice.nbytes
    assert lay_out(laid_out).blocks[0].gate_proj is laid_out.blocks[0].gate_proj


def test_a_load_lays_out_on_the_way(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, in several pieces, what to_kernel makes on the device."""
    cfg = config_of(wide)
    wanted = lay_out(load_params(wide, cfg, weights="q4"))
    monkeypatch.setattr(stored, "NUMBERS_AT_ONCE", 64 * cfg.hidden_size)
    found = load_params(wide, cfg, weights="q4", kernel=True)
    assert isinstance(found.blocks[0].gate_proj, gdn.Q4Kernel)
    assert len(found.blocks[0].gate_proj.blocks) > 1
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("kernel", [False, True])
def test_what_the_kernels_cannot_take_stays(kernel: bool) -> None:
    params = load_params(TINY, CFG, weights="q4", kernel=kernel)
    block = lay_out(params).blocks[0]
    assert isinstance(block.gate_proj, gdn.Q4Array)
    assert isinstance(block.down_proj, jax.Array)
    assert block.down_proj.dtype == jnp.bfloat16
