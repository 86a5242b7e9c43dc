"""What produced a result: versions, device, commit, date."""

import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("gdn-jax", "jax", "jaxlib", "numpy", "chex", "safetensors", "torch", "transformers")
_ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """Package versions, the default device, the source's commit and the UTC date."""
    device = jax.devices()[0]
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "backend": device.platform,
        "device": device.device_kind if device.platform != "cpu" else _cpu_name(),
        "device_count": jax.device_count(),
        "compute_capability": getattr(device, "compute_capability", None),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        names = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()} ({platform.system()})"


def _commit() -> str | None:
    """The commit of a checkout, with "+" when files differ, or the one that an archive records."""
    archival = _ROOT / ".git_archival.txt"
    if not archival.exists():
        return None
    recorded = re.search(r"node: ([0-9a-f]{7,40})", archival.read_text())
    if recorded:
        return recorded[1]
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()
