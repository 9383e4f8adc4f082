"""The estimate inside Lightning, with estimators that have learned parts and with those that have
none.

A `LightningModule` needs nothing special: `training_step` returns a loss made from `out.value`. Two
more lines serve estimators that learn along with the model, such as RELAX: their parts are kept in
the module, so that the optimiser, `.to(device)` and checkpoints find them, and `out.estimator_loss`
joins the loss.

The model autoencodes 8 x 8 images of one horizontal and one vertical bar through four eight-way
choices. There are 64 such images, so that no model's -ELBO can be below ln 64 = 4.16 nats, and one
that makes no use of its choices stays at 34.9. Lightning is optional: `pip install
'.[examples]'`.

Expect 6.8 nats with pooled ARSM, 6.3 with leave-one-out REINFORCE at ARSM's 29 evaluations, and 7.9
with RELAX, which makes one. These are numbers of one machine: on another, rounding differs.

    python examples/lightning_module.py
"""

import argparse
import logging
import math
import warnings
from collections.abc import Sequence

import lightning  # pyright: ignore[reportMissingImports]
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import arsm

K, C, SIDE = 4, 8, 8
ESTIMATORS = ("arsm:pooled=True", "rloo:samples=29,live=1", "relax")


def bars() -> Tensor:
    """All images of a row and a column, [64, 64]."""
    row, column = torch.arange(SIDE**2) // SIDE, torch.arange(SIDE**2) % SIDE
    place = torch.arange(SIDE)
    on = (row[:, None, None] == place[:, None]) | (column[:, None, None] == place)
    return on.flatten(1).float()


class Autoencoder(lightning.LightningModule):
    """Images through K choices of C, trained with any estimator."""

    def __init__(self, estimator: arsm.Estimator) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIDE**2, 64), nn.ReLU(), nn.Linear(64, K * C))
        self.decoder = nn.Sequential(nn.Linear(K * C, 64), nn.ReLU(), nn.Linear(64, SIDE**2))
        self.estimator = estimator
        self.learned = estimator.learned  # empty for most
        # RELAX's network takes its size from the first logits
        self.negative_elbo(estimator, bars())

    def log_likelihood(self, z: Tensor, x: Tensor) -> Tensor:
        pixels = self.decoder(arsm.one_hot(z, C).flatten(-2))
        return -F.binary_cross_entropy_with_logits(pixels, x, reduction="none").sum(-1)

    def negative_elbo(self, estimator: arsm.Estimator, x: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self.encoder(x).unflatten(-1, (K, C))
        out = arsm.estimate(estimator, logits, self.log_likelihood, x)
        kl = K * math.log(C) - arsm.entropy(logits).sum(-1)
        return (kl - out.value).mean(), out.estimator_loss

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss, estimator_loss = self.negative_elbo(self.estimator, x)
        return loss if estimator_loss is None else loss + estimator_loss

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.log("-ELBO", self.negative_elbo(arsm.Exact(), x)[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(steps: int = 600, estimators: Sequence[str] = ESTIMATORS) -> dict[str, float]:
    """Train with each estimator; returns -ELBO over all images, exact in the choices."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    images = DataLoader(bars(), batch_size=SIDE**2)  # pyright: ignore[reportArgumentType]
    reached = {}
    for words in estimators:
        torch.manual_seed(0)
        model = Autoencoder(arsm.estimator(words))
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, images)
        reached[words] = trainer.validate(model, images, verbose=False)[0]["-ELBO"]
        print(f"{words:<24} -ELBO {reached[words]:.2f} nats after {steps:,} steps")
    return reached


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--estimators", nargs="+", default=ESTIMATORS)
    main(**vars(parser.parse_args()))
