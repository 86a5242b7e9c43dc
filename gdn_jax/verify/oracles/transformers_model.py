"""A whole model of ``transformers``, read out layer by layer: a script.

It runs in whatever environment holds torch and transformers, so this file imports nothing of the
package and keeps to Python 3.11::

    python transformers_model.py REQUEST.safetensors RESULT.safetensors

REQUEST holds ``ids`` int32 [T], with the checkpoint's ``directory`` as metadata. RESULT holds, in
float32, ``hidden`` [L + 1, T, D], what goes into every layer and what comes out of the last one,
before the last norm, and ``logits`` [T, vocab]; the package versions are its metadata.
"""

import os
import sys
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file


def forward(directory: str, ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Run the checkpoint over all tokens at once, in float32 on the CPU, without compiled kernels.

    Returns:
        The tensors and the metadata of RESULT.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    layers, seen = model.get_decoder().layers, []

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(_copy(args[0] if args else kwargs["hidden_states"]))

    def leave(_: Any, __: tuple[Any, ...], out: Any) -> None:
        seen.append(_copy(out[0] if isinstance(out, tuple) else out))

    for layer in layers:
        layer.register_forward_pre_hook(enter, with_kwargs=True)
    layers[-1].register_forward_hook(leave)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"hidden": np.stack(seen), "logits": _copy(logits)}, versions


def _copy(tensor: Any) -> np.ndarray:
    """The only row of a batch."""
    return np.array(tensor.detach()[0].numpy(), dtype=np.float32, order="C")


def main(request: str, result: str) -> None:
    """Answer one request file."""
    os.environ["USE_HUB_KERNELS"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    with safe_open(request, framework="numpy") as file:
        directory, ids = file.metadata()["directory"], file.get_tensor("ids")
    entries, versions = forward(directory, ids)
    save_file(entries, result, versions)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ImportError as error:
        needed = "needed torch>=2.9 and transformers>=5.17,<6"
        sys.exit(f"{error.name} cannot be imported ({error}); {needed}")
