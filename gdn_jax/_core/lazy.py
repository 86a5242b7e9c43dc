"""Names of a package whose modules are imported when they are first asked for (PEP 562)."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def lazily(
    package: str, **modules: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose other names are set already.

    Args:
        package: its ``__name__``.
        modules: the module to import for each name, or ``package.name``, which is itself the value.

    Raises:
        ImportError: from ``__getattr__``, when the module needs a package that is not installed.
    """
    present = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(modules[name])
        except ModuleNotFoundError as error:
            needed = f"{package}.{name} needs the package {error.name}"
            raise ImportError(f"{needed}; not installed (pip install {error.name})") from error
        present[name] = module if modules[name] == f"{package}.{name}" else getattr(module, name)
        return present[name]

    def listed() -> list[str]:
        return sorted({*present, *modules})

    public = {
        name
        for name, value in present.items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    return get, listed, sorted(public | modules.keys())
