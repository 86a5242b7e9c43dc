"""Every public entry with wrong arguments: one line that names what was found and is needed."""

import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdn_jax
from gdn_jax.report.metrics import unequal
from tests.support.cases import LayerCase, OpCase, operator_inputs
from tests.support.tools import OP, assert_refused, layer

# Arguments of the wrong type are the point here.
gdn: Any = gdn_jax

CFG = gdn.PRESETS["tiny"]
PARAMS: Any
PARAMS, STATE, XS = layer(LayerCase(CFG, 2, 3, live=True))
X = XS[:, 0]
OTHER = gdn.PRESETS["tiny-wide"]


def refuse(call, *fragments: str, error: type[Exception] = ValueError) -> None:
    line = assert_refused(call, *fragments, error=error)
    assert "needed" in line or "there are" in line or "runs it" in line, line


def params_with(**weights) -> Any:
    return dataclasses.replace(PARAMS, **weights)


ENTRIES: dict[str, Any] = {
    "decode_step": lambda p=PARAMS, s=STATE, x=X, cfg=CFG: gdn.decode_step(p, s, x, cfg),
    "trace_step": lambda p=PARAMS, s=STATE, x=X, cfg=CFG: gdn.trace_step(p, s, x, cfg),
    "decode": lambda p=PARAMS, s=STATE, x=XS, cfg=CFG: gdn.decode(p, s, x, cfg),
}
ENTRY = pytest.mark.parametrize("entry", ENTRIES)


@ENTRY
def test_wrong_inputs(entry: str) -> None:
    call, good = ENTRIES[entry], XS if entry == "decode" else X
    name = "xs" if entry == "decode" else "x"
    needed = "[B=2, T, D=64]" if entry == "decode" else "[B=2, D=64]"
    needed += " float32 or bfloat16 or float16"
    wrong = {
        "rank below": good[0],
        "rank above": good[None],
        "width": good[..., :63],
        "batch": good[:1],
        "integer": good.astype(jnp.int32),
        "float64": np.asarray(good, np.float64),
    }
    for x in wrong.values():
        found = f"{name} has shape {x.shape} and dtype {x.dtype}"
        refuse(lambda x=x: call(x=x), f"{entry}: ", found, needed, error=gdn.ShapeError)
    refuse(lambda: call(x=good.tolist()), f"{entry}: {name} is a list", needed)
    refuse(lambda: call(x=None), f"{entry}: {name} is a NoneType", needed)


@ENTRY
def test_wrong_states(entry: str) -> None:
    call, S, hist = ENTRIES[entry], STATE.S, STATE.conv_hist
    S_needed, hist_needed = "[B, HV=4, K=16, V=8] float32", "[B=2, W-1=3, C=96]"
    for wrong in (S[0], S[None], S.swapaxes(-1, -2), S[:, :3], S.astype(jnp.bfloat16)):
        found = f"state.S has shape {wrong.shape} and dtype {wrong.dtype}"
        refuse(lambda w=wrong: call(s=gdn.GDNState(w, hist)), f"{entry}: ", found, S_needed)
    for wrong in (hist[0], hist[:1], hist[:, :2], hist[..., :95], hist.astype(jnp.float16)):
        found = f"state.conv_hist has shape {wrong.shape} and dtype {wrong.dtype}"
        refuse(lambda w=wrong: call(s=gdn.GDNState(S, w)), f"{entry}: ", found, hist_needed)
    refuse(lambda: call(s=(S, hist)), f"{entry}: state is a tuple", "GDNState")
    refuse(lambda: call(s=gdn.GDNState(None, hist)), "state.S is a NoneType", S_needed)


@ENTRY
def test_wrong_weights(entry: str) -> None:
    call = ENTRIES[entry]
    for field in dataclasses.fields(gdn.GDNParams):
        weight = getattr(PARAMS, field.name)
        for wrong in (weight[:-1], weight[None], weight[..., None], weight.astype(jnp.int8)):
            found = f"params.{field.name} has shape {wrong.shape} and dtype {wrong.dtype}"
            bad = params_with(**{field.name: wrong})
            refuse(lambda p=bad: call(p=p), f"{entry}: ", found, "needed [", "float32")
    bad = params_with(out_proj=PARAMS.out_proj.T)
    refuse(lambda: call(p=bad), "params.out_proj", "(32, 64)", "[D=64, HV*V=32]")
    refuse(lambda: call(p=params_with(A_log=None)), "params.A_log is a NoneType", "[HV=4]")
    refuse(lambda: call(p=vars(PARAMS)), f"{entry}: params is a dict", "GDNParams")


@ENTRY
@pytest.mark.parametrize("name", ["A_log", "dt_bias", "norm_weight", "conv_weight", "in_proj_a"])
def test_small_weights_stay_float32(entry: str, name: str) -> None:
    """A_log or dt_bias rounded to bfloat16 would let the decay drift over long runs."""
    bad = params_with(**{name: getattr(PARAMS, name).astype(jnp.bfloat16)})
    refuse(lambda: ENTRIES[entry](p=bad), f"params.{name}", "bfloat16", "float32")


