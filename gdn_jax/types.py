"""The letters in the shapes that docstrings and comments give.

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

__all__ = ["Array"]
