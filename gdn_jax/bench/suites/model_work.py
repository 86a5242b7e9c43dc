"""A whole model of random int4 weights, and the bytes and flops that its tokens need."""

import dataclasses
import functools
import math

import jax

from gdn_jax._core.backend import select_backend
from gdn_jax.bench.suites import chunk
from gdn_jax.models.config import ModelConfig
from gdn_jax.models.loading.weights import weight_table
from gdn_jax.models.model import ROOM_UNIT, Model
from gdn_jax.models.params import AttentionParams, BlockParams
from gdn_jax.models.synthetic import model_params_like

WEIGHTS = "q4"
_SHARPER = 2.0


@functools.lru_cache(maxsize=1)
def made(cfg: ModelConfig, backend: str) -> Model:
    """The model, kept for the next row.

    Its attention scores are three times as wide as drawn norms would give: otherwise attention is
    nearly the mean of thousands of values, so close to zero that no check could see a mistake.

    Raises:
        BackendUnavailableError: the backend cannot run here.
    """
    select_backend("decode_step", cfg.gdn, backend=backend)
    laid_out = backend == "pallas"
    params = model_params_like(cfg, jax.random.key(0), WEIGHTS, kernel=laid_out)
    params = dataclasses.replace(params, blocks=tuple(map(_sharper, params.blocks)))
    return Model.of(params, cfg, backend=backend)


def _sharper(block: BlockParams) -> BlockParams:
    if not isinstance(block.mixer, AttentionParams):
        return block
    mixer = dataclasses.replace(block.mixer, q_norm=block.mixer.q_norm + _SHARPER)
    return dataclasses.replace(block, mixer=mixer)


def shape(cfg: ModelConfig) -> str:
    """The shape in a row's id: number of layers, and size of the vocabulary."""
    return f"l{len(cfg.layer_types)}_v{cfg.vocab_size}"


def room_for(tokens: int) -> int:
    """The room that :meth:`gdn_jax.models.Model.generate` gives a cache for so many tokens."""
    return -(-tokens // ROOM_UNIT) * ROOM_UNIT


def weight_bytes(cfg: ModelConfig) -> int:
    """Bytes of all weights but an embedding that is not the head: a token reads one row of that."""
    table = weight_table(cfg).values()
    return sum(w.nbytes(w.held(WEIGHTS)) for w in table if cfg.tied or w.role != "embedding")


def state_bytes(cfg: ModelConfig, batch: int) -> int:
    """Bytes of the float32 states and histories of all linear layers."""
    gdn = cfg.gdn
    history = (gdn.conv_width - 1) * gdn.conv_dim
    return 4 * batch * len(cfg.linear_layers) * (_state(cfg) + history)


def key_bytes(cfg: ModelConfig, batch: int, tokens: int) -> int:
    """Bytes of the bfloat16 keys and values of so many tokens in all other layers."""
    width = cfg.num_key_value_heads * cfg.head_dim
    return 2 * 2 * batch * len(cfg.full_layers) * width * tokens


def decode_bytes(cfg: ModelConfig, batch: int, position: int) -> int:
    """Bytes of one step: weights and keys are read once, states read and written."""
    moved = weight_bytes(cfg) + 2 * state_bytes(cfg, batch)
    return moved + key_bytes(cfg, batch, position)


def decode_flops(cfg: ModelConfig, batch: int, position: int) -> int:
    """Flops of one step: products with weights, the delta rule, attention to ``position`` keys."""
    rule = 7 * len(cfg.linear_layers) * _state(cfg)
    attention = 4 * len(cfg.full_layers) * _queries(cfg) * position
    return batch * (2 * (_in_blocks(cfg) + _head(cfg)) + rule + attention)


def prefill_bytes(cfg: ModelConfig, tokens: int) -> int:
    """Bytes of one prompt: weights are read, states and keys written."""
    return weight_bytes(cfg) + state_bytes(cfg, 1) + key_bytes(cfg, 1, tokens)


def prefill_flops(cfg: ModelConfig, tokens: int) -> int:
    """Flops of one prompt: attention is half a square, and only the last token has logits."""
    rule = len(cfg.linear_layers) * chunk.flops_of(cfg.gdn, tokens)
    attention = 2 * len(cfg.full_layers) * _queries(cfg) * tokens**2
    return 2 * (tokens * _in_blocks(cfg) + _head(cfg)) + rule + attention


def _in_blocks(cfg: ModelConfig) -> int:
    """The number of weights in all matrices but embedding and head; taps count as a matrix."""
    table = weight_table(cfg).items()
    return sum(math.prod(w.shape) for n, w in table if "blocks." in n and len(w.shape) == 2)


def _head(cfg: ModelConfig) -> int:
    return cfg.vocab_size * cfg.hidden_size


def _state(cfg: ModelConfig) -> int:
    return cfg.gdn.num_v_heads * cfg.gdn.head_k_dim * cfg.gdn.head_v_dim


def _queries(cfg: ModelConfig) -> int:
    return cfg.num_attention_heads * cfg.head_dim
