"""Everything that OpenRLHF offers for its loss: advantages, policy losses, aggregations,
divergences, and the correction for a sampler that differs.

Advantages come from its `RemoteExperienceMaker`, losses from `PolicyLoss` and `aggregate_loss`, put
together as its actor's training step does. flash-attn, vLLM and DeepSpeed need a GPU; the judged
modules use none of them, and are imported without.

OpenRLHF has no aggregation that sums an answer's tokens. Parts other than aggregations are judged
with the number of rows in place of the number of tokens, so that their own errors show.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from arsm.referee import Objective, TrainerBatch
from arsm.referee.worlds import TrainerLoss
from arsm_experiments.ecosystem.entry import Entry, Found, from_package, refereed
from arsm_experiments.ecosystem.padded import padded_answers
from arsm_experiments.ecosystem.partly import absent, without_init

VERSION = "0.11.2"
DIVERGENCE = Objective(beta=0.3)
STALE = Objective(stale=True)
REQUIRES = ("transformers==5.15.0", f"--no-deps openrlhf=={VERSION}")


def modules() -> tuple[Any, Any, Any, Any]:
    """Its modules of losses, of divergences, of batch sizes and of advantages."""
    for name in ("openrlhf.models", "openrlhf.utils", "openrlhf.trainer.ray"):
        without_init(name)
    absent("deepspeed")
    absent("ray")
    # the experience maker names it in an annotation
    absent("openrlhf.trainer.ray.launcher", "RayActorGroup")
    return (
        from_package("openrlhf.models.loss"),
        from_package("openrlhf.models.utils"),
        from_package("openrlhf.utils.loss_utils"),
        from_package("openrlhf.trainer.ppo_utils.experience_maker"),
    )


def arguments(estimator: str, answers: int, no_std_norm: bool) -> SimpleNamespace:
    """The options of its command line that advantages depend on, at their defaults."""
    advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=no_std_norm)
    return SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        reward=SimpleNamespace(clip_range=None),
        rollout=SimpleNamespace(n_samples_per_prompt=answers),
    )


def openrlhf_loss(
    advantage: str = "rloo",
    aggregation: str = "",
    kl_loss: str = "",
    kl_reward: str = "",
    unbiased_gradient: bool = False,
    no_std_norm: bool = False,
    **policy: Any,
) -> Callable[[], TrainerLoss]:
    """A whole loss of OpenRLHF's own parts; `policy` are options of its `PolicyLoss`.

    Without an aggregation, the tokens' sum is divided by the number of rows.
    """

    def build() -> TrainerLoss:
        losses, utils, sizes, _ = modules()
        by_token = aggregation != "seq-mean-token-mean"
        policy_loss = losses.PolicyLoss(token_level_loss=by_token, **policy)

        def loss(batch: TrainerBatch) -> Tensor:
            answers = padded_answers(batch)
            mask, log_p = answers.mask, answers.log_p
            old = log_p.detach()
            kl = torch.zeros_like(old)
            if kl_reward:
                kl = utils.compute_approx_kl(old, answers.reference, kl_estimator=kl_reward)
            info = sizes.get_loss_batch_info(None, mask)
            if not aggregation:
                info["batch_num_tokens"] = len(mask)
            value, *_ = policy_loss(
                log_p,
                old,
                advantages_by(arguments(advantage, batch.answers, no_std_norm), batch, mask, kl),
                action_mask=mask,
                rollout_log_probs=answers.sampler,
                **info,
            )
            if kl_loss:
                kl = utils.compute_approx_kl(
                    log_p,
                    answers.reference,
                    log_probs_old=old,
                    kl_estimator=kl_loss,
                    unbiased_gradient=unbiased_gradient,
                )
                value = value + batch.beta * losses.aggregate_loss(kl, mask, **info)
            return value

        return loss

    return build


def advantages_by(
    options: SimpleNamespace, batch: TrainerBatch, mask: Tensor, kl: Tensor
) -> Tensor:
    """Advantages by its `RemoteExperienceMaker`."""
    *_, makers = modules()
    strategy = SimpleNamespace(args=options)
    maker = makers.RemoteExperienceMaker(
        None, None, None, None, SimpleNamespace(value=batch.beta), strategy, None
    )
    experience = makers.Experience(
        index=list(range(len(mask))),
        rewards=batch.rewards.clone(),
        action_mask=mask.bool(),
        kl=kl,
        values=0.1 * mask,
        info={},
    )
    (found,) = maker.compute_advantages_and_returns([experience])
    return found.advantages


def entry(name: str, claim: str, run: Callable[[], Found]) -> Entry:
    """An entry of OpenRLHF."""
    return Entry(f"openrlhf: {name}", "openrlhf", "openrlhf", claim, run, REQUIRES)


WHITENED = "whitened over the batch; no claim of being unbiased"
ADVANTAGES = {
    "gae": WHITENED,
    "reinforce": WHITENED,
    "rloo": "leave-one-out: unbiased",
    "reinforce_baseline": WHITENED,
    "dr_grpo": "the group's mean as the baseline",
    "group_norm": "divided by a standard deviation; no claim of being unbiased",
    "flash_reinforce": "the batch's mean as the baseline",
}
AGGREGATIONS = {
    "token-mean": "a mean over the batch's tokens",
    "seq-mean-token-mean": "a mean over each sequence's tokens",
}
ESTIMATORS = ("k1", "k2", "k3")
NO_CLAIM = "no claim of being unbiased"
CORRECTIONS = {
    "off": ({}, "no correction for the sampler; " + NO_CLAIM),
    "token, mask": (
        {"is_correction_level": "token"},
        "leaves out tokens far from the sampler; " + NO_CLAIM,
    ),
    "token, clip": (
        {"is_correction_level": "token", "is_correction_mode": "clip"},
        "truncated importance weights; " + NO_CLAIM,
    ),
    "seq, mask": (
        {"is_correction_level": "seq"},
        "leaves out answers far from the sampler; " + NO_CLAIM,
    ),
    **{
        f"token, mask, {gate}": (
            {
                "is_correction_level": "token",
                "is_correction_gating": gate,
                "is_correction_threshold": [0.0, 0.05],
            },
            "leaves out tokens far from the sampler; " + NO_CLAIM,
        )
        for gate in ("binary_kl", "tv")
    },
}
FIRST = "the policy gradient at the first step"
ENTRIES = (
    *(
        entry(
            f"advantages {name}",
            claim,
            refereed(openrlhf_loss(advantage=name), up_to_scale=name == "dr_grpo"),
        )
        for name, claim in ADVANTAGES.items()
    ),
    entry(
        "advantages reinforce, no_std_norm",
        "the batch's mean as the baseline",
        refereed(openrlhf_loss(advantage="reinforce", no_std_norm=True), up_to_scale=True),
    ),
    entry("policy loss ppo", FIRST, refereed(openrlhf_loss())),
    entry("policy loss ppo, dual_clip=3", FIRST, refereed(openrlhf_loss(dual_clip=3.0))),
    entry(
        "policy loss gspo",
        "ratios of sequences, a mean over each sequence's tokens",
        refereed(openrlhf_loss(policy_loss_type="gspo", aggregation="seq-mean-token-mean")),
    ),
    *(
        entry(
            f"aggregation {name}",
            claim,
            refereed(openrlhf_loss(aggregation=name), up_to_scale=True),
        )
        for name, claim in AGGREGATIONS.items()
    ),
    *(
        entry(
            f"KL loss {name}",
            "an estimate of the value",
            refereed(openrlhf_loss(kl_loss=name), DIVERGENCE),
        )
        for name in ESTIMATORS
    ),
    *(
        entry(
            f"KL loss {name}, unbiased_gradient",
            "the right gradient: that of the reverse divergence",
            refereed(openrlhf_loss(kl_loss=name, unbiased_gradient=True), DIVERGENCE),
        )
        for name in ESTIMATORS
    ),
    *(
        entry(
            f"KL in the reward, {name}",
            "the divergence's gradient" if name == "k1" else "an estimate",
            refereed(openrlhf_loss(kl_reward=name), DIVERGENCE),
        )
        for name in ESTIMATORS
    ),
    *(
        entry(
            f"is_correction token, mask, {gate}, sampler = model",
            "the policy gradient at the first step: an upper bound only",
            refereed(openrlhf_loss(**CORRECTIONS[f"token, mask, {gate}"][0])),
        )
        for gate in ("binary_kl", "tv")
    ),
    *(
        entry(
            f"is_correction {name}, stale sampler", claim, refereed(openrlhf_loss(**options), STALE)
        )
        for name, (options, claim) in CORRECTIONS.items()
    ),
)
