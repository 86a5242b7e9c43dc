"""Other implementations: their names, whether they are installed, and how they are called."""

import dataclasses
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gdn_jax.errors import BackendUnavailableError


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another implementation, which runs in this process or in one of its own.

    Attributes:
        name: the ``backend`` of its rows.
        distribution: the package whose version a row names.
        modules: the modules that must be importable.
    """

    name: str
    distribution: str
    modules: tuple[str, ...]

    def require(self) -> None:
        """Raise BackendUnavailableError where a module is not installed."""
        lacking = [name for name in self.modules if importlib.util.find_spec(name) is None]
        if lacking:
            raise BackendUnavailableError(f"no {' and no '.join(lacking)} here")

    @property
    def title(self) -> str:
        """Its distribution and version."""
        try:
            version = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        return f"{self.distribution} {version}"

    def fault(self, said: str | Exception) -> BackendUnavailableError:
        """The error for the peer's own failure: its row is listed as not run; no check fails."""
        if isinstance(said, Exception):
            first = (str(said).strip().splitlines() or [""])[0][:200]
            said = f"{type(said).__name__}: {first}"
        return BackendUnavailableError(f"{self.name}: {said}")


JLA = Peer("jla", "jax-linear-attention", ("jla",))
FLA = Peer("fla", "flash-linear-attention", ("torch", "fla"))
PEERS = (JLA, FLA)
"""Every peer, in the order of the columns that compare with them."""


def ask(script: str, inputs: Mapping[str, np.ndarray], timeout: float) -> dict[str, np.ndarray]:
    """The result of ``python -m gdn_jax.bench.peers.<script> REQUEST RESULT`` for these arrays.

    Raises:
        BackendUnavailableError: the script fails, with the last line that it wrote, or takes longer
            than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="gdn-jax-peer-") as folder:
        request, result = Path(folder, "request.npz"), Path(folder, "result.npz")
        np.savez(request, allow_pickle=False, **inputs)
        command = [sys.executable, "-m", f"{__package__}.{script}", str(request), str(result)]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise BackendUnavailableError(f"took longer than {timeout} s") from None
        if run.returncode or not result.is_file():
            said = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
            raise BackendUnavailableError(said[-1])
        with np.load(result) as file:
            return dict(file)
