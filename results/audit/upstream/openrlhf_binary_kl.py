"""OpenRLHF 0.11.2 alone: is_correction_gating="binary_kl" leaves out tokens on which sampler and
model agree.

The gate "takes an upper bound only", but also asks for a divergence of at least 0, and rounding
makes small ones negative. pip install torch; pip install --no-deps openrlhf==0.11.2
"""

import importlib
import importlib.util
import sys
import types

import torch

# the __init__ of openrlhf.models needs a GPU, and DeepSpeed is not used here
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
models = types.ModuleType("openrlhf.models")
models.__path__ = [f"{importlib.util.find_spec('openrlhf').submodule_search_locations[0]}/models"]
sys.modules["openrlhf.models"] = models
PolicyLoss = importlib.import_module("openrlhf.models.loss").PolicyLoss

torch.manual_seed(0)
log_p, one = torch.rand(1, 10_000).log(), torch.ones(1, 10_000)
for error in (0.0, 1e-6, 1e-4, 1e-3):
    rollout = log_p + error * torch.randn_like(log_p)
    for name, low in (("OpenRLHF", 0.0), ("without the lower bound (mended)", -1.0)):
        loss = PolicyLoss(
            is_correction_level="token",
            is_correction_gating="binary_kl",
            is_correction_threshold=[low, 0.05],
        )
        *_, left_out = loss(log_p, log_p, one, action_mask=one, rollout_log_probs=rollout)
        print(f"ln p that differ by {error:g}, {name}: {float(left_out):.1%} of tokens left out")
