"""Run as ``python -m gdn_jax.bench.peers.fla_chunk REQUEST RESULT``; needs torch, a GPU and fla.

REQUEST has one period of q, k and v, which is repeated, as bits of bfloat16; gates, a state, and
lengths. RESULT has for each length some outputs, the state, the seconds of a call (least, median
and most), how they were measured, and the bytes held; or why it failed.
"""

import importlib
import sys
from typing import Any

import numpy as np

from gdn_jax.bench.slope import slope


def main(request: str, result: str) -> None:
    """Answer one request."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA GPU")
    operator = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    asked = dict(np.load(request))
    answer: dict[str, Any] = {}
    for T in asked["tokens"].tolist():
        try:
            with torch.no_grad():
                found = _answer(torch, operator, asked, T)
        except Exception as error:  # one length that fails must not cost the others their results
            said = (str(error).strip().splitlines() or [""])[0][:200]
            found = {"failed": np.array(f"{type(error).__name__}: {said}")}
        answer |= {f"{name}{T}": value for name, value in found.items()}
    np.savez(result, allow_pickle=False, **answer)


def _answer(torch: Any, operator: Any, asked: dict[str, np.ndarray], T: int) -> dict[str, Any]:
    at = torch.arange(T, device="cuda") % len(asked["q"])
    rows = (torch.from_numpy(asked[n]).view(torch.bfloat16).cuda() for n in ("q", "k", "v"))
    q, k, v = (x[at][None] for x in rows)
    g, beta = (torch.from_numpy(asked[n][:T]).cuda()[None] for n in ("g", "beta"))
    S = torch.from_numpy(asked["S"]).cuda()
    torch.cuda.reset_peak_memory_stats()

    def one() -> Any:
        return operator(q, k, v, g=g, beta=beta, initial_state=S, output_final_state=True)

    # A few calls, in which the operator chooses among its kernels, before one is recorded.
    for _ in range(2):
        one()
    o, after = one()
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated()
    run, how = _recorded(torch, one)
    timing = slope(
        lambda _: run(),
        None,
        repetitions=int(asked["repetitions"]),
        wait=lambda _: torch.cuda.synchronize(),
    )
    ends = torch.from_numpy(asked[f"ends{T}"]).cuda()
    found = {"o": o[0, ends].float().cpu().numpy(), "S": after.float().cpu().numpy()}
    found["seconds"] = np.array([timing.low, timing.median, timing.high])
    return found | {"how": np.array(how), "held": np.array(held)}


def _recorded(torch: Any, one: Any) -> tuple[Any, str]:
    """What to call for one call on the device: a CUDA graph, or the operator if that fails."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = one()
    except Exception as error:  # an operator may do on the host what a graph cannot have
        torch.cuda.synchronize()
        return one, f"call by call, as a graph fails with {type(error).__name__}"

    def replay() -> Any:
        graph.replay()
        return kept

    return replay, "as a CUDA graph"


if __name__ == "__main__":
    main(*sys.argv[1:])
