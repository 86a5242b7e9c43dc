"""What the package offers, and which module may import which."""

import ast
import inspect
from pathlib import Path

import pytest

import gdn_jax
import pallas_kernels

PUBLIC = [
    "PRESETS",
    "BackendUnavailableError",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "DeviceMemoryError",
    "GDNConfig",
    "GDNError",
    "GDNParams",
    "GDNState",
    "GenerationError",
    "HFCheckpoint",
    "LayerBank",
    "LayerNotResidentError",
    "OracleError",
    "PoolFullError",
    "PoolKeyError",
    "PrefixState",
    "PrefixStates",
    "Q4Array",
    "Q4Kernel",
    "Q4Pool",
    "QuantizationError",
    "ShapeError",
    "SharedPool",
    "SlotError",
    "StaleBindingError",
    "StateFileError",
    "StatePool",
    "TextError",
    "TierConflictError",
    "Trace",
    "UnknownNameError",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "clone_state",
    "decode",
    "decode_step",
    "dequantize",
    "export_state",
    "from_kernel",
    "import_state",
    "init_params",
    "init_state",
    "load_gguf_layer",
    "load_hf_layer",
    "load_pool",
    "load_state",
    "models",
    "params_to_kernel",
    "prefill",
    "q4_from_gguf_blocks",
    "q4_from_tiles",
    "q4_matmul",
    "q4_to_gguf_blocks",
    "q4_to_tiles",
    "quantize_q4",
    "ragged_gated_delta_rule",
    "recurrent_gated_delta_rule",
    "reset_state",
    "save_pool",
    "save_state",
    "select_backend",
    "to_kernel",
    "trace_step",
    "write_gguf",
]

FLOORS = (
    ("types", "errors"),
    ("config",),
    ("oracle",),
    ("_core",),
    ("quant",),
    ("ops",),
    ("layer",),
    ("serving", "checkpoints"),
    ("models",),
    ("report",),
    ("verify",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
"""Folders and modules of the root, ground to roof: an import goes down, never up or across."""

ROOT = Path(gdn_jax.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"
}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def absolute_imports(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too, and names that may be modules."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


IMPORTS = {
    name: {i.removeprefix("gdn_jax.") for i in absolute_imports(path)} & set(FILES) - {name}
    for name, path in FILES.items()
}
"""Who imports whom inside gdn_jax."""


def test_the_list_of_public_names() -> None:
    assert sorted(vars(gdn_jax)["__all__"]) == sorted(PUBLIC)
    assert all(hasattr(gdn_jax, name) for name in PUBLIC)


def test_the_package_file_only_re_exports() -> None:
    """Each name once, as itself; of those that wait, type checkers see what the table names."""
    *eager, choice = tree(ROOT / "__init__.py").body[2:]
    assert isinstance(choice, ast.If)
    for node in [*eager, *choice.body]:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        assert all(a.asname in (a.name, "_lazily") for a in node.names), ast.unparse(node)
    (table,) = choice.orelse
    assert isinstance(table, ast.Assign)
    assert isinstance(table.value, ast.Call)
    waiting = {k.arg: ast.literal_eval(k.value) for k in table.value.keywords}
    seen = {a.name: node.module for node in choice.body for a in node.names}  # pyright: ignore[reportAttributeAccessIssue]
    assert waiting == {n: "gdn_jax.models" if n == "models" else seen[n] for n in seen}


@pytest.mark.parametrize("name", FILES)
def test_everything_public_is_described(name: str) -> None:
    """The module, its public functions and classes, and the public methods of those."""
    module = tree(FILES[name])
    lacking = [] if ast.get_docstring(module) else [name]
    waiting = [(node, name) for node in module.body]
    while waiting:
        node, where = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith(
            ("_", "tree_")
        ):
            continue
        if not ast.get_docstring(node):
            lacking.append(f"{where}.{node.name}")
        if isinstance(node, ast.ClassDef):
            waiting += [(child, f"{where}.{node.name}") for child in node.body]
    assert not lacking


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_take_no_stray_arguments(name: str) -> None:
    """No ``**kwargs`` that would swallow a typo."""
    function = getattr(gdn_jax, name)
    if callable(function) and not inspect.isclass(function):
        kinds = {p.kind for p in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_every_folder_has_its_floor() -> None:
    assert sorted(name for floor in FLOORS for name in floor) == sorted(
        {name.split(".")[0] for name in FILES}
    )


@pytest.mark.parametrize("name", FILES)
def test_no_import_climbs(name: str) -> None:
    floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    here = name.split(".")[0]
    for there in {other.split(".")[0] for other in IMPORTS[name]} - {here}:
        assert floor[there] < floor[here], f"{name} imports from {there}"


def test_imports_have_no_cycle() -> None:
    left = {name: set(imported) for name, imported in IMPORTS.items()}
    while left:
        free = {name for name, imported in left.items() if not imported & left.keys()}
        assert free, f"a cycle among {sorted(left)}"
        left = {name: imported for name, imported in left.items() if name not in free}


def test_the_steps_are_composed_in_one_place() -> None:
    users = {name for name, imported in IMPORTS.items() if "layer.steps" in imported}
    # A draft splits what it keeps, and its replay is one step; one step is timed by itself.
    assert users <= {"layer.compose", "serving.drafts", "bench.suites.prefill_layer"}


def test_kernels_are_imported_in_eight_places() -> None:
    assert {name for name, path in FILES.items() if asks_for_kernels(path)} == {
        "_core.backend",
        "quant.kernel_layout",
        "ops.causal_conv",
        "ops.chunk_pallas",
        "ops.delta_rule",
        "layer.pallas",
        "models.kernels",
        "bench.kernels",
    }


def asks_for_kernels(path: Path) -> bool:
    return any(name.split(".")[0] == "pallas_kernels" for name in absolute_imports(path))


def test_kernels_import_nothing_of_the_package() -> None:
    for path in Path(pallas_kernels.__file__).parent.rglob("*.py"):
        assert not [i for i in absolute_imports(path) if i.split(".")[0] == "gdn_jax"], path
