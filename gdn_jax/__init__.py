"""Gated DeltaNet inference in JAX: pure functions over ``(S, conv_hist)``, verified to float64."""

from gdn_jax.backend import select_backend
from gdn_jax.bank import LayerBank
from gdn_jax.config import PRESETS, GDNConfig
from gdn_jax.delta_rule import causal_conv1d, recurrent_gated_delta_rule
from gdn_jax.errors import (
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    GDNError,
    LayerNotResidentError,
    OracleError,
    ShapeError,
    StateFileError,
)
from gdn_jax.layer import decode, decode_step, trace_step
from gdn_jax.params import GDNParams, init_params
from gdn_jax.state import (
    GDNState,
    clone_state,
    export_state,
    import_state,
    init_state,
    load_state,
    reset_state,
    save_state,
)
from gdn_jax.trace import Trace

__all__ = [
    "PRESETS",
    "BackendUnavailableError",
    "CheckpointError",
    "ConfigError",
    "GDNConfig",
    "GDNError",
    "GDNParams",
    "GDNState",
    "LayerBank",
    "LayerNotResidentError",
    "OracleError",
    "ShapeError",
    "StateFileError",
    "Trace",
    "causal_conv1d",
    "clone_state",
    "decode",
    "decode_step",
    "export_state",
    "import_state",
    "init_params",
    "init_state",
    "load_state",
    "recurrent_gated_delta_rule",
    "reset_state",
    "save_state",
    "select_backend",
    "trace_step",
]
