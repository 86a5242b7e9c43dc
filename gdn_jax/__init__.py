"""Gated DeltaNet inference in JAX: pure functions over ``(S, conv_hist)``, verified to float64."""

from gdn_jax import models
from gdn_jax._core.backend import select_backend
from gdn_jax.checkpoints.gguf_reader import load_gguf_layer
from gdn_jax.checkpoints.gguf_writer import write_gguf
from gdn_jax.checkpoints.hf_layer import HFCheckpoint, load_hf_layer
from gdn_jax.config import PRESETS, GDNConfig
from gdn_jax.errors import (
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    GDNError,
    GenerationError,
    LayerNotResidentError,
    OracleError,
    PoolFullError,
    PoolKeyError,
    QuantizationError,
    ShapeError,
    SlotError,
    StaleBindingError,
    StateFileError,
    TextError,
    TierConflictError,
    UnknownNameError,
)
from gdn_jax.layer.compose import decode, decode_step, prefill, trace_step
from gdn_jax.layer.pallas import params_to_kernel
from gdn_jax.layer.params import GDNParams, init_params
from gdn_jax.layer.state import (
    GDNState,
    clone_state,
    export_state,
    import_state,
    init_state,
    load_state,
    reset_state,
    save_state,
)
from gdn_jax.layer.trace import Trace
from gdn_jax.ops.causal_conv import causal_conv1d
from gdn_jax.ops.delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from gdn_jax.quant.codecs import (
    q4_from_gguf_blocks,
    q4_from_tiles,
    q4_to_gguf_blocks,
    q4_to_tiles,
)
from gdn_jax.quant.kernel_layout import Q4Kernel, from_kernel, to_kernel
from gdn_jax.quant.matmul import q4_matmul
from gdn_jax.quant.q4_pool import Q4Pool
from gdn_jax.quant.q4array import Q4Array, dequantize
from gdn_jax.quant.quantize import quantize_q4
from gdn_jax.serving.bank import LayerBank
from gdn_jax.serving.files import load_pool, save_pool
from gdn_jax.serving.pool import StatePool
from gdn_jax.serving.prefix import Checkpoint, PrefixStates
from gdn_jax.serving.shared import SharedPool

__all__ = [
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
    "recurrent_gated_delta_rule",
    "reset_state",
    "save_pool",
    "save_state",
    "select_backend",
    "to_kernel",
    "trace_step",
    "write_gguf",
]
