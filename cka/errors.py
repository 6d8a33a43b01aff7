"""The exceptions and the warning of this package. Imports nothing, so every module can use it."""

from __future__ import annotations


class CKAError(Exception):
    """Base class of the errors that this package raises."""


class InputError(CKAError, ValueError):
    """Data, models or data loaders cannot be compared as given."""


class LayerError(CKAError, ValueError):
    """A layer selection matches nothing in the model, or leaves nothing to compare."""


class SettingError(CKAError, ValueError):
    """An estimator, kernel, pooling or other setting is unknown or out of range."""


class DoesNotFitError(CKAError, MemoryError):
    """The exact estimator would need more memory than it may use; the message gives both sizes."""


class MissingExtraError(CKAError, ImportError):
    """An optional dependency is not installed; the message gives the command that installs it."""


class CKAWarning(UserWarning):
    """Layers or batches were left out of a comparison, or their CKA is NaN."""
