"""tunix's registries: advantages, policy losses, aggregations and divergences, by its own code in
JAX.

A loss gets a model of Flax whose logits are those of the referee's table at the tokens that tunix
puts together; they are not a number where it asks for others. The gradient in the logits goes back
to torch. Each part is judged with others that are right: leave-one-out advantages, the loss "grpo",
and the aggregation that sums over tokens and averages over sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from arsm.referee import Objective, TrainerBatch
from arsm.referee.worlds import TrainerLoss
from arsm_experiments.ecosystem.entry import Entry, Found, from_package, refereed

PACKAGE, VERSION = "google-tunix", "0.1.7"
WIDTH, PROMPT_WIDTH = 5, 6
"""Answers and prompts are padded to fixed lengths."""
RIGHT = "seq-mean-token-sum"
DIVERGENCE = Objective(beta=0.3)
TEMPERED = Objective(temperature=0.7)


def tunix_loss(
    advantage: str = "rloo", policy: str = "grpo", repeated: bool = False, **options: Any
) -> Callable[[], TrainerLoss]:
    """A whole loss of tunix's own parts; `options` are those of its configuration.

    PPO, and GRPO with several iterations (`repeated`), get the ln p of tokens before the update
    from `VanillaRollout.get_per_token_logps`, which does not divide by the temperature.
    """

    def build() -> TrainerLoss:
        jax, numpy = from_package("jax"), from_package("numpy")
        from_package("tunix")
        common = from_package("tunix.rl.common")
        registry = from_package("tunix.rl.function_registry")
        advantages_of = registry.get_advantage_estimator(advantage)
        policy_loss = registry.get_policy_loss_fn(policy)
        differentiate = gradient_of(policy_loss, common, jax)
        chosen = {"loss_agg_mode": RIGHT, **options} if policy == "grpo" else options

        def loss(batch: TrainerBatch) -> Tensor:
            prompts = pad(batch.prompts, (PROMPT_WIDTH - batch.prompts.shape[1], 0))
            completions = pad(batch.completions, (0, WIDTH - batch.completions.shape[1]))
            tokens = torch.cat([prompts, completions], 1)
            logits = batch.model(tokens, tokens != batch.pad)
            mask = (completions != batch.pad).int()
            rewards = batch.rewards.numpy()
            if advantage == "gae":
                at_end = torch.zeros_like(mask, dtype=torch.float32)
                last = mask.sum(-1, keepdim=True).long() - 1
                at_end.scatter_(1, last, batch.rewards.unsqueeze(-1))
                values = 0.1 * mask.numpy()
                a, _ = advantages_of(at_end.numpy(), values, mask.numpy(), 1.0, 1.0)
            else:
                a = advantages_of(rewards, batch.answers)
            if policy == "ppo" and a.ndim == 1:
                a = a[:, None] * mask.numpy()
            config = configuration(policy, batch, chosen)
            extra = (0, WIDTH - batch.mask.shape[1])
            example = {
                "prompt_ids": prompts.numpy(),
                "prompt_mask": (prompts != batch.pad).numpy(),
                "completion_ids": completions.numpy(),
                "completion_mask": mask.numpy(),
                "advantages": numpy.asarray(a),
                "ref_per_token_logps": None,
                "old_per_token_logps": None,
            }
            if batch.beta:
                example["ref_per_token_logps"] = pad(batch.reference_log_p, extra).numpy()
            if policy == "ppo" or repeated:
                before = pad(batch.log_p(temperature=1.0).detach(), extra)
                example["old_per_token_logps"] = before.numpy()
            found = differentiate(logits.detach().numpy(), tokens.numpy(), example, config)
            return (logits * torch.from_numpy(numpy.array(found))).sum()

        return loss

    return build


def configuration(policy: str, batch: TrainerBatch, options: dict[str, Any]) -> Any:
    """tunix's configuration of a learner; the learner itself adds the sampler's temperature."""
    tunix = from_package("tunix")
    if policy == "ppo":
        return tunix.PPOConfig(**options)
    config = tunix.GRPOConfig(num_generations=batch.answers, beta=batch.beta, **options)
    config.temperature = batch.temperature
    return config


def gradient_of(policy_loss: Any, common: Any, jax: Any) -> Callable[..., Any]:
    """The gradient of tunix's loss in the logits [N, L, V], which are the model's weights."""
    nnx, jnp = from_package("flax.nnx"), jax.numpy

    class Table(nnx.Module):
        def __init__(self, logits: Any, tokens: Any) -> None:
            self.logits, self.tokens = nnx.Param(logits), nnx.Variable(tokens)

        def __call__(self, tokens: Any, **_: Any) -> tuple[Any, None]:
            asked = (tokens == self.tokens[...])[..., None]
            return jnp.where(asked, self.logits[...], jnp.nan), None

    compiled: dict[str, Any] = {}

    def differentiate(logits: Any, tokens: Any, example: dict[str, Any], config: Any) -> Any:
        def objective(logits: Any, tokens: Any, example: dict[str, Any]) -> Any:
            given = common.TrainExample(**example)
            value, _ = policy_loss(Table(logits, tokens), given, config, pad_id=0, eos_id=1)
            return value

        key = repr(vars(config) if hasattr(config, "__dict__") else config)
        if key not in compiled:
            compiled[key] = jax.jit(jax.grad(objective))
        return compiled[key](logits, tokens, example)

    return differentiate


def entry(name: str, claim: str, run: Callable[[], Found]) -> Entry:
    """An entry of tunix."""
    return Entry(f"tunix: {name}", PACKAGE, "tunix", claim, run, (f"{PACKAGE}=={VERSION}",))


FIRST = "the policy gradient at the first step"
ADVANTAGES = {
    "gae": "whitened; no claim of being unbiased",
    "grpo": "divided by a standard deviation; no claim of being unbiased",
    "rloo": "leave-one-out: unbiased",
    "drgrpo": "the group's mean as the baseline",
}
AGGREGATIONS = {
    "token-mean": "a mean over the batch's tokens",
    "sequence-mean-token-mean": "a mean over each sequence's tokens",
    "sequence-mean-token-scale": "a sum over tokens, divided by a constant",
    RIGHT: "a sum over tokens, a mean over sequences",
    "sequence-mean-token-sum-norm": "a sum over tokens, a mean over sequences",
}
DIVERGENCES = {
    "kl": "the right gradient: keeps updates near the reference; the default",
    "mse_kl": "an estimate of the value",
    "low_var_kl": "an estimate of the value",
}
ENTRIES = (
    *(
        entry(
            f"advantages {name}",
            claim,
            refereed(tunix_loss(advantage=name), up_to_scale=name == "drgrpo"),
        )
        for name, claim in ADVANTAGES.items()
    ),
    entry("policy loss grpo", FIRST, refereed(tunix_loss())),
    entry(
        "policy loss grpo, loss_algo=gspo-token",
        FIRST,
        refereed(tunix_loss(loss_algo="gspo-token")),
    ),
    entry(
        "policy loss ppo",
        "a mean over the batch's tokens",
        refereed(tunix_loss(policy="ppo"), up_to_scale=True),
    ),
    entry(
        "policy loss ppo, dual clip",
        "a mean over the batch's tokens",
        refereed(tunix_loss(policy="ppo", epsilon_c=3.0), up_to_scale=True),
    ),
    *(
        entry(
            f"aggregation {name}", claim, refereed(tunix_loss(loss_agg_mode=name), up_to_scale=True)
        )
        for name, claim in AGGREGATIONS.items()
    ),
    *(
        entry(f"KL loss {name}", claim, refereed(tunix_loss(kl_loss_mode=name), DIVERGENCE))
        for name, claim in DIVERGENCES.items()
    ),
    entry(
        "policy loss grpo, temperature=0.7",
        "the policy gradient at the first step",
        refereed(tunix_loss(), TEMPERED),
    ),
    entry(
        "policy loss grpo, num_iterations=2, temperature=0.7",
        "the policy gradient at the first step",
        refereed(tunix_loss(repeated=True, num_iterations=2), TEMPERED),
    ),
    entry(
        "policy loss ppo, temperature=0.7",
        "a mean over the batch's tokens",
        refereed(tunix_loss(policy="ppo"), TEMPERED, up_to_scale=True),
    ),
)
