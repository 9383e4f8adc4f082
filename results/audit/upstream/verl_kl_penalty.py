"""verl 0.9.1 alone: kl_penalty("k3+") has the gradient of each token's KL, not that of the
answer's.

Its docstring promises an unbiased gradient of the KL. Two tokens of two kinds each, all four
answers enumerated: what the first token does to the second one's KL is left out. pip install
verl==0.9.1
"""

import torch
from verl.trainer.ppo.core_algos import kl_penalty

torch.manual_seed(0)
first = torch.randn(2, dtype=torch.float64, requires_grad=True)  # logits of the first token
second = torch.randn(2, 2, dtype=torch.float64)  # logits of the second, given the first
reference_first, reference_second = (
    torch.randn(2, dtype=torch.float64),
    torch.randn(2, 2, dtype=torch.float64),
)


def log_p(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """ln p of both tokens of all four answers: [4, 2]."""
    a, b = one.log_softmax(-1), two.log_softmax(-1)
    return torch.stack([a.repeat_interleave(2), b.flatten()], 1)


ours, theirs = log_p(first, second), log_p(reference_first, reference_second)
p = ours.sum(1).exp()
exact = torch.autograd.grad((p * (ours - theirs).sum(1)).sum(), first, retain_graph=True)[0]
for kind in ("k1", "k2", "k3", "k3+"):
    loss = (p.detach() * kl_penalty(ours, theirs, kind).sum(1)).sum()
    found = torch.autograd.grad(loss, first, retain_graph=True)[0]
    print(f"{kind} in the loss: {found.tolist()}, exact: {exact.tolist()}")
in_reward = (p.detach() * (ours - theirs).sum(1).detach() * ours.sum(1)).sum()
print(
    f"k1 in the reward (mended): {torch.autograd.grad(in_reward, first)[0].tolist()}, exact: "
    f"{exact.tolist()}"
)
