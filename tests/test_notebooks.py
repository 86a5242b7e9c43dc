"""The notebooks: the halves of each pair agree, and every cell runs.

``python tests/test_notebooks.py`` writes every .ipynb anew from its percent script, outputs
included. The kernel is the current interpreter, on the CPU, whatever kernels are installed.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jupytext
import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
RENEW = "`python tests/test_notebooks.py` writes it anew from the script"
MAX_BYTES = 400_000


@contextlib.contextmanager
def kernel() -> Iterator[Callable[[Path], nbformat.NotebookNode]]:
    """Executes percent scripts in one process, each without the names of those before it."""
    with tempfile.TemporaryDirectory() as home:
        manager = AsyncKernelManager(
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            transport="ipc",
            connection_file=f"{home}/kernel.json",
        )
        fixed = {"MPLBACKEND": "", "JAX_PLATFORMS": "cpu", "IPYTHONDIR": home}

        def execute(script: Path) -> nbformat.NotebookNode:
            """The notebook with its outputs; the first failing cell raises."""
            nb = jupytext.read(script)
            forget = [nbformat.v4.new_code_cell("%reset -f")] * manager.has_kernel
            nb.cells[:0] = forget
            client = NotebookClient(
                nb,
                km=manager,
                resources={"metadata": {"path": str(FOLDER)}},
                record_timing=False,
                timeout=300,
                coalesce_streams=True,
            )
            try:
                client.execute(env=os.environ | fixed, cleanup_kc=False)
            finally:
                if client.kc is not None:
                    client.kc.stop_channels()
            del nb.cells[: len(forget)]
            return nb

        try:
            yield execute
        finally:
            run_sync(manager.shutdown_kernel)(now=True)


def renew(script: Path) -> None:
    """Write the .ipynb of a script: the same bytes for the same cells and results."""
    with kernel() as execute:
        nb = execute(script)
    del nb.metadata["language_info"], nb.metadata["jupytext"]["text_representation"]
    for number, cell in enumerate(nb.cells):
        cell.id = f"cell-{number}"
    nbformat.write(nb, script.with_suffix(".ipynb"))


def outputs(nb: nbformat.NotebookNode) -> list[list[str]]:
    """Per code cell, the kinds of its outputs; numbers and pixels may differ between machines."""
    return [
        [f"{o.output_type} {o.get('name') or sorted(o.get('data', ()))}" for o in cell.outputs]
        for cell in nb.cells
        if cell.cell_type == "code"
    ]


def test_every_notebook_is_a_pair():
    stored = sorted(FOLDER.glob("*.ipynb"))
    assert SCRIPTS
    assert [path.stem for path in stored] == [path.stem for path in SCRIPTS], RENEW


@pytest.fixture(scope="module")
def execute() -> Iterator[Callable[[Path], nbformat.NotebookNode]]:
    with kernel() as found:
        yield found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
class TestNotebook:
    def test_halves_agree(self, script: Path):
        ours = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
        stored = jupytext.read(script.with_suffix(".ipynb")).cells
        message = f"{RENEW}; edited in Jupyter: `jupytext --sync notebooks/{script.name}` first"
        assert [(cell.cell_type, cell.source) for cell in stored] == ours, message

    def test_stored_form_is_small_and_without_traces_of_a_run(self, script: Path):
        path = script.with_suffix(".ipynb")
        assert path.stat().st_size < MAX_BYTES
        nb = nbformat.read(path, as_version=4)
        assert set(nb.metadata) <= {"jupytext", "kernelspec"}, RENEW
        assert not [cell.id for cell in nb.cells if "execution" in cell.metadata], RENEW
        printed = "".join(o.get("text", "") for cell in nb.cells for o in cell.get("outputs", ()))
        here = (str(Path.home()), str(script.parents[1]), tempfile.gettempdir())
        assert not [part for part in here if part in printed]

    @pytest.mark.slow
    def test_runs_from_top_to_bottom(
        self, script: Path, execute: Callable[[Path], nbformat.NotebookNode]
    ):
        fresh = outputs(execute(script))
        assert "stream stderr" not in [kind for kinds in fresh for kind in kinds]
        stored = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
        assert outputs(stored) == fresh, RENEW


if __name__ == "__main__":
    for path in SCRIPTS:
        renew(path)
