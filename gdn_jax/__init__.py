"""Gated DeltaNet inference in JAX: pure functions over ``(S, conv_hist)``, verified to float64."""

import typing

from gdn_jax._core.backend import select_backend as select_backend
from gdn_jax._core.lazy import lazily as _lazily
from gdn_jax.config import PRESETS as PRESETS
from gdn_jax.config import GDNConfig as GDNConfig
from gdn_jax.errors import BackendUnavailableError as BackendUnavailableError
from gdn_jax.errors import CheckpointError as CheckpointError
from gdn_jax.errors import ConfigError as ConfigError
from gdn_jax.errors import DeviceMemoryError as DeviceMemoryError
from gdn_jax.errors import GDNError as GDNError
from gdn_jax.errors import GenerationError as GenerationError
from gdn_jax.errors import LayerNotResidentError as LayerNotResidentError
from gdn_jax.errors import OracleError as OracleError
from gdn_jax.errors import PoolFullError as PoolFullError
from gdn_jax.errors import PoolKeyError as PoolKeyError
from gdn_jax.errors import QuantizationError as QuantizationError
from gdn_jax.errors import ShapeError as ShapeError
from gdn_jax.errors import SlotError as SlotError
from gdn_jax.errors import StaleBindingError as StaleBindingError
from gdn_jax.errors import StateFileError as StateFileError
from gdn_jax.errors import TextError as TextError
from gdn_jax.errors import TierConflictError as TierConflictError
from gdn_jax.errors import UnknownNameError as UnknownNameError
from gdn_jax.layer.compose import decode as decode
from gdn_jax.layer.compose import decode_step as decode_step
from gdn_jax.layer.compose import prefill as prefill
from gdn_jax.layer.compose import trace_step as trace_step
from gdn_jax.layer.pallas import params_to_kernel as params_to_kernel
from gdn_jax.layer.params import GDNParams as GDNParams
from gdn_jax.layer.params import init_params as init_params
from gdn_jax.layer.state import GDNState as GDNState
from gdn_jax.layer.state import clone_state as clone_state
from gdn_jax.layer.state import export_state as export_state
from gdn_jax.layer.state import import_state as import_state
from gdn_jax.layer.state import init_state as init_state
from gdn_jax.layer.state import load_state as load_state
from gdn_jax.layer.state import reset_state as reset_state
from gdn_jax.layer.state import save_state as save_state
from gdn_jax.layer.trace import Trace as Trace
from gdn_jax.ops.causal_conv import causal_conv1d as causal_conv1d
from gdn_jax.ops.chunk import chunk_gated_delta_rule as chunk_gated_delta_rule
from gdn_jax.ops.delta_rule import recurrent_gated_delta_rule as recurrent_gated_delta_rule
from gdn_jax.quant.codecs import q4_from_gguf_blocks as q4_from_gguf_blocks
from gdn_jax.quant.codecs import q4_from_tiles as q4_from_tiles
from gdn_jax.quant.codecs import q4_to_gguf_blocks as q4_to_gguf_blocks
from gdn_jax.quant.codecs import q4_to_tiles as q4_to_tiles
from gdn_jax.quant.kernel_layout import Q4Kernel as Q4Kernel
from gdn_jax.quant.kernel_layout import from_kernel as from_kernel
from gdn_jax.quant.kernel_layout import to_kernel as to_kernel
from gdn_jax.quant.q4_matmul import q4_matmul as q4_matmul
from gdn_jax.quant.q4_pool import Q4Pool as Q4Pool
from gdn_jax.quant.q4array import Q4Array as Q4Array
from gdn_jax.quant.q4array import dequantize as dequantize
from gdn_jax.quant.quantize import quantize_q4 as quantize_q4
from gdn_jax.serving.bank import LayerBank as LayerBank
from gdn_jax.serving.files import load_pool as load_pool
from gdn_jax.serving.files import save_pool as save_pool
from gdn_jax.serving.pool import StatePool as StatePool
from gdn_jax.serving.prefix import Checkpoint as Checkpoint
from gdn_jax.serving.prefix import PrefixState as PrefixState
from gdn_jax.serving.prefix import PrefixStates as PrefixStates
from gdn_jax.serving.ragged import ragged_gated_delta_rule as ragged_gated_delta_rule
from gdn_jax.serving.shared import SharedPool as SharedPool

if typing.TYPE_CHECKING:
    from gdn_jax import models as models
    from gdn_jax.checkpoints.gguf_reader import load_gguf_layer as load_gguf_layer
    from gdn_jax.checkpoints.gguf_writer import write_gguf as write_gguf
    from gdn_jax.checkpoints.hf_layer import HFCheckpoint as HFCheckpoint
    from gdn_jax.checkpoints.hf_layer import load_hf_layer as load_hf_layer
else:
    __getattr__, __dir__, __all__ = _lazily(
        __name__,
        models="gdn_jax.models",
        load_gguf_layer="gdn_jax.checkpoints.gguf_reader",
        write_gguf="gdn_jax.checkpoints.gguf_writer",
        HFCheckpoint="gdn_jax.checkpoints.hf_layer",
        load_hf_layer="gdn_jax.checkpoints.hf_layer",
    )
