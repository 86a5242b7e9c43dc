"""One Gated DeltaNet layer of ``transformers``, every operator read out: function and script.

The script runs in whatever environment holds torch and transformers, so this file imports nothing
of the package and keeps to Python 3.11::

    python transformers_forward.py REQUEST.safetensors RESULT.safetensors

REQUEST holds float32 weights under the field names of GDNParams and ``xs`` [T, D], with the
metadata ``architecture`` and ``config`` (the fields of GDNConfig as JSON). RESULT holds what
:func:`forward` returns, with the package versions as metadata.
"""

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

ARCHITECTURES = {
    "qwen3_5": ("Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig"),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", "Qwen3NextConfig"),
}
"""``transformers`` model -> its layer and its configuration class."""

ONE_SHOT = "one_shot."
"""Prefix of the one-shot path's entries."""

_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
_RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")


class ForwardError(RuntimeError):
    """The layer cannot be run here; one line says what was found and what is needed."""


def forward(
    weights: Mapping[str, np.ndarray],
    sizes: Mapping[str, Any],
    xs: np.ndarray,
    architecture: str,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Run the layer in float32 on the CPU, on its pure PyTorch path, from a zero state.

    Args:
        weights: float32 arrays under the field names of GDNParams.
        sizes: the fields of GDNConfig.
        xs: float32 [T, D], one sequence.
        architecture: a key of ARCHITECTURES.

    Returns:
        The read-back of the cached path, token by token, [T, ..] under the names of
        :class:`gdn_jax.Trace`, but S [HV, K, V] and HIST [W-1, C] only after the last token; OUT,
        S and HIST of one call over all tokens, their names prefixed with ``one_shot.``; and the
        versions of torch and transformers. The module's first cached token takes its chunked
        code, as do all tokens of the one call; the later ones take its recurrent code. Q is
        scaled by ``K**-0.5`` here, since the module does that between two hooks.

    Raises:
        ForwardError: torch or transformers is missing, of an unknown build, or has a compiled
            kernel where its PyTorch code should be.
    """
    torch, transformers = _load("torch"), _load("transformers")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    modelling = _load(f"transformers.models.{architecture}.modeling_{architecture}")
    layer_name, config_name = ARCHITECTURES[architecture]
    config = getattr(transformers, config_name)(
        hidden_size=sizes["d_model"],
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=sizes["num_k_heads"],
        linear_num_value_heads=sizes["num_v_heads"],
        linear_key_head_dim=sizes["head_k_dim"],
        linear_value_head_dim=sizes["head_v_dim"],
        linear_conv_kernel_dim=sizes["conv_width"],
        rms_norm_eps=sizes["norm_eps"],
    )
    with torch.device("meta"):
        layer = getattr(modelling, layer_name)(config, layer_idx=0)
    named = _module_weights(weights, sizes, architecture)
    tensors = {name: torch.from_numpy(_owned(x)) for name, x in named.items()}
    layer.load_state_dict(tensors, assign=True)
    layer.eval()

    def run(spans: list[np.ndarray]) -> dict[str, np.ndarray]:
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad(), _recording(modelling, layer, sizes) as seen:
            for span in spans:
                layer(torch.from_numpy(span)[None], cache_params=cache)
        trace = {
            name: np.concatenate([x[-len(s) :] for x, s in zip(parts, spans, strict=True)])
            for name, parts in seen.items()
        }
        frames = cache.layers[0].conv_states[0][0, :, 1 - sizes["conv_width"] :]
        return trace | {"S": _copy(cache.layers[0].recurrent_states[0][0]), "HIST": _copy(frames.T)}

    xs = _owned(xs)
    cached, whole = run(list(xs[:, None])), run([xs])
    return cached | {ONE_SHOT + name: whole[name] for name in ("OUT", "S", "HIST")}, versions


@contextlib.contextmanager
def _recording(
    modelling: Any, layer: Any, sizes: Mapping[str, Any]
) -> Iterator[dict[str, list[np.ndarray]]]:
    """Collect what each call of ``layer`` computes: name -> one [tokens, ..] array a call.

    The convolution's frames may start with earlier ones or padding; the caller trims them.
    """
    HK, HV = sizes["num_k_heads"], sizes["num_v_heads"]
    K, V = sizes["head_k_dim"], sizes["head_v_dim"]
    groups = HV // HK
    seen: dict[str, list[np.ndarray]] = defaultdict(list)

    def keep(name: str, value: Any, *shape: int) -> None:
        seen[name].append(_copy(value.reshape(-1, *shape)))

    def convolution(original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(frames: Any, *args: Any, **kwargs: Any) -> Any:
            keep("XC", frames[0].T, frames.shape[1])
            out = original(frames, *args, **kwargs)
            keep("XCV", out[0].T, out.shape[1])
            return out

        return recorded

    def l2norm(original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            heads = out[0, ::groups].transpose(0, 1)
            if len(seen["Q"]) == len(seen["K"]):
                keep("Q", heads * K**-0.5, HK, K)
            else:
                keep("K", heads, HK, K)
            return out

        return recorded

    def rule(original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
            keep("G", g, HV)
            keep("BETA", beta, HV)
            out, S = original(*args, g=g, beta=beta, **kwargs)
            keep("ON", out, HV, V)
            return out, S

        return recorded

    def gate(_: Any, args: tuple[Any, ...], out: Any) -> None:
        keep("Z", args[1], HV * V)
        keep("ONN", out, HV, V)

    def fused(_: Any, args: tuple[Any, ...], out: Any) -> None:
        b, a = out.reshape(-1, HK, 2, groups).unbind(2)
        keep("B", b, HV)
        keep("A", a, HV)

    hooks = {"norm": gate, "out_proj": lambda _, args, out: keep("OUT", out, out.shape[-1])}
    if hasattr(layer, "in_proj_ba"):
        hooks["in_proj_ba"] = fused
    else:
        hooks["in_proj_b"] = lambda _, args, out: keep("B", out, HV)
        hooks["in_proj_a"] = lambda _, args, out: keep("A", out, HV)

    wrappers = {name: convolution(_pure(modelling, name)) for name in _CONVOLUTIONS}
    wrappers |= {name: rule(_pure(modelling, name)) for name in _RULES}
    wrappers["l2norm"] = l2norm(_pure(modelling, "l2norm"))
    with contextlib.ExitStack() as stack:
        for name, hook in hooks.items():
            handle = getattr(layer, name).register_forward_hook(hook)
            stack.callback(handle.remove)
        for name, wrapper in wrappers.items():
            stack.enter_context(patch.object(modelling, name, wrapper))
        yield seen


def _module_weights(
    weights: Mapping[str, np.ndarray], sizes: Mapping[str, Any], architecture: str
) -> dict[str, np.ndarray]:
    """The module's parameters; Qwen3-Next fuses four projections by key head."""
    w = dict(weights)
    named = {
        "conv1d.weight": w["conv_weight"][:, None],
        "A_log": w["A_log"],
        "dt_bias": w["dt_bias"],
        "norm.weight": w["norm_weight"],
        "out_proj.weight": w["out_proj"],
    }
    if architecture == "qwen3_5":
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return named | {f"{name}.weight": w[name] for name in names}
    HK, D = sizes["num_k_heads"], sizes["d_model"]
    key_dim = HK * sizes["head_k_dim"]

    def fuse(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([x.reshape(HK, -1, D) for x in parts], axis=1).reshape(-1, D)

    q, k, v = np.split(w["in_proj_qkv"], [key_dim, 2 * key_dim])
    named["in_proj_qkvz.weight"] = fuse(q, k, v, w["in_proj_z"])
    named["in_proj_ba.weight"] = fuse(w["in_proj_b"], w["in_proj_a"])
    return named


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ForwardError(
            f"{name} cannot be imported ({error}); needed torch>=2.9 and transformers>=5.17,<6"
        ) from None


def _pure(modelling: Any, name: str) -> Callable[..., Any]:
    """The module's own PyTorch function, under any wrapper that would choose a compiled kernel."""
    function = inspect.unwrap(getattr(modelling, name, None))  # pyright: ignore[reportArgumentType]
    if getattr(function, "__globals__", None) is not vars(modelling):
        raise ForwardError(
            f"{modelling.__name__}.{name} is {function!r}; needed the PyTorch function of "
            "transformers>=5.17,<6, imported under USE_HUB_KERNELS=0"
        )
    return function


def _owned(x: np.ndarray) -> np.ndarray:
    """A float32 array that torch may share: contiguous and writable."""
    return np.require(x, np.float32, ["C", "W"])


def _copy(tensor: Any) -> np.ndarray:
    return np.array(tensor.detach().numpy(), dtype=np.float32, order="C")


def main(request: str, result: str) -> None:
    """Answer one request file."""
    os.environ["USE_HUB_KERNELS"] = "0"
    with safe_open(request, framework="numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    xs = tensors.pop("xs")
    sizes = json.loads(metadata["config"])
    entries, versions = forward(tensors, sizes, xs, metadata["architecture"])
    save_file(entries, result, versions)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ForwardError as error:
        sys.exit(str(error))
