"""Every error of the package. Errors about arguments and files are also ``ValueError``."""


class GDNError(Exception):
    """Base of all errors raised by gdn_jax."""


class ConfigError(GDNError, ValueError):
    """A configuration that no Gated DeltaNet layer can have."""


class ShapeError(GDNError, ValueError):
    """An array argument of the wrong shape, rank or dtype."""


class BackendUnavailableError(GDNError, RuntimeError):
    """A named backend cannot run this operator here; the message says why and what would."""


class LayerNotResidentError(GDNError, RuntimeError):
    """A layer was stepped before all of its weights were made resident."""


class StateFileError(GDNError, ValueError):
    """A state file that is truncated, altered, of another configuration, or not finite."""


class CheckpointError(GDNError, ValueError):
    """A checkpoint directory or tensor that cannot be loaded as a Gated DeltaNet layer."""


class OracleError(GDNError, ValueError):
    """An oracle that is missing, altered, of another version, or cannot be computed here."""
