"""What generation says of the memory that loading took."""

from pathlib import Path

import numpy as np
import pytest

from gdn_jax.cli import host_memory
from gdn_jax.cli.host_memory import HostPeak


def test_memory_that_is_held_and_given_back_counts_and_a_mapped_file_does_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "weights"
    with open(file, "wb") as f:
        f.truncate(1 << 28)
    with HostPeak() as before:
        pass
    if before.bytes is None:
        pytest.skip("the system does not tell")
    with HostPeak() as mapped:
        assert np.memmap(file, np.uint8, "r").max() == 0
    with HostPeak() as held:
        assert np.ones(1 << 28, np.uint8).min() == 1
    assert mapped.bytes is not None
    assert held.bytes is not None
    assert mapped.bytes < before.bytes + (1 << 27)
    assert held.bytes > before.bytes + (1 << 27)


def test_nothing_is_said_where_nothing_is_known(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(host_memory, "_STATUS", tmp_path / "none")
    with HostPeak() as found:
        pass
    assert found.bytes is None
