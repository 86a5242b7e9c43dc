"""Every error of the package. Errors about arguments and files are also ``ValueError``."""


class GDNError(Exception):
    """Base of all errors raised by gdn_jax."""


class ConfigError(GDNError, ValueError):
    """A configuration that no Gated DeltaNet layer can have."""


class ShapeError(GDNError, ValueError):
    """An array argument of the wrong shape, rank or dtype."""


class QuantizationError(GDNError, ValueError):
    """Weights that int4 cannot hold: not finite, or a scale beyond float16."""


class UnknownNameError(GDNError, ValueError):
    """An operator, backend or rule that does not exist."""


class BackendUnavailableError(GDNError, RuntimeError):
    """A named backend cannot run this operator here; the message says why, and what can."""


class LayerNotResidentError(GDNError, RuntimeError):
    """A layer was stepped before all of its weights were made resident."""


class TierConflictError(GDNError, RuntimeError):
    """A layer would hold its float32 and its int4 projections at once."""


class StaleBindingError(LayerNotResidentError):
    """A layer is bound to an int4 pool that was cleared or rebuilt since."""


class PoolKeyError(GDNError, KeyError):
    """A key that an int4 pool does not have."""

    __str__ = Exception.__str__


class PoolFullError(GDNError, RuntimeError):
    """Fewer slots are free than were asked for; the pool is unchanged."""


class SlotError(GDNError, ValueError):
    """A slot that is out of range, not in use, or named twice; the pool is unchanged."""


class StateFileError(GDNError, ValueError):
    """A file of states that is truncated, altered, of another configuration, or not finite."""


class CheckpointError(GDNError, ValueError):
    """A checkpoint directory or tensor that cannot be loaded as a Gated DeltaNet layer."""


class OracleError(GDNError, ValueError):
    """An oracle that is missing, altered or of another version, or cannot be computed here."""


class TextError(GDNError, ValueError):
    """A tokenizer, chat template, text or stop string that is missing, damaged or unusable."""


class GenerationError(GDNError, ValueError):
    """A request to a model that cannot be met: prompts, room, or how to choose tokens."""


class DeviceMemoryError(GDNError, RuntimeError):
    """The device has too little memory; the message says what was needed and what to try."""
