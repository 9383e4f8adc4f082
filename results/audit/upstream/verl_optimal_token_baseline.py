"""verl 0.9.1 alone: the "optimal token baseline" contains the answer's own reward, which biases the
gradient.

Two answers, of one and of two tokens; every group of two is enumerated. pip install verl==0.9.1
"""

import itertools

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_optimal_token_baseline_advantage

# the first token decides: answer 0 ends, answer 1 goes on to token 2
p = torch.tensor([0.3, 0.7], dtype=torch.float64)
rewards = torch.tensor([1.0, 0.2], dtype=torch.float64)
mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


def advantages(group: list[int], leave_out: bool) -> torch.Tensor:
    def verl(chosen: list[int]) -> torch.Tensor:
        m = mask[chosen]
        token_rewards = (
            m
            * rewards[chosen].unsqueeze(-1)
            * torch.tensor([[0.0, 1.0] if c else [1.0, 0.0] for c in chosen])
        )
        log_p = torch.stack([p[chosen].log(), torch.zeros(len(chosen))], 1)
        squares = torch.tensor([[float(p.square().sum()), 1.0]] * len(chosen), dtype=torch.float64)
        index = np.zeros(len(chosen))
        return compute_optimal_token_baseline_advantage(token_rewards, m, index, log_p, squares)[0][
            :, 0
        ]

    # the mended one: the other answer's reward, which of two is the whole optimal baseline
    if leave_out:
        return rewards[group] - rewards[group[::-1]]
    return verl(group)


for name, leave_out in (("verl", False), ("own answer left out", True)):
    mean = torch.zeros(2, dtype=torch.float64)
    for group in itertools.product((0, 1), repeat=2):
        score = torch.eye(2, dtype=torch.float64)[list(group)] - p
        weight = p[list(group)].prod()
        mean += weight * (advantages(list(group), leave_out).unsqueeze(-1) * score).mean(0)
    print(f"{name}: {mean.tolist()}, exact: {(p * (rewards - p @ rewards)).tolist()}")
