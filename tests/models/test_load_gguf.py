"""Whole models from GGUF files, written with the gguf package as llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax as gdn
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.kernels import lay_out
from gdn_jax.models.loading import stored
from gdn_jax.models.loading.load import config_of, load_params
from gdn_jax.verify.draw import draw_weights
from tests.support.made_gguf import TWICE, Type, block, layer_tensors, metadata, write
from tests.support.made_model import (
    TINY,
    Tensors,
    by_stored_name,
    gguf_metadata,
    gguf_tensors,
    stored_as,
    tiny_tensors,
    wide_tensors,
    write_model,
)
from tests.support.tools import assert_close, assert_refused, assert_same_bits

CFG = ModelConfig.from_hf(TINY)


def wide(tmp_path: Path) -> tuple[Tensors, ModelConfig]:
    tensors, changes = wide_tensors()
    return tensors, config_of(write_model(tmp_path / "wide", tensors, **changes))


def assert_alike(found: Any, wanted: Any) -> None:
    """The weights of two models, norms as 1 + w, A_log up to -exp and its logarithm."""
    ours, theirs = by_stored_name(found), by_stored_name(wanted)
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        y = ours[name]
        assert jax.tree.structure(x) == jax.tree.structure(y), name
        if "A_log" in name:
            assert_close(y, x, 2.0**-22, name)
            continue
        if "norm.weight" in name and "linear_attn" not in name:
            x, y = 1 + x, 1 + y
        assert_same_bits(y, x, name)


@pytest.mark.parametrize("piece", [stored.NUMBERS_AT_ONCE, 7 * 32])
def test_a_converted_model_is_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(stored, "NUMBERS_AT_ONCE", piece)
    path = tmp_path / "f.gguf"
    cases = [(tmp_path / "wide", *wide(tmp_path)), (TINY, tiny_tensors(), CFG)]
    for folder, tensors, cfg in cases:
        write(path, gguf_tensors(tensors, cfg), gguf_metadata(cfg))
        assert config_of(path) == cfg
        for weights in ("f32", "q4"):
            found = load_params(path, cfg, weights=weights)
            assert_alike(found, load_params(folder, cfg, weights=weights))


@pytest.mark.parametrize("piece", [stored.NUMBERS_AT_ONCE, 50 * 64])
@pytest.mark.parametrize("weights", ["q4", "bf16", "f32"])
def test_blocks_are_kept_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, piece: int
) -> None:
    monkeypatch.setattr(stored, "NUMBERS_AT_ONCE", piece)
    tensors, cfg = wide(tmp_path)
    theirs = gguf_tensors(tensors, cfg)
    raw = {
        name: stored_as(x, Type.Q4_0)
        for name, x in theirs.items()
        if x.ndim == 2 and not name.startswith(("token_embd", "blk.0.ssm_"))
    }
    raw["blk.0.ssm_out.weight"] = stored_as(theirs["blk.0.ssm_out.weight"], Type.Q4_0)
    path = write(tmp_path / "f.gguf", theirs, gguf_metadata(cfg), raw=raw)
    found = load_params(path, config_of(path), weights=weights)
    # The quantiser's rule is that of GGUF, and groups of columns move whole.
    wanted = load_params(tmp_path / "wide", cfg, weights="q4")
    if weights != "f32":
        assert_alike(found, wanted)
        laid_out = load_params(path, config_of(path), weights=weights, kernel=True)
        assert_same_bits(laid_out, lay_out(found))
        return
    count = 0
    for name, x in by_stored_name(wanted).items():
        if isinstance(x, gdn.Q4Array):
            assert_same_bits(by_stored_name(found)[name], gdn.dequantize(x), name)
            count += 1
    assert count == len(raw)


def test_other_types_are_dequantised(tmp_path: Path) -> None:
    tensors, cfg = wide(tmp_path)
    theirs = gguf_tensors(tensors, cfg)
    bytes_of_q6 = np.random.default_rng(0).integers(0, 256, (64, 210), np.uint8)
    bytes_of_q6[:, 208:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    raw = {
        "blk.1.ffn_down.weight": (bytes_of_q6, Type.Q6_K),
        "blk.1.attn_q.weight": stored_as(theirs["blk.1.attn_q.weight"], Type.Q8_0),
        "blk.0.ssm_alpha.weight": stored_as(theirs["blk.0.ssm_alpha.weight"], Type.BF16),
        "token_embd.weight": stored_as(theirs["token_embd.weight"], Type.Q4_0),
    }
    values = {name: gguf.quants.dequantize(*x) for name, x in raw.items()}
    path = write(tmp_path / "f.gguf", theirs, gguf_metadata(cfg), raw=raw)
    exact = load_params(path, cfg, weights="f32")
    int4 = load_params(path, cfg, weights="q4")
    down, embedding = values["blk.1.ffn_down.weight"], values["token_embd.weight"]
    assert_same_bits(exact.blocks[1].down_proj, down)
    assert_same_bits(int4.blocks[1].down_proj, gdn.quantize_q4(down))
    assert_same_bits(exact.embedding, embedding)
    assert_same_bits(int4.embedding, jnp.asarray(embedding, jnp.bfloat16))
    found, a = by_stored_name(exact), values["blk.0.ssm_alpha.weight"]
    attention, linear = "model.layers.1.self_attn.", "model.layers.0.linear_attn."
    assert_same_bits(found[f"{attention}q_proj.weight"], values["blk.1.attn_q.weight"])
    assert_same_bits(found[f"{linear}in_proj_a.weight"], a[[0, 2, 4, 1, 3, 5]])


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0])
def test_a_tied_head_keeps_its_blocks(tmp_path: Path, kind: Type) -> None:
    tensors, cfg = wide(tmp_path)
    theirs = gguf_tensors(tensors, cfg)
    del theirs["output.weight"]
    raw = {"token_embd.weight": stored_as(theirs["token_embd.weight"], kind)}
    path = write(tmp_path / "f.gguf", theirs, gguf_metadata(cfg), raw=raw)
    cfg = config_of(path)
    assert cfg.tied
    head = load_params(path, cfg, weights="q4").head
    if kind == Type.Q4_0:
        assert_same_bits(head, gdn.quantize_q4(tensors["model.embed_tokens.weight"]))
    else:
        assert head is None
    assert load_params(path, cfg, weights="f32").head is None


def refused(path: Path, *fragments: str) -> None:
    assert_refused(
        lambda: load_params(path, CFG, weights="f32"),
        str(path),
        *fragments,
        error=gdn.CheckpointError,
    )


def test_blocks_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    theirs = gguf_tensors(tiny_tensors(), CFG)
    theirs |= {"blk.4.nextn.eh_proj.weight": np.zeros((4, 32), np.float32)}
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = write(tmp_path / "f.gguf", theirs, gguf_metadata(CFG) | more)
    assert config_of(path) == CFG
    lines: list[str] = []
    load_params(path, CFG, notes=lines.append)
    assert "skipped: 1 of multi-token prediction" in lines[0]


def test_everything_wrong_with_the_tensors_is_said_at_once(tmp_path: Path) -> None:
    theirs = gguf_tensors(tiny_tensors(), CFG)
    del theirs["output_norm.weight"], theirs["blk.1.attn_k.weight"]
    theirs["blk.2.attn_gate.weight"] = np.zeros((5, 32), np.float32)
    theirs["rope_freqs.weight"] = np.zeros(3, np.float32)
    integers = (np.zeros((32, 32), np.int8), Type.I8)
    path = tmp_path / "f.gguf"
    write(path, theirs, gguf_metadata(CFG), raw={"blk.0.ssm_out.weight": integers})
    refused(
        path,
        "2 missing (blk.1.attn_k.weight, output_norm.weight)",
        "1 unexpected (rope_freqs.weight)",
        "1 of another shape (blk.2.attn_gate.weight is [5, 32], needed [32, 32])",
        "1 of a type that cannot be read (blk.0.ssm_out.weight is I8)",
    )


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"qwen35.rope.scaling.type": "yarn"}, ("rope.scaling.type is 'yarn'", "'none'")),
        ({"qwen35.attention.value_length": 8}, ("16 keys and 8 values",)),
        ({"qwen35.attention.head_count_kv": 3}, ("4 query heads", "multiple of 3")),
        ({"qwen35.rope.dimension_count": 3}, ("rotary_dim is 3",)),
    ],
)
def test_sizes_that_no_model_has_are_refused(
    tmp_path: Path, changes: dict, fragments: tuple[str, ...]
) -> None:
    path = tmp_path / "f.gguf"
    write(path, gguf_tensors(tiny_tensors(), CFG), gguf_metadata(CFG) | changes)
    refused(path, *fragments)


def test_files_that_are_no_dense_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    layer = block(layer_tensors(draw_weights(TWICE, seed=7), TWICE, "qwen35"))
    write(path, layer, metadata(TWICE, "qwen35"))
    refused(path, "no tensor token_embd.weight", "a whole model")
    write(path, layer, metadata(TWICE, "qwen35moe"), "qwen35moe")
    refused(path, "'qwen35moe'", "a dense model")
    path.write_bytes(path.read_bytes()[:-40])
    refused(path, "truncated or not a GGUF file")
