"""The directories of data/make_checkpoints.py, and ways to spoil a copy of one."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import gdn_jax as gdn
from tests.support.tools import assert_refused

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
LAYER = 2
Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Fixture:
    """A directory, what its config.json must be understood to say, and how it stores weights."""

    directory: str
    cfg: gdn.GDNConfig
    architecture: str
    linear: tuple[int, ...]
    prefix: str
    stored: Any


TEXT = Fixture(
    "qwen3_5-text", gdn.GDNConfig(32, 2, 4, 8, 12), "qwen3_5", (0, 1, 2), "model.", jnp.bfloat16
)
SHARDED = Fixture(
    "qwen3_5-sharded",
    gdn.GDNConfig(24, 2, 6, 8, 4),
    "qwen3_5",
    (0, 1, 2),
    "model.language_model.",
    jnp.float32,
)
NEXT = Fixture(
    "qwen3_next", gdn.GDNConfig(24, 3, 6, 8, 10), "qwen3_next", (0, 2), "model.", jnp.float16
)
FIXTURES = [pytest.param(f, id=f.directory) for f in (TEXT, SHARDED, NEXT)]


def tensor(fixture: Fixture, name: str) -> str:
    return f"{fixture.prefix}layers.{LAYER}.linear_attn.{name}"


def copy(fixture: Fixture, tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / fixture.directory, tmp_path / fixture.directory))


def edit_tensors(path: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads(path.read_text(encoding="utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), encoding="utf-8")


def refused(path: Path, *fragments: str, layer: Any = LAYER, **options: Any) -> None:
    def load() -> Any:
        return gdn.load_hf_layer(path, layer, **options)

    assert_refused(load, *fragments, error=gdn.CheckpointError)
