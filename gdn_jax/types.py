"""Dimensions and the array aliases built from them.

======  =====================================================  ============
symbol  meaning                                                Qwen3.5-27B
======  =====================================================  ============
B, T    sequences (batch), tokens
D       model width                                            5120
HK      key/query heads                                        16
HV      value heads, a multiple of HK                          48
K, V    widths of a key head and of a value head               128, 128
W       convolution width                                      4
C       convolved channels 2·HK·K + HV·V, in the order q,k,v   10240
L       Gated DeltaNet layers                                  48
======  =====================================================  ============

The value head ``h`` reads the key head ``h // (HV // HK)``.
"""

from jax import Array
from jaxtyping import Float, Float32

Tokens = Float[Array, "B T D"]
Token = Float[Array, "B D"]
Recurrent = Float32[Array, "*B HV K V"]
History = Float32[Array, "*B W-1 C"]

__all__ = ["Array", "History", "Recurrent", "Token", "Tokens"]
