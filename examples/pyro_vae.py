"""A categorical variational autoencoder in Pyro: only the loss of `SVI` changes.

Eight six-way choices describe an image of MNIST. Model and guide are ordinary Pyro programs. The
first loss is `arsm.pyro.ELBO` with leave-one-out REINFORCE over eight samples; its KL divergence
from the prior is exact. The other two are Pyro's own, with eight particles, the second with a
running average as its baseline. The images ship with the experiments: `pip install ./experiments`.

Expect a test -ELBO of 154 nats with arsm.pyro.ELBO, 187 with TraceGraph_ELBO and 192 with
Trace_ELBO.

    python examples/pyro_vae.py
"""

import argparse
from collections.abc import Sequence
from typing import Any

import pyro
import torch
from pyro import distributions as dist
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.optim import PyroOptim
from torch import Tensor, nn

import arsm
import arsm.pyro
from arsm_experiments.data import load_mnist

K, C = 8, 6
LOSSES = {
    "arsm.pyro.ELBO": arsm.pyro.ELBO(arsm.RLOO(8, ridge=1.0, surrogate="logits")),
    "TraceGraph_ELBO": TraceGraph_ELBO(8, max_plate_nesting=1, vectorize_particles=True),
    "Trace_ELBO": Trace_ELBO(8, max_plate_nesting=1, vectorize_particles=True),
}


class VAE(nn.Module):
    """q(z | x) as a guide, p(z) p(x | z) as a model; z [..., B, K]."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(), nn.Linear(256, K * C))
        self.decoder = nn.Sequential(nn.Linear(K * C, 256), nn.LeakyReLU(), nn.Linear(256, 784))

    def model(self, x: Tensor) -> None:
        pyro.module("decoder", self.decoder)
        with pyro.plate("images", len(x)):
            z = pyro.sample("z", dist.Categorical(logits=torch.zeros(K, C)).to_event(1))
            pixels = self.decoder(arsm.one_hot(z, C).flatten(-2))
            pyro.sample("x", dist.Bernoulli(logits=pixels).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        pyro.module("encoder", self.encoder)
        # arsm.pyro.ELBO needs none
        baseline: Any = {"baseline": {"use_decaying_avg_baseline": True}}
        with pyro.plate("images", len(x)):
            logits = self.encoder(x).unflatten(-1, (K, C))
            pyro.sample("z", dist.Categorical(logits=logits).to_event(1), infer=baseline)


def main(
    steps: int = 300, batch: int = 100, losses: Sequence[str] = tuple(LOSSES)
) -> dict[str, float]:
    """Train one VAE per loss from the same weights; returns the test -ELBO, in nats per image."""
    data = load_mnist()
    test = data.test[:2000].float()
    reached = {}
    for name in losses:
        torch.manual_seed(0)
        pyro.clear_param_store()
        vae = VAE()
        svi = SVI(vae.model, vae.guide, PyroOptim(torch.optim.Adam, {"lr": 1e-3}), LOSSES[name])
        for step in range(steps):
            svi.step(data.train[torch.randint(len(data.train), (batch,))].float())
            if (step + 1) % 100 == 0:
                print(f"  {name}: {step + 1} of {steps} steps", end="\r")
        reached[name] = Trace_ELBO().loss(vae.model, vae.guide, test) / len(test)
        print(f"{name:<20}test -ELBO {reached[name]:.1f} nats after {steps} steps")
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    main(**vars(parser.parse_args()))
