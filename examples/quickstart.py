"""One choice among 30, learned from the rewards of sampled choices: REINFORCE, then ours.

The rewards are almost equal, and the last choice is the best. Look at the two numbers: in how many
of ten runs each estimator finds it. Expect 0 of 10 for REINFORCE and 10 of 10 for leave-one-out
with 16 samples.

    python examples/quickstart.py
"""

import argparse

import torch

import arsm

reward = 0.5 + torch.arange(1, 31) / 900


def found(estimator: arsm.Estimator, seed: int) -> bool:
    """Whether 200 updates find the best choice."""
    torch.manual_seed(seed)
    logits = torch.zeros(30, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        out = arsm.estimate(estimator, logits, lambda z: reward[z[:, 0]])
        (-out.value).backward()
        optimizer.step()
    return bool(logits.argmax() == 29)


def main(runs: int = 10) -> dict[str, int]:
    """Print and return in how many runs each estimator found the best choice."""
    estimators = {"REINFORCE": arsm.Reinforce(), "leave-one-out": arsm.RLOO(16)}
    counts = {}
    for name, estimator in estimators.items():
        counts[name] = sum(found(estimator, seed) for seed in range(runs))
        print(f"{name} finds the best of 30 choices in {counts[name]} of {runs} runs.")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="runs of each estimator")
    main(**vars(parser.parse_args()))
