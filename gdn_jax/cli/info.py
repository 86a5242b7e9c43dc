"""What ``gdn-jax info`` tells: devices, versions, presets, backends."""

import dataclasses
import json
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from gdn_jax._core.backend import OPS, choose
from gdn_jax._core.environment import environment
from gdn_jax._core.files import write_atomically
from gdn_jax.config import PRESETS, GDNConfig
from gdn_jax.layer.params import init_params
from gdn_jax.layer.state import init_state
from gdn_jax.report.render import table


def layer_bytes(cfg: GDNConfig) -> dict[str, int]:
    """Bytes of one float32 layer: its weights, its state, and what a token must move.

    A token reads every weight once and reads and writes S and the history once.
    """
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), cfg))
    state = jax.eval_shape(lambda: init_state(cfg))
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return {"weights": weights, "state": held, "token": weights + 2 * held}


def collect() -> dict[str, Any]:
    """Everything ``info`` shows, as JSON-ready data."""
    presets = [
        {"preset": name, **dataclasses.asdict(cfg), **layer_bytes(cfg)}
        for name, cfg in PRESETS.items()
    ]
    backends = [
        {
            "operator": op,
            "takes": chosen.backend,
            "others": {"pallas": chosen.reason} if chosen.reason else {},
        }
        for op in OPS
        for chosen in [choose(op)]
    ]
    return {
        "environment": environment(),
        "devices": [f"{d.id}: {d.platform} {d.device_kind}" for d in jax.devices()],
        "presets": presets,
        "backends": backends,
    }


def render(found: dict[str, Any], out: Console) -> None:
    """Print the result of :func:`collect`."""
    versions = table("Versions", "package", "version")
    for name, version in found["environment"]["versions"].items():
        versions.add_row(name, version)
    devices = table("Devices", "device")
    for device in found["devices"]:
        devices.add_row(device)
    columns = ("preset", "D", "HK", "HV", "K", "V", "W", "weights", "state", "a token moves")
    presets = table("Presets, one float32 layer, MiB", *columns, right=9)
    sizes = [f.name for f in dataclasses.fields(GDNConfig) if f.name != "norm_eps"]
    for row in found["presets"]:
        mib = [f"{row[name] / 2**20:.2f}" for name in ("weights", "state", "token")]
        presets.add_row(row["preset"], *(str(row[name]) for name in sizes), *mib)
    backends = table("Backends", "operator", "takes", "why not another")
    for row in found["backends"]:
        why = "; ".join(f"{name}: {reason}" for name, reason in row["others"].items())
        backends.add_row(row["operator"], row["takes"], Text(why))
    for made in (versions, devices, presets, backends):
        out.print(made)


def write_json(path: str, found: dict[str, Any]) -> None:
    """Write the result of a command to a file, atomically."""
    write_atomically(path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
