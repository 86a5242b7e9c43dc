"""What this package can run on the present device."""

KERNELS: frozenset[str] = frozenset()
"""Operators that have a kernel."""


def unavailable_reason(op: str) -> str | None:
    """Why no kernel runs ``op`` here, in one sentence that says what would; None when one does."""
    if op not in KERNELS:
        return f"there is no Pallas kernel for {op} in this version; backend='xla' runs it"
    return None
