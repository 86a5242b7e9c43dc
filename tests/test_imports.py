"""What ``import gdn_jax`` needs, and what waits until it is asked for."""

import subprocess
import sys

import pytest

import gdn_jax

WAITING = ("gdn_jax.models", "gdn_jax.checkpoints", "gdn_jax.verify", "gdn_jax.cli")
OPTIONAL = ("tokenizers", "jinja2", "gguf", "safetensors", "rich", "click", "huggingface_hub")
"""Packages of the parts that read files, take text, and print."""

BLOCKED = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_imports_nothing_that_waits() -> None:
    loaded = run("import gdn_jax, sys; print(*sys.modules)").split()
    assert not {*WAITING, *OPTIONAL} & set(loaded)


def test_a_layer_runs_without_the_other_packages() -> None:
    out = run(
        BLOCKED
        + """
import jax, gdn_jax as gdn

cfg = gdn.PRESETS["tiny"]
params, state = gdn.init_params(jax.random.key(0), cfg), gdn.init_state(cfg)
y, state = gdn.decode_step(params, state, jax.numpy.ones((1, cfg.d_model)), cfg)
print(y.shape == (1, cfg.d_model) and bool(jax.numpy.isfinite(y).all()))
for name in ("load_hf_layer", "load_gguf_layer", "models"):
    try:
        getattr(gdn, name)
    except ImportError as error:
        print(error)
try:
    gdn.save_state("unwritten", state, cfg)
except ImportError as error:
    print(error)
"""
    )
    assert out.splitlines() == [
        "True",
        "gdn_jax.load_hf_layer needs the package safetensors; not installed "
        "(pip install safetensors)",
        "gdn_jax.load_gguf_layer needs the package gguf; not installed (pip install gguf)",
        "gdn_jax.models needs the package safetensors; not installed (pip install safetensors)",
        "No module named 'safetensors'",
    ]


@pytest.mark.parametrize(
    "program",
    [
        "import gdn_jax.models; print(gdn_jax.models.__name__)",
        "from gdn_jax import *; print(models.__name__)",
    ],
)
def test_every_way_to_the_models(program: str) -> None:
    assert run(program) == "gdn_jax.models\n"


def test_names_that_wait_are_listed_and_are_themselves() -> None:
    from gdn_jax.checkpoints import gguf_reader, gguf_writer, hf_layer

    assert {"models", "load_hf_layer", "decode_step"} <= set(dir(gdn_jax))
    assert gdn_jax.load_hf_layer is hf_layer.load_hf_layer
    assert gdn_jax.HFCheckpoint is hf_layer.HFCheckpoint
    assert gdn_jax.load_gguf_layer is gguf_reader.load_gguf_layer
    assert gdn_jax.write_gguf is gguf_writer.write_gguf


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'gdn_jax' has no attribute 'decode_stp'"):
        gdn_jax.decode_stp  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
