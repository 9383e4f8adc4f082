"""tunix 0.1.7 alone: by default, the KL penalty of GRPO has the mean gradient 0.

GRPOConfig says that its term "prevents policy updates from deviating too far from the reference
model". Its default kl_loss_mode="kl" adds ln p - ln p_ref to the loss, whose mean gradient is that
of 1. One token of three kinds, enumerated. pip install google-tunix==0.1.7
"""

import jax
import jax.numpy as jnp
from tunix import GRPOConfig
from tunix.rl.common import compute_kl_divergence

logits, reference = jnp.array([0.5, -0.3, 1.0]), jnp.array([-0.4, 0.8, 0.1])


def exact(logits: jax.Array) -> jax.Array:
    """KL(policy || reference)."""
    log_p = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(reference)))


def penalty(logits: jax.Array, mode: str) -> jax.Array:
    """The mean of the penalty over answers that were drawn, as in tunix's loss."""
    log_p = jax.nn.log_softmax(logits)
    kl = compute_kl_divergence(log_p, jax.nn.log_softmax(reference), mode)
    return jnp.sum(jax.lax.stop_gradient(jnp.exp(log_p)) * kl)


default = GRPOConfig().kl_loss_mode
print(f"exact: {jax.grad(exact)(logits)}")
print(f"{default} (default): {jax.grad(penalty)(logits, default)}")
print(f"low_var_kl: {jax.grad(penalty)(logits, 'low_var_kl')}")
print(f"mse_kl (mended): {jax.grad(penalty)(logits, 'mse_kl')}")
