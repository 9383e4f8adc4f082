"""Everything that verl's registries export: advantages, policy losses, aggregations and
divergences.

Each is judged as a part of a whole loss whose other parts are right: leave-one-out advantages, the
clipped loss ("vanilla"), and the aggregation that sums over tokens and averages over sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arsm.referee import Objective, TrainerBatch
from arsm.referee.worlds import TrainerLoss
from arsm_experiments.ecosystem.entry import Entry, Found, from_package, refereed
from arsm_experiments.ecosystem.padded import PaddedAnswers, padded_answers, widened

PACKAGE, VERSION = "verl", "0.9.1"
OLD = "0.7.0"
"""The last release whose `seq-mean-token-sum-norm` left the mean out (verl 5417)."""
RIGHT = "seq-mean-token-sum"
DIVERGENCE = Objective(beta=0.3)


def verl_loss(
    advantage: str = "rloo",
    policy: str = "vanilla",
    aggregation: str = RIGHT,
    kl_loss: str = "",
    kl_reward: str = "",
    divisor: int | None = None,
    **policy_options: Any,
) -> Callable[[], TrainerLoss]:
    """A whole loss of verl's own parts; `divisor` is its option `loss_scale_factor`."""

    def build() -> TrainerLoss:
        algos = from_package("verl.trainer.ppo.core_algos")
        algorithm = from_package("verl.trainer.config").AlgoConfig()
        actor = actor_config(policy, policy_options, divisor)

        def loss(batch: TrainerBatch) -> Tensor:
            answers = padded_answers(batch)
            if kl_reward:
                kl = algos.kl_penalty(answers.log_p.detach(), answers.reference, kl_reward)
                rewards = answers.rewards - batch.beta * kl * answers.mask
                answers = answers._replace(rewards=rewards)
            value, _ = algos.get_policy_loss_fn(policy)(
                old_log_prob=answers.sampler,
                log_prob=answers.log_p,
                advantages=advantages_by(advantage, algorithm, batch, answers),
                response_mask=answers.mask,
                loss_agg_mode=aggregation,
                config=actor,
            )
            if kl_loss:
                kl = algos.kl_penalty(answers.log_p, answers.reference, kl_loss)
                value = value + batch.beta * algos.agg_loss(kl, answers.mask, aggregation)
            return value

        return loss

    return build


def actor_config(policy: str, options: dict[str, Any], divisor: int | None) -> Any:
    """verl's configuration of an actor with this policy loss."""
    config = from_package("verl.workers.config")
    actor = config.ActorConfig(
        strategy="fsdp",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=config.PolicyLossConfig(loss_mode=policy, **options),
    )
    if divisor is not None:
        actor.global_batch_info["loss_scale_factor"] = divisor
    return actor


def advantages_by(
    advantage: str, algorithm: Any, batch: TrainerBatch, answers: PaddedAnswers
) -> Tensor:
    """Advantages by a function of verl's registry, which gets the arguments that it names."""
    algos = from_package("verl.trainer.ppo.core_algos")
    squares = batch.logits().detach().softmax(-1).square().sum(-1)
    given = {
        "token_level_rewards": answers.rewards,
        "response_mask": answers.mask,
        "index": from_package("numpy").array(batch.group.tolist()),
        "config": algorithm,
        "values": 0.1 * answers.mask,
        "gamma": 1.0,
        "lam": 1.0,
        "reward_baselines": torch.full_like(batch.rewards, 0.2),
        "old_log_probs": answers.sampler,
        "sum_pi_squared": widened(squares),
    }
    function = algos.get_adv_estimator_fn(advantage)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    found, _ = function(**{name: value for name, value in given.items() if name in names})
    return found


def entry(name: str, claim: str, run: Callable[[], Found], version: str = VERSION) -> Entry:
    """An entry of verl, in the environment of its version; older ones carry it in their name."""
    package, needed = PACKAGE, (f"{PACKAGE}=={version}",)
    if version != VERSION:
        package = f"{PACKAGE} {version}"
        # later ones have lost a name that this version imports
        needed += ("transformers==4.57.3",)
    return Entry(f"{package}: {name}", PACKAGE, PACKAGE, claim, run, needed)


def refused(reason: str) -> Callable[[], Found]:
    """An entry that cannot be judged."""
    return lambda: Found("not judged", reason)


