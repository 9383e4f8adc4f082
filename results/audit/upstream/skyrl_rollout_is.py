"""SkyRL 0.4.0 alone: rollout_is has not the gradient of cispo.

Its docstring says that the loss is cispo's with the sampler's ln p, and that zeroing a ratio out of
range instead of clamping it "does not change the gradient". It does: the ratio multiplies the
gradient. One token, whose probability has doubled since it was drawn.
pip install torch ray loguru jaxtyping omegaconf pandas
pip install --no-deps --ignore-requires-python skyrl==0.4.0 skyrl-gym==0.4.0
"""

import importlib.util
import sys
import types

import torch

# the __init__ of skyrl.backends imports its server, which needs Python 3.12
backends = types.ModuleType("skyrl.backends")
backends.__path__ = [f"{importlib.util.find_spec('skyrl').submodule_search_locations[0]}/backends"]
sys.modules["skyrl.backends"] = backends
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry  # noqa: E402
from skyrl.train.config import AlgorithmConfig  # noqa: E402


def gradient(name: str) -> float:
    """d loss / d ln p of a token with advantage 1 and ratio 2; ratios are kept in 0.8 to 1.2."""
    config = AlgorithmConfig(policy_loss_type=name)
    config.cispo.cispo_anchor = "rollout"
    config.cispo.cispo_eps_clip_low = config.cispo.cispo_eps_clip_high = 0.2
    log_p = torch.tensor([[0.8]]).log().requires_grad_()
    one, drawn = torch.ones(1, 1), torch.tensor([[0.4]]).log()
    loss, _ = PolicyLossRegistry.get(name)(log_p, log_p.detach(), one, config, one, drawn)
    return float(torch.autograd.grad(loss, log_p)[0])


print(f"cispo: {gradient('cispo')}, rollout_is: {gradient('rollout_is')}")
log_p = torch.tensor(0.8).log().requires_grad_()
mended = -(log_p.exp() / 0.4).clamp(0.8, 1.2).detach() * log_p
print(f"rollout_is, clamped (mended): {float(torch.autograd.grad(mended, log_p)[0])}")