@ENTRY
def test_wrong_configurations(entry: str) -> None:
    call = ENTRIES[entry]
    for cfg in ("tiny", None, dataclasses.asdict(CFG)):
        refuse(lambda c=cfg: call(cfg=c), f"{entry}: cfg is a {type(cfg).__name__}", "GDNConfig")
    refuse(lambda: call(cfg=OTHER), f"{entry}: params.", "needed [C=128, D=96]")


def test_no_tokens() -> None:
    refuse(lambda: ENTRIES["decode"](x=XS[:, :0]), "xs has shape (2, 0, 64)", "T >= 1")


def test_the_refusals_come_under_jit_too() -> None:
    jitted = jax.jit(gdn.decode_step, static_argnames="cfg")
    refuse(lambda: jitted(PARAMS, STATE, X[:1], CFG), "decode_step: x has shape (1, 64)")


def test_an_array_of_a_foreign_library() -> None:
    class Foreign:
        shape, dtype = (2, 64), "torch.float32"

    refuse(lambda: ENTRIES["decode_step"](x=Foreign()), "x has shape (2, 64)", "torch.float32")


def test_a_refused_call_changes_no_state() -> None:
    before = gdn.export_state(STATE)
    for name, call in ENTRIES.items():
        bad = XS[..., :63] if name == "decode" else X[..., :63]
        refuse(lambda c=call, bad=bad: c(x=bad), "needed")
    assert unequal(before["S"], np.asarray(STATE.S)) == 0


def test_backends() -> None:
    operands = delta_operands()
    entries: dict[str, Any] = {name: lambda b, n=name: run_on(n, b) for name in ENTRIES}
    entries[OP] = lambda b: gdn.recurrent_gated_delta_rule(*operands.values(), backend=b)
    for name, call in entries.items():
        refuse(lambda c=call: c("cuda"), "'cuda'", "xla, pallas")
        refuse(
            lambda c=call: c("pallas"),
            f"{name} on backend 'pallas'",
            "no CUDA GPU",
            "backend='xla' runs",
            error=gdn.BackendUnavailableError,
        )
    assert gdn.select_backend("decode", CFG) == "xla"
    assert gdn.select_backend("decode", CFG, backend="xla") == "xla"
    refuse(lambda: gdn.select_backend("conv"), "no operator 'conv'", "decode_step")
    refuse(lambda: gdn.select_backend("decode", backend=""), "no backend ''", "xla")


def run_on(entry: str, backend: str):
    run = getattr(gdn, entry)
    return run(PARAMS, STATE, XS if entry == "decode" else X, CFG, backend=backend)


def delta_operands() -> dict[str, np.ndarray]:
    return operator_inputs(OpCase(2, 3, 2, 4, 16, 8))[0]


NEEDED = {
    "q": "[B, T, HK, K] float32 or bfloat16 or float16",
    "k": "[B=2, T=3, HK=2, K=16] float32",
    "v": "[B=2, T=3, HV, V] float32",
    "g": "[B=2, T=3, HV=4] float32",
    "beta": "[B=2, T=3, HV=4] float32",
}


@pytest.mark.parametrize("name", NEEDED)
def test_delta_rule_operands(name: str) -> None:
    good = delta_operands()
    x = good[name]
    wrong = [x[0], x[None], x.astype(np.float64), x.astype(np.int32)]
    wrong += [] if name == "q" else [x[:1], x[:, :2]]
    wrong += [x[..., :1]] if name in ("k", "g", "beta") else []
    for bad in wrong:
        found = f"{OP}: {name} has shape {bad.shape} and dtype {bad.dtype}"
        call = lambda bad=bad: gdn.recurrent_gated_delta_rule(**{**good, name: bad})  # noqa: E731
        refuse(call, found, NEEDED[name], error=gdn.ShapeError)
    call = lambda: gdn.recurrent_gated_delta_rule(**{**good, name: x.tolist()})  # noqa: E731
    refuse(call, f"{OP}: {name} is a list", NEEDED[name])


def test_delta_rule_sizes() -> None:
    good = delta_operands()
    run = gdn.recurrent_gated_delta_rule
    three = {name: good[name][:, :, :3] for name in ("v", "g", "beta")}
    refuse(lambda: run(**{**good, **three}), "v has 3 heads", "multiple of q's 2")
    none = {name: x[:, :0] for name, x in good.items()}
    refuse(lambda: run(**none), "q has shape (2, 0, 2, 16)", "T >= 1")
    S = np.zeros((2, 4, 16, 8), np.float32)
    for bad in (S[:1], S[:, :3], S.swapaxes(-1, -2), S.astype(jnp.bfloat16), S[0]):
        found = f"initial_state has shape {bad.shape} and dtype {bad.dtype}"
        refuse(
            lambda bad=bad: run(**good, initial_state=bad), found, "[B=2, HV=4, K=16, V=8] float32"
        )


