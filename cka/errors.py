"""Every exception and warning of this package: a leaf, so that any module may raise them."""

from __future__ import annotations


class CKAError(Exception):
    """Base of everything this package raises on purpose."""


class InputError(CKAError, ValueError):
    """Data, models or loaders that cannot be compared as given."""


class LayerError(CKAError, ValueError):
    """A layer selection that names nothing in the model, or leaves nothing to compare."""


class SettingError(CKAError, ValueError):
    """An estimator, kernel, pooling or other setting that does not exist."""


class DoesNotFitError(CKAError, MemoryError):
    """The exact estimator would need more memory than it may use; the message gives the bytes."""


class MissingExtraError(CKAError, ImportError):
    """An optional dependency is not installed; the message gives the command that installs it."""


class CKAWarning(UserWarning):
    """Something was left out of a comparison; the message names it and says why."""
