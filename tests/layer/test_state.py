"""The state kept outside: copies, files, and every way in which a file is refused."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

import gdn_jax as gdn
from gdn_jax._core.sealed import digest
from tests.support.cases import state_arrays
from tests.support.tools import assert_refused, assert_same_bits

CFG = gdn.PRESETS["tiny"]
LEADS = {"layer": (2,), "stack": (3, 2)}


def live(lead=(2,), seed: int = 0) -> gdn.GDNState:
    return gdn.import_state(state_arrays(CFG, lead, seed), CFG)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.safetensors"


def refused(path, *fragments: str, cfg: gdn.GDNConfig = CFG) -> None:
    call = lambda: gdn.load_state(path, cfg)  # noqa: E731
    assert_refused(call, str(path), *fragments, error=gdn.StateFileError)


def read(path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        return {n: file.get_tensor(n) for n in ("S", "conv_hist")}, dict(file.metadata())


def craft(path, arrays, metadata) -> None:
    """A file that a careless or hostile writer could make, its checksum right for its data."""
    path.write_bytes(save(arrays, metadata | {"sha256": digest(arrays)}))


def test_a_new_state_is_zeros_of_the_documented_shapes() -> None:
    state = gdn.init_state(CFG, 3)
    assert (state.S.shape, state.conv_hist.shape) == ((3, 4, 16, 8), (3, 3, 96))
    assert (state.S.dtype, state.conv_hist.dtype) == (jnp.float32, jnp.float32)
    assert not np.any(state.S)
    assert not np.any(state.conv_hist)
    assert state.nbytes == 4 * (3 * 4 * 16 * 8 + 3 * 3 * 96)


def test_the_state_of_27b_takes_149_6_mib() -> None:
    """48 layers, one sequence, from the arrays' own shapes; nothing is allocated."""
    bank = gdn.LayerBank(gdn.PRESETS["qwen3.5-27b"], 48)
    shapes = jax.eval_shape(bank.init_state)
    sizes = {name: x.size * x.dtype.itemsize for name, x in vars(shapes).items()}
    assert sizes == {"S": 150_994_944, "conv_hist": 5_898_240}
    assert round(sum(sizes.values()) / 2**20, 1) == 149.6


def test_reset_forgets_nan_too() -> None:
    state = jax.tree.map(lambda x: x.at[0].set(jnp.nan), live())
    assert_same_bits(gdn.reset_state(state), gdn.init_state(CFG, 2))


def test_clone_survives_the_donation_of_the_original() -> None:
    state = live()
    copy = gdn.clone_state(state)
    jax.jit(lambda s: jax.tree.map(lambda x: 2 * x, s), donate_argnums=0)(state)
    assert state.S.is_deleted()
    assert_same_bits(copy, live())


@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS)
def test_export_and_import_keep_every_bit(lead) -> None:
    state = live(lead)
    arrays = gdn.export_state(state)
    again = gdn.import_state(arrays, CFG)
    assert_same_bits(again, state)
    arrays["S"][...] = 0.0
    assert_same_bits(state, live(lead))


@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS)
def test_files_keep_every_bit(path, lead) -> None:
    """Negative zero and subnormals included."""
    state = live(lead)
    state = dataclasses.replace(state, S=state.S.at[..., 0].set(-0.0).at[..., 1].set(1e-40))
    gdn.save_state(path, state, CFG)
    assert_same_bits(gdn.load_state(path, CFG), state)
    assert os.listdir(path.parent) == [path.name]


def test_a_saved_state_replaces_an_older_one(path) -> None:
    for seed in (0, 1):
        gdn.save_state(str(path), live(seed=seed), CFG)
    assert_same_bits(gdn.load_state(path, CFG), live(seed=1))


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(path, monkeypatch, step) -> None:
    gdn.save_state(path, live(), CFG)
    before = path.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        gdn.save_state(path, live(seed=1), CFG)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["S", "conv_hist"])
