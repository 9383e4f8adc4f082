"""Everything that SkyRL's registries export: advantages, policy losses, reductions and divergences.

Each is judged as a part of a whole loss whose other parts are right: leave-one-out advantages, the
clipped loss ("regular"), and the reduction that divides each sequence's sum by a constant. Policy
losses of SkyRL are sums; its trainer scales the advantages first
(`apply_loss_reduction_to_advantages_minibatch`).

The package declares Python 3.12, but the judged modules run under 3.11: what does not is the
`__init__` of `skyrl.backends`, by which its server is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import arsm
from arsm.referee import Objective, TrainerBatch
from arsm.referee.worlds import TrainerLoss
from arsm_experiments.ecosystem.entry import Entry, Found, from_package, in_columns, refereed
from arsm_experiments.ecosystem.padded import padded_answers
from arsm_experiments.ecosystem.partly import without_init

VERSION = "0.4.0"
RIGHT = "seq_mean_token_sum_norm"
DIVERGENCE = Objective(beta=0.3)
STALE = Objective(stale=True)
ANY_PYTHON = "--no-deps --ignore-requires-python"
REQUIRES = (
    "ray",
    "loguru",
    "jaxtyping",
    "omegaconf",
    "pandas",
    "pydantic",
    f"{ANY_PYTHON} skyrl=={VERSION}",
    f"{ANY_PYTHON} skyrl-gym=={VERSION}",
)


def algorithms() -> Any:
    """SkyRL's module of algorithms."""
    without_init("skyrl.backends")
    return from_package("skyrl.backends.skyrl_train.utils.ppo_utils")


def skyrl_loss(
    advantage: str = "rloo",
    policy: str = "regular",
    reduction: str = RIGHT,
    kl_loss: str = "",
    kl_reward: str = "",
    by_deviation: bool = True,
    correction: dict[str, Any] | None = None,
    parts: dict[str, dict[str, Any]] | None = None,
    stale: bool = False,
) -> Callable[[], TrainerLoss]:
    """A whole loss of SkyRL's own parts.

    `correction` are options of its off-policy correction, `parts` those of nested configurations.
    With `stale`, the policy before the update is the trained one, and the sampler an older one.
    """

    def build() -> TrainerLoss:
        algos = algorithms()
        reduced = from_package("skyrl.backends.skyrl_train.utils.torch_utils").masked_mean
        config = algorithm_config(policy, reduction, correction or {}, parts or {})

        def loss(batch: TrainerBatch) -> Tensor:
            answers = padded_answers(batch)
            mask, log_p = answers.mask, answers.log_p
            if kl_reward:
                kl = algos.compute_approx_kl(log_p.detach(), answers.reference, mask, kl_reward)
                answers = answers._replace(rewards=answers.rewards - batch.beta * kl)
            advantages, _ = algos.compute_advantages_and_returns(
                answers.rewards,
                mask,
                from_package("numpy").array(batch.group.tolist()),
                advantage,
                config,
                values=0.1 * mask,
                grpo_norm_by_std=by_deviation,
            )
            value, _ = algos.PolicyLossRegistry.get(policy)(
                log_p,
                log_p.detach() if stale else answers.sampler,
                scaled_advantages(advantages, mask, reduction, batch.answers),
                config,
                loss_mask=mask,
                rollout_logprobs=answers.sampler,
            )
            if kl_loss:  # as its worker adds it
                kl = algos.compute_approx_kl(log_p, answers.reference, mask, kl_loss)
                value = value + batch.beta * reduced(kl, mask, dim=-1).mean()
            return value

        return loss

    return build


def algorithm_config(
    policy: str, reduction: str, correction: dict[str, Any], parts: dict[str, dict[str, Any]]
) -> Any:
    """SkyRL's configuration, with options of its off-policy correction and of nested parts."""
    config = from_package("skyrl.train.config").AlgorithmConfig(
        policy_loss_type=policy, loss_reduction=reduction
    )
    for name, value in correction.items():
        setattr(config.off_policy_correction, name, value)
    for part, options in parts.items():
        for name, value in options.items():
            setattr(getattr(config, part), name, value)
    return config


def scaled_advantages(advantages: Tensor, mask: Tensor, reduction: str, answers: int) -> Tensor:
    """Advantages by which a sum over tokens becomes the reduction, as SkyRL's trainer does."""
    rows = len(mask)
    return algorithms().apply_loss_reduction_to_advantages_minibatch(
        advantages,
        mask,
        reduction,
        micro_batch_size=answers,
        max_seq_len=1,
        prompt_boundaries=[(i, i + answers) for i in range(0, rows, answers)],
    )


def entry(name: str, claim: str, run: Callable[[], Found]) -> Entry:
    """An entry of SkyRL."""
    return Entry(f"skyrl: {name}", "skyrl", "skyrl", claim, run, REQUIRES)


