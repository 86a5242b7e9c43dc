"""Pools in files: every bit and number kept, every wrong file refused, no save ever half done."""

import dataclasses
import os
import signal
import subprocess
import sys

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
NAMES = ("S", "conv_hist", "generation", "turn")


def live(seed: int = 0) -> gdn.StatePool:
    """Slots 0, 2, 3 and 4 of 6 in use, 1 freed, 5 never used."""
    pool, slots = gdn.StatePool.create(CFG, 3, 6).alloc(5)
    return pool.import_(slots, state_arrays(CFG, (3, 5), seed)).free(1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool.safetensors"


def refused(path, *fragments: str, cfg: gdn.GDNConfig = CFG) -> None:
    call = lambda: gdn.load_pool(path, cfg)  # noqa: E731
    assert_refused(call, str(path), *fragments, error=gdn.StateFileError)


def read(path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        return {n: file.get_tensor(n) for n in NAMES}, dict(file.metadata())


def craft(path, arrays, metadata) -> None:
    """A file that a careless or hostile writer could make, its checksum right for its data."""
    path.write_bytes(save(arrays, metadata | {"sha256": digest(arrays)}))


def assert_same_pool(found: gdn.StatePool, pool: gdn.StatePool) -> None:
    assert found.cfg == pool.cfg
    assert found.S.shape == pool.S.shape
    assert_same_bits(jax.tree.leaves(found.table), jax.tree.leaves(pool.table))
    assert_same_bits(found.export(found.used), pool.export(pool.used))


def test_files_keep_every_bit_and_every_number(path) -> None:
    """Negative zero and subnormals too; a free slot's content, here NaN, is left behind."""
    pool = live()
    S = pool.S.at[:, 3, :, :, 0].set(-0.0).at[:, 4, :, :, 1].set(1e-40).at[:, 1].set(jnp.nan)
    pool = dataclasses.replace(pool, S=S)
    gdn.save_pool(str(path), pool)
    assert os.listdir(path.parent) == [path.name]
    found = gdn.load_pool(path, CFG)
    assert list(found.used) == [0, 2, 3, 4]
    assert_same_pool(found, pool)
    assert not np.any(np.asarray(found.S)[:, [1, 5]])
    assert read(path)[0]["S"].shape == (3, 4, 4, 16, 8)


def test_a_loaded_pool_goes_on_like_the_saved_one(path) -> None:
    """The same slots are handed out next, and what was an error still is."""
    pool = live()
    gdn.save_pool(path, pool)
    found = gdn.load_pool(path, CFG)
    pool, slots = pool.alloc(2)
    found, same = found.alloc(2)
    assert slots.tolist() == same.tolist() == [5, 1]
    assert_same_pool(found, pool)
    gdn.save_pool(path, found.free(slots))
    found = gdn.load_pool(path, CFG)
    assert_refused(lambda: found.free(1), "slots[0] is 1", "freed", error=gdn.SlotError)


@pytest.mark.parametrize("used", [0, 6])
def test_an_empty_pool_and_a_full_one(path, used: int) -> None:
    pool, slots = gdn.StatePool.create(CFG, 3, 6).alloc(used)
    pool = pool.import_(slots, state_arrays(CFG, (3, used), 1))
    gdn.save_pool(path, pool)
    assert_same_pool(gdn.load_pool(path, CFG), pool)


def test_a_pool_that_came_out_of_jit(path) -> None:
    pool = jax.jit(lambda p: p)(live())
    gdn.save_pool(path, pool)
    assert_same_pool(gdn.load_pool(path, CFG), pool)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["S", "conv_hist"])
def test_a_slot_in_use_that_is_not_finite_is_not_written(path, field: str, value: float) -> None:
    pool = live()
    pool = dataclasses.replace(pool, **{field: getattr(pool, field).at[1, 3].set(value)})
    assert_refused(
        lambda: gdn.save_pool(path, pool), "not written", "slot 3", f"{field}[:, 3]", str(value),
        error=gdn.StateFileError,
    )  # fmt: skip
    assert not os.listdir(path.parent)
    gdn.save_pool(path, pool.free(3))
    assert list(gdn.load_pool(path, CFG).used) == [0, 2, 4]


def test_what_is_not_a_pool(path) -> None:
    assert_refused(lambda: gdn.save_pool(path, gdn.init_state(CFG)), "save_pool", "StatePool")  # pyright: ignore[reportArgumentType]
    assert_refused(lambda: gdn.load_pool(path, None), "load_pool", "GDNConfig")  # pyright: ignore[reportArgumentType]
    gdn.save_state(path, gdn.init_state(CFG), CFG)
    refused(path, "not a pool file", "gdn_jax.save_pool")
    gdn.save_pool(path, live())
    call = lambda: gdn.load_state(path, CFG)  # noqa: E731
    assert_refused(call, "not a state file", error=gdn.StateFileError)


@pytest.mark.parametrize("keep", [0, 8, 300, -1])
def test_truncated_or_missing(path, keep: int) -> None:
    refused(path, "no such file")
    gdn.save_pool(path, live())
    path.write_bytes(path.read_bytes()[:keep])
    refused(path, "truncated or not a safetensors file")


@pytest.mark.parametrize("place", [-1, -1000, -20000])
def test_one_flipped_bit(path, place: int) -> None:
    gdn.save_pool(path, live())
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    refused(path, "altered since it was written")


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(gdn.GDNConfig)])
def test_another_configuration(path, field: str) -> None:
    gdn.save_pool(path, live())
    other = dataclasses.replace(CFG, **{field: getattr(CFG, field) * 2})
    refused(path, "written for", f'"{field}": {getattr(CFG, field)}', "needed", cfg=other)


