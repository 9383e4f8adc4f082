"""torchrl's score-function loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arsm.referee.measure import Loss
from arsm_experiments.ecosystem.entry import ONE_VARIABLE, UNBIASED, Entry, audited, from_package


class Sum(torch.nn.Module):
    """A critic, which the class asks for; it has a loss of its own, which is not used."""

    def forward(self, observation: Tensor) -> Tensor:
        return observation.sum(-1, keepdim=True)


def reinforce() -> Loss:
    """`ReinforceLoss`, a mean over rows, of a policy whose logits are its observation."""
    objectives, modules = from_package("torchrl.objectives"), from_package("torchrl.modules")
    tensordict = from_package("tensordict")
    network = from_package("tensordict.nn").TensorDictModule(
        torch.nn.Identity(), in_keys=["observation"], out_keys=["logits"]
    )
    actor = modules.ProbabilisticActor(
        network,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = modules.ValueOperator(Sum(), in_keys=["observation"])
    objective = objectives.ReinforceLoss(actor, critic)

    def loss(logits: Tensor, f: Any) -> Tensor:
        rows = logits.shape[0]
        z = torch.distributions.Categorical(logits=logits.detach()).sample()
        given = tensordict.TensorDict(
            {
                "observation": logits[:, 0],
                "action": z[:, 0],
                "advantage": f(z).detach().unsqueeze(-1),
                "value_target": torch.zeros(rows, 1),
            },
            [rows],
        )
        return -rows * objective(given)["loss_actor"]

    return loss


ENTRIES = (
    Entry(
        "torchrl: ReinforceLoss, one variable",
        "torchrl",
        "torchrl",
        UNBIASED,
        audited(reinforce, ONE_VARIABLE),
    ),
)
