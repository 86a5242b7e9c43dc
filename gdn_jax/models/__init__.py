"""Whole models: blocks of Gated DeltaNet layers and of gated full attention."""

from gdn_jax.models.config import ModelConfig
from gdn_jax.models.generation.host import Generated
from gdn_jax.models.model import Model, load

__all__ = ["Generated", "Model", "ModelConfig", "load"]
