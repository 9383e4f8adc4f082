"""A categorical variational autoencoder on MNIST, in a plain PyTorch training loop.

The encoder makes 32 four-way choices for every image. The decoder is inside f and learns by
autograd; the encoder learns through the estimator; the KL divergence from the uniform prior is
analytic, stays outside f, and needs no estimate at all. The images ship with the
experiments: `pip install ./experiments`.

Every estimator starts from the same weights, sees the same images and may evaluate the decoder
seven times per image. Expect -ELBO to fall from 546 nats to 143 with pooled ARSM, 140 with
leave-one-out REINFORCE and 166 with averaged REINFORCE. A decoder that learns while the encoder
does not gets to 206. These are numbers of one machine: on another, rounding differs.

    python examples/training_loop.py
"""

import argparse
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import arsm
from arsm_experiments.data import load_mnist

K, C = 32, 4
ESTIMATORS = ("arsm:pooled=True", "rloo:samples=7", "7*reinforce")


class VAE(nn.Module):
    """x [B, 784] -> logits [B, K, C]; z [N, K] -> pixels [N, 784]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(), nn.Linear(256, K * C))
        self.decoder = nn.Sequential(nn.Linear(K * C, 256), nn.LeakyReLU(), nn.Linear(256, 784))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).unflatten(-1, (K, C))

    def log_likelihood(self, z: Tensor, x: Tensor) -> Tensor:
        """ln p(x | z), row by row: this is f."""
        pixels = self.decoder(arsm.one_hot(z, C).flatten(-2))
        return -F.binary_cross_entropy_with_logits(pixels, x, reduction="none").sum(-1)

    def elbo(self, estimator: arsm.Estimator, x: Tensor) -> Tensor:
        """E[ln p(x | z)] - KL(q || uniform), [B]; ready for backward."""
        logits = self.encode(x)
        kl = K * math.log(C) - arsm.entropy(logits).sum(-1)
        return arsm.estimate(estimator, logits, self.log_likelihood, x).value - kl


def train(
    estimator: arsm.Estimator, images: Tensor, test: Tensor, steps: int, batch: int
) -> tuple[float, float]:
    """-ELBO on the test images before and after training."""
    torch.manual_seed(0)
    model = VAE()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    before = evaluate(model, test)
    for step in range(steps):
        x = images[torch.randint(len(images), (batch,))].float()
        loss = -model.elbo(estimator, x).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (step + 1) % 200 == 0:
            print(f"  step {step + 1:>4}  -ELBO of the batch {loss.item():.1f}")
    return before, evaluate(model, test)


@torch.no_grad()
def evaluate(model: VAE, images: Tensor) -> float:
    """-ELBO in nats from one sample per image, for which REINFORCE's single evaluation is
    enough.
    """
    return -model.elbo(arsm.Reinforce(), images.float()).mean().item()


def main(
    steps: int = 600, batch: int = 100, estimators: Sequence[str] = ESTIMATORS
) -> dict[str, float]:
    """Train with each estimator; returns -ELBO on the test images."""
    data = load_mnist()
    reached = {}
    for words in estimators:
        print(words)
        before, reached[words] = train(arsm.estimator(words), data.train, data.test, steps, batch)
        print(f"  test -ELBO {before:.1f} -> {reached[words]:.1f} nats")
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--estimators", nargs="+", default=ESTIMATORS)
    main(**vars(parser.parse_args()))