def test_a_state_that_is_not_finite_is_not_written(path, field: str, value: float) -> None:
    state = live()
    place = (1,) + (0,) * (getattr(state, field).ndim - 1)
    state = dataclasses.replace(state, **{field: getattr(state, field).at[place].set(value)})
    assert_refused(
        lambda: gdn.save_state(path, state, CFG),
        "not written", f"{field}{list(place)} is {value}", "finite",
        error=gdn.StateFileError,
    )  # fmt: skip
    assert not os.listdir(path.parent)


def test_missing_file(path) -> None:
    refused(path, "no such file")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 2000, -1])
def test_truncated_file(path, keep: int) -> None:
    gdn.save_state(path, live(), CFG)
    path.write_bytes(path.read_bytes()[:keep])
    refused(path, "truncated or not a safetensors file")


def test_a_directory_or_text_is_not_a_state_file(tmp_path, path) -> None:
    refused(tmp_path, "")
    path.write_text("S = 0\n" * 100, encoding="utf-8")
    refused(path, "truncated or not a safetensors file")


@pytest.mark.parametrize("place", [-1, -3000])
def test_one_flipped_bit_of_the_data(path, place: int) -> None:
    gdn.save_state(path, live(), CFG)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    refused(path, "altered since it was written")


def test_swapped_tensors_and_an_edited_checksum(path) -> None:
    gdn.save_state(path, live(), CFG)
    arrays, metadata = read(path)
    path.write_bytes(save(arrays | {"S": arrays["S"][::-1].copy()}, metadata))
    refused(path, "altered since it was written")
    path.write_bytes(save(arrays, metadata | {"sha256": "0" * 64}))
    refused(path, "altered since it was written")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(gdn.GDNConfig)])
def test_another_configuration(path, field: str) -> None:
    """Even one that does not change a shape, such as the epsilon."""
    gdn.save_state(path, live(), CFG)
    other = dataclasses.replace(CFG, **{field: getattr(CFG, field) * 2})
    refused(path, "written for", f'"{field}": {getattr(CFG, field)}', "needed", cfg=other)


def test_another_version_or_format(path) -> None:
    gdn.save_state(path, live(), CFG)
    arrays, metadata = read(path)
    craft(path, arrays, metadata | {"version": "2"})
    refused(path, "format version 2", "needed 1")
    craft(path, arrays, metadata | {"format": "other"})
    refused(path, "not a state file")
    path.write_bytes(save(arrays))
    refused(path, "not a state file")
    craft(path, {"S": arrays["S"]}, metadata)
    refused(path, "not a state file")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_file_that_holds_no_finite_state(path, value: float) -> None:
    gdn.save_state(path, live(), CFG)
    arrays, metadata = read(path)
    arrays["conv_hist"][1, 2, 3] = value
    craft(path, arrays, metadata)
    refused(path, f"conv_hist[1, 2, 3] is {value}", "finite")


def test_a_file_of_the_wrong_shapes_or_dtype(path) -> None:
    gdn.save_state(path, live(), CFG)
    arrays, metadata = read(path)
    S = arrays["S"]
    craft(path, arrays | {"S": np.swapaxes(S, -1, -2).copy()}, metadata)
    refused(path, "state.S has shape (2, 4, 8, 16)", "needed [B, HV=4, K=16, V=8]")
    craft(path, arrays | {"S": S[:1].copy()}, metadata)
    refused(path, "state.conv_hist has shape (2, 3, 96)", "needed [B=1")
    craft(path, arrays | {"S": S.astype(np.float16)}, metadata)
    refused(path, "float16", "needed", "float32")


def test_a_bfloat16_file(path) -> None:
    """A dtype that the NumPy reader itself may not know."""
    gdn.save_state(path, live(), CFG)
    metadata = read(path)[1]
    header = json.dumps(
        {"__metadata__": metadata, "S": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    refused(path)