def test_causal_conv1d_arguments() -> None:
    x, hist, weight = XS, STATE.conv_hist[..., :64], jnp.ones((64, 4))
    run = gdn.causal_conv1d
    for bad in (x[0], x[..., :63], x.astype(jnp.bfloat16)):
        refuse(lambda b=bad: run(b, hist, weight), f"x has shape {bad.shape}", "[B, T, C=64]")
    for bad in (hist[:1], hist[:, :2], hist[..., :63], hist.astype(jnp.float16)):
        refuse(lambda b=bad: run(x, b, weight), f"hist has shape {bad.shape}", "[B=2, W-1=3, C=64]")
    refuse(lambda: run(x, hist, weight[:, None]), "weight has shape (64, 1, 4)", "[C, W]")
    refuse(lambda: run(x[:, :0], hist, weight), "x has shape (2, 0, 64)", "T >= 1")
    refuse(lambda: run(None, hist, weight), "x is a NoneType")


def test_state_functions() -> None:
    for batch in (0, -1, 1.0, True, None):
        refuse(lambda b=batch: gdn.init_state(CFG, b), f"batch is {batch!r}", "positive integer")
    wrong = [
        lambda: gdn.init_state("tiny"),
        lambda: gdn.init_params(jax.random.key(0), "tiny"),
        lambda: gdn.load_state("nowhere", "tiny"),
        lambda: gdn.save_state("nowhere", STATE, "tiny"),
        lambda: gdn.import_state(gdn.export_state(STATE), "tiny"),
    ]
    for call in wrong:
        refuse(call, "cfg is a str", "GDNConfig")
    refuse(lambda: gdn.save_state("nowhere", STATE, OTHER), "state.S", "needed [B, HV=6")
    good = gdn.export_state(STATE)
    refuse(lambda: gdn.import_state({"S": good["S"]}, CFG), "no conv_hist", "found S")
    refuse(lambda: gdn.import_state({}, CFG), "no S", "found nothing")
    refuse(lambda: gdn.import_state(good | {"S": good["S"].tolist()}, CFG), "state.S is a list")
    refuse(lambda: gdn.import_state(good | {"S": [good["S"].tolist()]}, CFG), "state.S is a list")
    bad = good["S"].copy()
    bad[1, 2, 3, 4] = np.nan
    refuse(lambda: gdn.import_state(good | {"S": bad}, CFG), "S[1, 2, 3, 4] is nan", "finite")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(gdn.GDNConfig)])
def test_configuration_fields(field: str) -> None:
    wrong = [0, -1, None, "4", True, math.nan] + ([math.inf] if field == "norm_eps" else [2.0])
    for value in wrong:
        call = lambda value=value: dataclasses.replace(CFG, **{field: value})  # noqa: E731
        refuse(call, f"{field} is {value!r}", "needed a positive", error=gdn.ConfigError)


def test_configuration_relations() -> None:
    refuse(lambda: gdn.GDNConfig(64, 3, 4, 16, 8), "num_v_heads is 4", "multiple", "= 3")
    refuse(lambda: gdn.GDNConfig(64, 4, 2, 16, 8), "num_v_heads is 2", "multiple", "= 4")
    refuse(lambda: gdn.GDNConfig(64, 2, 4, 16, 8, conv_width=1), "conv_width is 1", "at least 2")


HF = dict(
    hidden_size=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=8, linear_conv_kernel_dim=4, rms_norm_eps=1e-6, vocab_size=7,
)  # fmt: skip


def test_from_hf(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": HF, "hidden_size": 1}), encoding="utf-8")
    for source in (HF, {"text_config": HF}, path, str(path), tmp_path):
        assert gdn.GDNConfig.from_hf(source) == CFG


@pytest.mark.parametrize("field", [name for name in HF if name != "vocab_size"])
def test_from_hf_without_a_field(field: str) -> None:
    raw = {name: value for name, value in HF.items() if name != field}
    refuse(lambda: gdn.GDNConfig.from_hf(raw), f"no {field}", "needed", error=gdn.ConfigError)


def test_from_hf_of_something_else(tmp_path) -> None:
    path = tmp_path / "config.json"
    read = gdn.GDNConfig.from_hf
    refuse(lambda: read(tmp_path), str(path), "no such file", error=gdn.ConfigError)
    refuse(lambda: read(tmp_path / "other.json"), "other.json", "no such file")
    for text, fragment in (('{"hidden_size": 64', "JSON"), ("[1]", "list"), ("", "JSON")):
        path.write_text(text, encoding="utf-8")
        refuse(lambda: read(path), str(path), fragment, error=gdn.ConfigError)
    path.write_bytes(b"\xff\xfe{}")
    refuse(lambda: read(path), str(path), "cannot be read")
    refuse(lambda: read({"text_config": 3}), "text_config is int", "object")
    refuse(lambda: read(HF | {"linear_num_value_heads": 3}), "num_v_heads is 3", "multiple")
    refuse(lambda: read(HF | {"hidden_size": "64"}), "d_model is '64'", "positive integer")
