"""The live oracle: what goes to another interpreter and comes back, and what is refused."""

import ast
import dataclasses
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gdn_jax import PRESETS, OracleError, ShapeError
from gdn_jax.verify.draw import draw_inputs, draw_weights
from gdn_jax.verify.oracles import oracle_file, transformers_forward
from gdn_jax.verify.oracles.oracle_file import Oracle, load_oracle
from tests.verify.test_oracle_file import CFG, made, parts


def test_the_fused_projections_of_qwen3_next():
    cfg = PRESETS["tiny-wide"]
    w = draw_weights(cfg, 1)
    fused = transformers_forward._module_weights(w, dataclasses.asdict(cfg), "qwen3_next")
    HK, K, r, V = cfg.num_k_heads, cfg.head_k_dim, cfg.heads_per_key, cfg.head_v_dim
    k_rows, v_rows = w["in_proj_qkv"][HK * K :], w["in_proj_qkv"][2 * HK * K :]
    qkvz, ba = [], []
    for i in range(HK):
        key, value, head = (slice(i * n, (i + 1) * n) for n in (K, r * V, r))
        qkvz += [w["in_proj_qkv"][key], k_rows[key], v_rows[value], w["in_proj_z"][value]]
        ba += [w["in_proj_b"][head], w["in_proj_a"][head]]
    assert np.array_equal(fused["in_proj_qkvz.weight"], np.concatenate(qkvz))
    assert np.array_equal(fused["in_proj_ba.weight"], np.concatenate(ba))


def test_the_script_stands_alone():
    tree = ast.parse(Path(transformers_forward.__file__).read_text(), feature_version=(3, 11))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names == {"numpy", "safetensors"}


def interpreter(tmp_path, script: str) -> Path:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def test_live_oracle_through_another_interpreter(tmp_path):
    """A stand-in keeps the request and answers with results made beforehand."""
    expected, weights = made()
    live = {"one_shot.S": expected.trace["S"], "one_shot.HIST": expected.trace["HIST"]}
    answer = expected.trace | live | {"one_shot.OUT": expected.one_shot["OUT"]}
    ready, kept, out = tmp_path / "ready", tmp_path / "kept", tmp_path / "out.safetensors"
    save_file(answer, ready, {"torch": "2.13.0", "transformers": "5.17.0"})
    quoted = [shlex.quote(str(x)) for x in (kept, ready)]
    python = interpreter(tmp_path, f'cp "$2" {quoted[0]} && cp {quoted[1]} "$3"')

    def export() -> Oracle:
        return oracle_file.export_oracle(
            out, CFG, tokens=3, seed=4, architecture="qwen3_5", python=python
        )

    live = export()
    tensors, metadata = parts(kept)
    assert set(tensors) == {*weights, "xs"}
    assert all(np.array_equal(tensors[n], x) for n, x in (weights | {"xs": expected.xs}).items())
    assert json.loads(metadata["config"]) == dataclasses.asdict(CFG)
    assert metadata["architecture"] == "qwen3_5"

    back = load_oracle(out, CFG)
    assert np.array_equal(back.trace["S"], expected.trace["S"])
    assert np.array_equal(back.one_shot["OUT"], expected.one_shot["OUT"])
    assert set(live.one_shot) == {"OUT", "S", "HIST"}
    assert back.provenance == live.provenance
    assert back.provenance["transformers"] == "5.17.0"
    assert float(back.provenance["one_shot_S_max_rel"]) == 0.0
    assert str(tmp_path) not in str(parts(out)[1])

    del answer["ONN"]
    save_file(answer, ready, {"torch": "2.13.0", "transformers": "5.17.0"})
    before = out.read_bytes()
    with pytest.raises(OracleError, match="no tensor ONN"):
        export()
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("script", "match"),
    [
        ("echo Traceback >&2; echo 'MemoryError: 4 GB' >&2; exit 1", "failed: MemoryError: 4 GB"),
        ("exit 0", "exit status 0, no result"),
        ("kill -9 $$", "exit status -9"),
    ],
)
def test_a_failing_interpreter_is_one_line(tmp_path, script, match):
    python = interpreter(tmp_path, script)
    with pytest.raises(OracleError, match=match) as caught:
        oracle_file.compute_oracle(
            draw_weights(CFG, 0), CFG, draw_inputs(CFG, 1, 0), "qwen3_5", python=python
        )
    assert "\n" not in str(caught.value)


def test_what_a_live_oracle_refuses(monkeypatch, tmp_path):
    weights, xs = draw_weights(CFG, 0), draw_inputs(CFG, 1, 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OracleError, match=r"no torch and no transformers.*gdn-jax\[oracle\]"):
        oracle_file.compute_oracle(weights, CFG, xs, "qwen3_5")
    with pytest.raises(OracleError, match="no interpreter /none/python"):
        oracle_file.compute_oracle(weights, CFG, xs, "qwen3_5", python="/none/python")
    with pytest.raises(OracleError, match="architecture is 'llama'; needed qwen3_5 or qwen3_next"):
        oracle_file.compute_oracle(weights, CFG, xs, "llama")
    with pytest.raises(ShapeError, match="0 tokens"):
        oracle_file.compute_oracle(weights, CFG, xs[:0], "qwen3_5")
    lacking = {n: x for n, x in weights.items() if n != "dt_bias"}
    with pytest.raises(ShapeError, match="dt_bias is a NoneType"):
        oracle_file.compute_oracle(lacking, CFG, xs, "qwen3_5")
    for tokens, seed in ((0, 0), (True, 0), (1, -1)):
        with pytest.raises(OracleError, match="needed an integer"):
            oracle_file.export_oracle(
                tmp_path / "o", CFG, tokens=tokens, seed=seed, architecture="qwen3_5"
            )
    with pytest.raises(OracleError, match="no directory"):
        oracle_file.export_oracle(
            tmp_path / "no" / "o", CFG, tokens=1, seed=0, architecture="qwen3_5"
        )
    assert not list(tmp_path.iterdir())
