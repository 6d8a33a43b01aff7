"""Centered kernel alignment (CKA) between the layers of PyTorch networks.

from cka import CKA

with CKA(model1, model2) as cka:
    result = cka.compare(loader)
"""

from cka.comparison import CKA
from cka.errors import (
    CKAError,
    CKAWarning,
    DoesNotFitError,
    InputError,
    LayerError,
    MissingExtraError,
    SettingError,
)
from cka.functional import hsic
from cka.functional.distributions import (
    Calibration,
    Confidence,
    NullDistribution,
    null_distribution,
)
from cka.functional.features import align_tokens, cka_from_features
from cka.functional.kernels import RBF
from cka.functional.neighbours import CKNNA, MutualKNN, measure_from_features
from cka.gate import Agreement, same_representations
from cka.many import CKAResults, compare_many
from cka.result import CKAResult, Match
from cka.stored import StoredFeatures, save_features
from cka.stored_comparison import compare_features

__all__ = [
    "CKA",
    "CKNNA",
    "RBF",
    "Agreement",
    "CKAError",
    "CKAResult",
    "CKAResults",
    "CKAWarning",
    "Calibration",
    "Confidence",
    "DoesNotFitError",
    "InputError",
    "LayerError",
    "Match",
    "MissingExtraError",
    "MutualKNN",
    "NullDistribution",
    "SettingError",
    "StoredFeatures",
    "align_tokens",
    "cka_from_features",
    "compare_features",
    "compare_many",
    "hsic",
    "measure_from_features",
    "null_distribution",
    "same_representations",
    "save_features",
]
