"""unsloth's own checks of its kernels for norms, and its cross entropy beside PyTorch's."""

import sys

sys.path.insert(0, ".")
import torch
import unsloth
from unsloth.kernels import cross_entropy_loss, layernorm, rms_layernorm

print("imported unsloth", unsloth.__version__, flush=True)
torch.manual_seed(0)
for check in (layernorm.test_layernorm, rms_layernorm.test_rms_layernorm):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        check(dim=512, eps=1e-5, dtype=torch.bfloat16, bsz=2, random_state=3407, seqlen=64)
    print("RESULT", check.__name__, flush=True)
logits = torch.randn(2, 16, 1000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
labels = torch.randint(0, 1000, (2, 16), device="cuda")
fast = cross_entropy_loss.fast_cross_entropy_loss(logits, labels).float()
plain = torch.nn.functional.cross_entropy(logits.view(-1, 1000).float(), labels.view(-1))
torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-3)
print("RESULT cross entropy", fast.item(), flush=True)
