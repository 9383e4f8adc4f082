"""tunix 0.1.7 alone: GRPO's ratios are not 1 before the first update, where answers are drawn at a
temperature and num_iterations > 1.

The loss divides logits by the temperature; the ln p before the update, from VanillaRollout, do not.
PPO's loss never divides. One prompt, one answer. pip install google-tunix==0.1.7
"""

from types import SimpleNamespace

import jax.numpy as jnp
from flax import nnx
from tunix.rl.common import compute_per_token_logps
from tunix.rl.rollout.vanilla_rollout import VanillaRollout


class Model(nnx.Module):
    """The same logits after every token."""

    def __call__(self, tokens, **_):
        return jnp.broadcast_to(jnp.array([0.0, 0.2, 1.5]), (*tokens.shape, 3)), None


split = nnx.split(Model())
rollout = SimpleNamespace(
    _sampler=SimpleNamespace(model_def_and_state=lambda: split), pad_id=lambda: 0, eos_id=lambda: 1
)
prompt, answer = jnp.array([[2]]), jnp.array([[2, 2, 1]])
old = VanillaRollout.get_per_token_logps(rollout, prompt, answer)  # GRPO with num_iterations > 1
for temperature in (1.0, 0.7):
    ids = {"prompt_tokens": prompt, "completion_tokens": answer, "pad_id": 0, "eos_id": 1}
    new = compute_per_token_logps(*split, **ids, temperature=temperature)  # as in the loss
    print(f"temperature {temperature}: ratios before any update {jnp.exp(new - old)}")
    mended = compute_per_token_logps(*split, **ids, temperature=temperature)
    print(f"  with the same temperature before the update (mended): {jnp.exp(new - mended)}")
