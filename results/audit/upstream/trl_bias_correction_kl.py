"""TRL 1.16.0 alone: use_bias_correction_kl gives the gradient of each token's KL, not that of the
answer's.

GRPOConfig says that the KL's gradient "becomes the unbiased reverse-KL gradient". Two tokens of two
kinds each, all four answers enumerated: what the first token does to the second one's KL is left
out. GRPOTrainer's own loss is called, with ln p that are given. pip install trl==1.16.0
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import GRPOTrainer

torch.manual_seed(0)
first = torch.randn(2, requires_grad=True)  # logits of the first token
second = torch.randn(2, 2)  # logits of the second, given the first
reference_first, reference_second = torch.randn(2), torch.randn(2, 2)


def log_p(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """ln p of both tokens of all four answers: [4, 2]."""
    a, b = one.log_softmax(-1), two.log_softmax(-1)
    return torch.stack([a.repeat_interleave(2), b.flatten()], 1)


def trl_loss(answer: int, advantage: float, beta: float) -> torch.Tensor:
    """GRPOTrainer._compute_loss of one answer, without models."""
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.__dict__ |= {
        "args": SimpleNamespace(use_bias_correction_kl=True, delta=None),
        "accelerator": SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *_, **__: (row, torch.zeros(1, 2), None),
        **{"beta": beta, "loss_type": "dr_grpo", "importance_sampling_level": "token"},
        **{"epsilon_low": 0.2, "epsilon_high": 0.2, "top_entropy_quantile": 1.0},
        **dict.fromkeys(["aux_loss_enabled", "use_vllm", "_entropy_bonus_enabled"], False),
        **{"off_policy_mask_threshold": None, "max_completion_length": 1},
        "current_gradient_accumulation_steps": 1,
    }
    row, ids = ours[answer : answer + 1], torch.ones(1, 2, dtype=torch.long)
    given = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ids)
    given |= {"completion_mask": ids, "advantages": torch.tensor([advantage])}
    return trainer._compute_loss(None, given | {"ref_per_token_logps": theirs[[answer]]})


def mean_gradient(loss) -> list[float]:
    """The gradient of the loss of an answer, averaged over all answers."""
    total = sum(p[answer].detach() * loss(answer) for answer in range(4))
    return torch.autograd.grad(total, first, retain_graph=True)[0].tolist()


ours, theirs = log_p(first, second), log_p(reference_first, reference_second)
p, k1 = ours.sum(1).exp(), (ours - theirs).sum(1)
exact = torch.autograd.grad((p * k1).sum(), first, retain_graph=True)[0].tolist()
print(f"exact: {exact}")
print(f"use_bias_correction_kl: {mean_gradient(lambda a: trl_loss(a, 0.0, 1.0))}")
in_reward = mean_gradient(lambda a: trl_loss(a, -float(k1[a].detach()), 0.0))
print(f"k1 in the reward (mended): {in_reward}")
