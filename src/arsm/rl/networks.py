"""The networks that learn: MLPs in float64, one for all agents of a team or one each,
or the user's own module.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from arsm.rl.environment import Array
from arsm.rl.policies import Perceptron


def mlp(
    inputs: int, hidden: tuple[int, ...], outputs: int, generator: torch.Generator
) -> nn.Sequential:
    """A network with ReLUs in float64; weights N(0, 0.3) and biases 0.1, as the paper's
    authors have it, but for the output's weights N(0, 0.03): a policy must begin near
    uniform to see any reward where that is rare (Acrobot)."""
    layers: list[nn.Module] = []
    sizes = (inputs, *hidden, outputs)
    for size, following in pairwise(sizes):
        linear = nn.Linear(size, following, dtype=torch.float64)
        nn.init.normal_(
            linear.weight, 0.0, 0.03 if len(layers) == 2 * len(hidden) else 0.3, generator=generator
        )
        nn.init.constant_(linear.bias, 0.1)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class TeamNetwork(nn.Module):
    """MLPs for agents whose observations lie side by side: [N, agents * D] -> [N,
    agents * outputs].
    """

    def __init__(self, networks: list[nn.Sequential], agents: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.agents = agents

    def forward(self, observations: Tensor) -> Tensor:
        """One network reads all agents' observations as rows; several read one agent's each."""
        seen = observations.unflatten(1, (self.agents, -1))
        # a shared network takes agents as further rows of its batch
        if len(self.networks) == 1:
            return self.networks[0](seen).flatten(1)
        return torch.cat(
            [network(seen[:, number]) for number, network in enumerate(self.networks)], 1
        )


def perceptron(network: nn.Sequential | TeamNetwork, choices: tuple[int, ...]) -> Perceptron:
    """The network in NumPy, as it is now."""
    if isinstance(network, nn.Sequential):
        return Perceptron(_layers(network), choices)
    own = [_layers(each) for each in network.networks if isinstance(each, nn.Sequential)]
    if len(own) == 1:
        return Perceptron(own[0], choices, network.agents)
    layers = tuple(
        (np.stack([weight for weight, _ in layer]), np.stack([bias[None] for _, bias in layer]))
        for layer in zip(*own, strict=True)
    )
    return Perceptron(layers, choices, network.agents)


def _layers(network: nn.Sequential) -> tuple[tuple[Array, Array], ...]:
    # clones: the optimizer writes into the network while the copy plays
    linear = (layer for layer in network if isinstance(layer, nn.Linear))
    return tuple(
        (x.weight.detach().clone().numpy().T, x.bias.detach().clone().numpy()) for x in linear
    )