def same_as_cispo() -> Found:
    """`rollout_is` against `cispo` with the same anchor and limits, at a sampler that is stale."""
    limits = {
        "cispo_anchor": "rollout",
        "cispo_eps_clip_low": 0.2,
        "cispo_eps_clip_high": 0.2,
    }
    cispo = skyrl_loss(policy="cispo", parts={"cispo": limits}, stale=True)()
    audit = arsm.audit_sequences(
        skyrl_loss(policy="rollout_is", stale=True)(),
        target=STALE,
        documented=lambda batch: -cispo(batch),
        sign=-1,
    )
    return in_columns(audit)


def imitation() -> Found:
    """It has no reward."""
    return Found("not judged", "It imitates given answers: rewards and advantages are ignored.")


def served() -> Found:
    """The losses in JAX of its server, whose types need Python 3.12."""
    kinds = from_package("skyrl.tinker.types").LOSS_TYPES
    return Found("not judged", f"It imports here; write entries for {', '.join(kinds)}.")


FIRST = "the policy gradient at the first step"
WHITENED = "whitened; no claim of being unbiased"
ADVANTAGES = {
    "gae": WHITENED,
    "grpo": "divided by a standard deviation; no claim of being unbiased",
    "rloo": "leave-one-out: unbiased",
    "reinforce++": "whitened over the batch; no claim of being unbiased",
    "maxrl": "divided by the mean; no claim of being unbiased",
}
POLICIES = {
    "regular": FIRST,
    "dual_clip": FIRST,
    "gspo": "ratios of sequences: the policy gradient at the first step",
    "cispo": FIRST,
    "rollout_is": FIRST,
    "clip_cov": "the policy gradient but for some tokens",
    "kl_cov": "the policy gradient and a penalty on some tokens",
    "sapo": "a soft gate in place of clipping",
    "importance_sampling": FIRST,
}
REDUCTIONS = {
    "token_mean": "a mean over the batch's tokens",
    "token_mean_legacy": "a mean over each micro-batch's tokens",
    "sequence_mean": "a mean over each sequence's tokens",
    RIGHT: "a sum over tokens, divided by a constant",
    "prompt_mean": "a mean over the tokens of each prompt's answers",
}
DIVERGENCES = ("k1", "abs", "k2", "k3")
TRUNCATED = "truncated importance weights; no claim of being unbiased"
ENTRIES = (
    *(
        entry(f"advantages {name}", claim, refereed(skyrl_loss(advantage=name)))
        for name, claim in ADVANTAGES.items()
    ),
    entry(
        "advantages grpo, grpo_norm_by_std=False",
        "the group's mean as the baseline",
        refereed(skyrl_loss(advantage="grpo", by_deviation=False), up_to_scale=True),
    ),
    *(
        entry(f"policy loss {name}", claim, refereed(skyrl_loss(policy=name)))
        for name, claim in POLICIES.items()
    ),
    *(
        entry(
            f"policy loss dppo, {kind}",
            FIRST,
            refereed(skyrl_loss(policy="dppo", parts={"dppo": {"dppo_type": kind}})),
        )
        for kind in ("binary_tv", "binary_kl")
    ),
    entry("policy loss cross_entropy", "imitation", imitation),
    entry(
        "policy loss rollout_is, stale sampler",
        "the right gradient: that of cispo with this anchor, by its docstring",
        same_as_cispo,
    ),
    *(
        entry(f"reduction {name}", claim, refereed(skyrl_loss(reduction=name), up_to_scale=True))
        for name, claim in REDUCTIONS.items()
    ),
    *(
        entry(
            f"KL loss {name}",
            "an estimate of the value",
            refereed(skyrl_loss(kl_loss=name), DIVERGENCE),
        )
        for name in DIVERGENCES
    ),
    *(
        entry(
            f"KL in the reward, {name}",
            "the divergence's gradient" if name == "k1" else "an estimate",
            refereed(skyrl_loss(kl_reward=name), DIVERGENCE),
        )
        for name in DIVERGENCES
    ),
    entry(
        "off-policy correction, tis_ratio_type=token, stale sampler",
        TRUNCATED,
        refereed(skyrl_loss(correction={"tis_ratio_type": "token"}, stale=True), STALE),
    ),
    entry(
        "off-policy correction, tis_ratio_type=sequence, stale sampler",
        "importance weights of whole answers, truncated at 1e9",
        refereed(
            skyrl_loss(
                correction={
                    "tis_ratio_type": "sequence",
                    "sequence_tis_ratio_clip_high": 1e9,
                },
                stale=True,
            ),
            STALE,
        ),
    ),
    *(
        entry(
            f"off-policy correction, sequence_mask_metric={metric}, stale sampler",
            "leaves out answers far from the sampler; no claim of being unbiased",
            refereed(skyrl_loss(correction={"sequence_mask_metric": metric}, stale=True), STALE),
        )
        for metric in ("geometric", "product")
    ),
    entry("tinker losses in JAX", "importance_sampling, ppo, cispo", served),
)
