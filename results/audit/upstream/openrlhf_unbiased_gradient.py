"""OpenRLHF 0.11.2 alone: compute_approx_kl(unbiased_gradient=True) has the gradient of each token's
KL, not that of the answer's.

Its docstring promises the true reverse-KL gradient. Two tokens of two kinds each, all four answers
enumerated: what the first token does to the second one's KL is left out.
pip install torch; pip install --no-deps openrlhf==0.11.2
"""

import importlib.util
import sys
import types

import torch

# models/utils.py imports DeepSpeed, which this function does not use
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
folder = importlib.util.find_spec("openrlhf").submodule_search_locations[0]
spec = importlib.util.spec_from_file_location("utils", f"{folder}/models/utils.py")
utils = importlib.util.module_from_spec(spec)
spec.loader.exec_module(utils)

torch.manual_seed(0)
first = torch.randn(2, requires_grad=True)  # logits of the first token
second = torch.randn(2, 2)  # logits of the second, given the first
reference_first, reference_second = torch.randn(2), torch.randn(2, 2)


def log_p(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """ln p of both tokens of all four answers: [4, 2]."""
    a, b = one.log_softmax(-1), two.log_softmax(-1)
    return torch.stack([a.repeat_interleave(2), b.flatten()], 1)


ours, theirs = log_p(first, second), log_p(reference_first, reference_second)
p = ours.sum(1).exp()
exact = torch.autograd.grad((p * (ours - theirs).sum(1)).sum(), first, retain_graph=True)[0]
print(f"exact: {exact.tolist()}")
for kind in ("k1", "k2", "k3"):
    kl = utils.compute_approx_kl(ours, theirs, ours.detach(), kind, unbiased_gradient=True)
    found = torch.autograd.grad((p.detach() * kl.sum(1)).sum(), first, retain_graph=True)[0]
    print(f"{kind}, unbiased_gradient: {found.tolist()}")
k1 = utils.compute_approx_kl(ours, theirs).sum(1).detach()
found = torch.autograd.grad((p.detach() * k1 * ours.sum(1)).sum(), first)[0]
print(f"k1 in the reward (mended): {found.tolist()}")