NORMALISED = "divided by a standard deviation; no claim of being unbiased"
ADVANTAGES = {
    "gae": "whitened; no claim of being unbiased",
    "grpo": NORMALISED,
    "grpo_vectorized": NORMALISED,
    "grpo_passk": "advantages of pass@k; another objective",
    "reinforce_plus_plus": "whitened over the batch; no claim of being unbiased",
    "reinforce_plus_plus_baseline": "whitened over the batch; no claim of being unbiased",
    "remax": "unbiased",
    "rloo": "leave-one-out: unbiased",
    "rloo_vectorized": "leave-one-out: unbiased",
    "opo": "the optimal baseline",
    "gpg": "the group's mean as the baseline",
    "optimal_token_baseline": "the optimal baseline of every token",
    "tir_optimal_token_baseline": "the optimal baseline of every token",
}
POLICIES = {
    "vanilla": "the policy gradient at the first step",
    "dppo_tv": "the policy gradient at the first step",
    "dppo_kl": "the policy gradient at the first step",
    "gspo": "ratios of sequences, averaged over their tokens",
    "sapo": "a soft gate in place of clipping",
    "gpg": "the policy gradient",
    "clip_cov": "the policy gradient but for some tokens",
    "kl_cov": "the policy gradient and a penalty on some tokens",
    "geo_mean": "the geometric mean of the tokens' ratios",
    "cispo": "the policy gradient at the first step",
}
AGGREGATIONS = {
    "token-mean": "a mean over the batch's tokens",
    "token-sum": "a sum over all tokens",
    RIGHT: "a sum over tokens, a mean over sequences",
    "seq-mean-token-sum-norm": "a sum over tokens, divided by a constant",
    "seq-mean-token-mean": "a mean over each sequence's tokens",
}
SUM_NORM = "the right gradient: a sum over tokens, a mean over sequences"
KL_LOSSES = ("k1", "abs", "k2", "k3", "k1+", "k3+")
ENTRIES = (
    *(
        entry(f"advantages {name}", claim, refereed(verl_loss(advantage=name)))  #
        for name, claim in ADVANTAGES.items()
    ),
    entry(
        "advantages gdpo",
        "several rewards",
        refused("It needs the rewards of several dimensions for every answer."),
    ),
    *(
        entry(f"policy loss {name}", claim, refereed(verl_loss(policy=name)))
        for name, claim in POLICIES.items()
    ),
    entry(
        "policy loss dro",
        "the policy gradient at the first step",
        refereed(verl_loss(policy="dro", dro_beta=0.1)),
    ),
    entry(
        "policy loss bypass_mode, reinforce, stale sampler",
        "importance weights of whole answers, truncated at 1e9",
        refereed(
            verl_loss(
                policy="bypass_mode",
                rollout_correction={
                    "loss_type": "reinforce",
                    "rollout_is": "sequence",
                    "rollout_is_threshold": 1e9,
                },
            ),
            Objective(stale=True),
        ),
    ),
    entry(
        "policy loss bypass_mode, ppo_clip",
        "the policy gradient at the first step",
        refereed(verl_loss(policy="bypass_mode", rollout_correction={"loss_type": "ppo_clip"})),
    ),
    *(
        entry(f"aggregation {name}", claim, refereed(verl_loss(aggregation=name), up_to_scale=True))
        for name, claim in AGGREGATIONS.items()
    ),
    entry(
        "aggregation seq-mean-token-sum-norm, loss_scale_factor=1",
        SUM_NORM,
        refereed(verl_loss(aggregation="seq-mean-token-sum-norm", divisor=1)),
    ),
    *(
        entry(
            f"KL loss {name}",
            "the right gradient" if name in ("k2", "k1+", "k3+") else "an estimate of the value",
            refereed(verl_loss(kl_loss=name), DIVERGENCE),
        )
        for name in KL_LOSSES
    ),
    entry("KL loss full", "exact", refused("kl_penalty_forward raises a NotImplementedError.")),
    entry(
        "KL in the reward, kl",
        "the divergence's gradient",
        refereed(verl_loss(kl_reward="kl"), DIVERGENCE),
    ),
    entry("KL in the reward, abs", "an estimate", refereed(verl_loss(kl_reward="abs"), DIVERGENCE)),
    entry("KL in the reward, mse", "an estimate", refereed(verl_loss(kl_reward="mse"), DIVERGENCE)),
    entry(
        "KL in the reward, low_var_kl",
        "an estimate",
        refereed(verl_loss(kl_reward="low_var_kl"), DIVERGENCE),
    ),
    entry(
        "aggregation seq-mean-token-sum-norm, loss_scale_factor=1",
        SUM_NORM,
        refereed(verl_loss(aggregation="seq-mean-token-sum-norm", divisor=1)),
        OLD,
    ),
)
