"""A pytest plugin with names that tests of PyTorch 2.6 import and later versions have renamed.

Only its test helpers are concerned, so that the files can be collected: ``-p torch_names``.
"""

import torch
from torch.testing._internal import common_cuda, common_mkldnn, common_nn


def _has_tf32():
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


for module, name, value in (
    (common_mkldnn, "bf32_on_and_off", getattr(common_mkldnn, "reduced_f32_on_and_off", None)),
    (common_nn, "new_module_tests", getattr(common_nn, "get_new_module_tests", list)()),
    (common_cuda, "tf32_is_not_fp32", _has_tf32),
):
    if not hasattr(module, name):
        setattr(module, name, value)