def test_files_whose_parts_do_not_fit_each_other(path) -> None:
    gdn.save_pool(path, live())
    arrays, metadata = read(path)
    S, hist, table = arrays["S"], arrays["conv_hist"], arrays["generation"]
    nan = S.copy()
    nan[1, 2] = np.nan
    for changed, said in [
        ({"generation": table + 1}, ("S has shape (3, 4, 4, 16, 8)", "n=2")),
        ({"S": S[:, :3], "conv_hist": hist[:, :3]}, ("S has shape (3, 3, 4, 16, 8)", "n=4")),
        ({"conv_hist": hist[:2]}, ("conv_hist has shape (2, 4, 3, 96)", "L=3")),
        ({"S": np.swapaxes(S, -1, -2)}, ("S has shape (3, 4, 4, 8, 16)", "K=16, V=8")),
        ({"S": S.astype(np.float16)}, ("S has", "float16", "float32")),
        ({"turn": arrays["turn"][1:]}, ("turn has shape (5,)", "N=6")),
        ({"generation": table.astype(np.int64)}, ("generation has", "int64", "int32")),
        ({"generation": table.reshape(2, 3)}, ("generation has shape (2, 3)",)),
        ({"generation": table[:0], "turn": table[:0]}, ("num_slots is 0",)),
        ({"S": S[:0], "conv_hist": hist[:0]}, ("num_layers is 0",)),
        ({"S": nan}, ("S[1, 2, 0, 0, 0] is nan", "finite")),
    ]:
        craft(path, {n: x.copy() for n, x in (arrays | changed).items()}, metadata)
        refused(path, *said)
    craft(path, arrays, metadata | {"version": "2"})
    refused(path, "format version 2", "needed 1")
    craft(path, {n: arrays[n] for n in NAMES[:3]}, metadata)
    refused(path, "not a pool file")


KILLED = """
import os, resource, shutil, signal, sys, time
import gdn_jax as gdn


def save(path, donor, byte, ready):
    pool = gdn.load_pool(donor, gdn.PRESETS["tiny"])
    os.write(ready, b"!")
    if byte is None:
        while True:
            gdn.save_pool(path, pool)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (byte, byte))
    gdn.save_pool(path, pool)


path, donor, *deaths = sys.argv[1:]
for i, death in enumerate(deaths):
    kind, number = death.split(":")
    started, ready = os.pipe()
    child = os.fork()
    if child == 0:
        save(path, donor, int(number) if kind == "byte" else None, ready)
        os._exit(0)
    os.close(ready)
    os.read(started, 1)
    if kind == "after":
        time.sleep(float(number))
        os.kill(child, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    shutil.copy(path, f"{path}.{i}")
"""
"""Saves the donor's pool over ``path`` once for every death, and dies of it: when the file being
written passes a byte, or after some seconds of saving in a loop."""


@pytest.mark.skipif(sys.platform == "win32", reason="dies by POSIX signals")
def test_a_save_that_dies_leaves_the_old_file_good(path, tmp_path) -> None:
    donor = tmp_path / "donor.safetensors"
    old, new = live(0), live(1)
    gdn.save_pool(path, old)
    gdn.save_pool(donor, new)
    rng = np.random.default_rng()
    size = donor.stat().st_size
    places = [0, 1, *rng.integers(2, size - 1, 2).tolist(), size - 1]
    deaths = [f"byte:{b}" for b in places] + [f"after:{s:.4f}" for s in rng.uniform(0, 0.03, 3)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, path, donor, *deaths],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes = [int(line) for line in done.stdout.split()]
    assert codes == [-signal.SIGXFSZ] * len(places) + [-signal.SIGKILL] * 3, deaths
    for i, death in enumerate(deaths):
        found = gdn.load_pool(f"{path}.{i}", CFG)
        written = found.S[0, 0, 0, 0, 0] == new.S[0, 0, 0, 0, 0]
        assert not (written and death.startswith("byte")), death
        assert_same_pool(found, new if written else old)
