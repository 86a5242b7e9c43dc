"""Run: ``python -m gdn_jax.bench.peers.fla_recurrent REQUEST RESULT``; needs torch, fla and a GPU.

REQUEST has the operands of one token for each batch. RESULT has for each the output, the state, and
the seconds of one layer's call, measured with a CUDA graph over ``layers`` separate states.
"""

import importlib
import sys
from typing import Any

import numpy as np

from gdn_jax.bench.slope import slope

_STATE_BYTES = 1.1e9


def main(request: str, result: str) -> None:
    """Answer one request."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA GPU")
    operator = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    asked = np.load(request)
    layers, repetitions = (int(n) for n in asked["plan"])
    answer: dict[str, Any] = {}
    for batch in asked["batches"]:
        names = ("q", "k", "v", "g", "beta", "S")
        q, k, v, g, beta, S = (torch.from_numpy(asked[f"{n}{batch}"]).cuda() for n in names)
        count = min(layers, max(4, -int(-_STATE_BYTES // (2 * S.nbytes))))
        states = [S + layer for layer in range(count)]

        def one(S: Any, q=q, k=k, v=v, g=g, beta=beta) -> Any:
            return operator(q, k, v, g=g, beta=beta, initial_state=S, output_final_state=True)

        o, after = one(S)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [one(state) for state in states]
        timing = slope(
            lambda _, graph=graph: graph.replay(),
            None,
            per=count,
            repetitions=repetitions,
            wait=lambda _: torch.cuda.synchronize(),
        )
        answer[f"o{batch}"], answer[f"S{batch}"] = o.cpu().numpy(), after.cpu().numpy()
        answer[f"seconds{batch}"] = np.array([timing.low, timing.median, timing.high])
        del kept, graph, states
    np.savez(result, allow_pickle=False, **answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
