"""What the ranks of ``torch_distributed_files.py`` have when they begin; none of it uses CUDA."""

import expecttest
import numpy
import pytest
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.algorithms._comm_hooks
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.testing._internal.common_fsdp
import torch.testing._internal.distributed._tensor.common_dtensor
from torch._inductor import cpu_vec_isa

__all__ = ["expecttest", "numpy", "pytest", "torch"]

# Otherwise each process compiles and loads a library for each set of vector instructions.
cpu_vec_isa.VecISA.check_build = lambda *_: True
if torch.cuda.is_initialized():
    raise RuntimeError("no rank can be forked, because importing torch has initialised CUDA")
