"""Has everything that the registries of trainers export an entry, or a reason why not?

python -m arsm_experiments.ecosystem.coverage --export results/audit

The names are read from the installed packages: registries of verl, SkyRL and tunix; the strings
that a function compares its argument with, where there is no registry; the choices of OpenRLHF's
command line; the options of TRL's configurations that the code of the loss reads; the trainers.
What is neither an entry nor a reason ends the command with an error.
"""

from __future__ import annotations

import argparse
import ast
import csv
import dataclasses
import inspect
import json
import pkgutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from arsm_experiments.ecosystem import ENTRIES, openrlhf, skyrl, trl, tunix, verl
from arsm_experiments.ecosystem.entry import from_package
from arsm_experiments.ecosystem.environments import default_folder, environment_of, variables

Exported = dict[str, list[str]]
"""Names by registry."""


class Line(NamedTuple):
    """What is said about one name."""

    package: str
    registry: str
    name: str
    entry: str
    """The entry that judges it; empty if there is none."""
    reason: str
    """Why there is none."""


# ---------------------------------------------------------------- what the packages export


def compared_with(functions: Iterable[Any], name: str) -> list[str]:
    """All strings with which the code of the functions compares `name` or `something.name`."""
    found: set[str] = set()
    for function in functions:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Compare) and _named(node.left) == name:
                found |= {
                    each.value
                    for other in node.comparators
                    for each in ast.walk(other)
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }
    return sorted(found)


def _named(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def options_of_the_loss(trainer: Any, config: Any) -> list[str]:
    """Options that the trainer's own configuration has and the code from answers to loss reads."""
    arguments = from_package("transformers").TrainingArguments
    own = {f.name for f in dataclasses.fields(config)}
    own -= {f.name for f in dataclasses.fields(arguments)}
    read = {
        node.attr
        for method in METHODS
        for node in ast.walk(
            ast.parse(textwrap.dedent(inspect.getsource(getattr(trainer, method))))
        )
        if isinstance(node, ast.Attribute)
    }
    return sorted(own & read)


METHODS = (
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)


def exported_by_trl() -> Exported:
    """Trainers, and the options and their values on which the losses of GRPO and RLOO depend."""
    package = from_package("trl")
    grpo = from_package("trl.trainer.grpo_trainer").GRPOTrainer
    rloo = from_package("trl.trainer.rloo_trainer").RLOOTrainer
    code = [grpo.__init__, *(getattr(grpo, method) for method in METHODS)]
    return {
        "trainers": sorted(n for n in dir(package) if n.endswith("Trainer")),
        "experimental trainers": sorted(experimental_trainers(from_package("trl.experimental"))),
        "GRPOConfig.loss_type": compared_with(code, "loss_type"),
        "GRPOConfig.scale_rewards": compared_with(code, "scale_rewards"),
        "GRPOConfig.importance_sampling_level": compared_with(code, "importance_sampling_level"),
        "GRPOConfig": options_of_the_loss(grpo, package.GRPOConfig),
        "RLOOConfig": options_of_the_loss(rloo, package.RLOOConfig),
    }


def experimental_trainers(package: Any) -> Iterator[str]:
    """Classes named ...Trainer in the source of the package's modules; none is imported."""
    for module in pkgutil.walk_packages(package.__path__):
        folder = Path(next(iter(package.__path__))) / module.name
        for path in folder.glob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                    continue
                if node.name.endswith("Trainer"):
                    yield f"{module.name}.{node.name}"


def exported_by_verl() -> Exported:
    """verl's two registries, and the names of its aggregations and divergences."""
    algos = from_package("verl.trainer.ppo.core_algos")
    return {
        "advantages": sorted(algos.ADV_ESTIMATOR_REGISTRY),
        "policy losses": sorted(algos.POLICY_LOSS_REGISTRY),
        "aggregations": compared_with([algos.agg_loss], "loss_agg_mode"),
        "divergences": compared_with([algos.kl_penalty_forward], "kl_penalty"),
    }


def exported_by_openrlhf() -> Exported:
    """The choices of its command line that the loss depends on, and its classes of losses."""
    folder = Path(next(iter(from_package("openrlhf").__path__)))
    command = (folder / "cli" / "train_ppo_ray.py").read_text()
    losses = ast.parse((folder / "models" / "loss.py").read_text()).body
    return {
        "losses": [node.name for node in losses if isinstance(node, ast.ClassDef)],
        **{registry: choices_of(command, option) for registry, option in OPTIONS.items()},
    }


OPTIONS = {
    "advantages": "--algo.advantage.estimator",
    "policy losses": "--actor.policy_loss_type",
    "aggregations": "--actor.loss_agg_mode",
    "divergences": "--algo.kl.estimator",
    "is_correction_level": "--algo.advantage.is_correction_level",
    "is_correction_mode": "--algo.advantage.is_correction_mode",
    "is_correction_gating": "--algo.advantage.is_correction_gating",
}
"""Registry -> the option of OpenRLHF's command line."""


def choices_of(source: str, option: str) -> list[str]:
    """The choices that `add_argument(option, choices=[...])` gives in this source."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        first = node.args[0]
        if isinstance(first, ast.Constant) and first.value == option:
            (choices,) = (k.value for k in node.keywords if k.arg == "choices")
            return list(ast.literal_eval(choices))
    raise ValueError(f"there is no option {option}.")


def exported_by_skyrl() -> Exported:
    """SkyRL's two registries, its reductions, divergences and corrections."""
    algos = skyrl.algorithms()
    corrections = from_package("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")
    return {
        "advantages": sorted(algos.AdvantageEstimatorRegistry.list_available()),
        "policy losses": sorted(algos.PolicyLossRegistry.list_available()),
        "dppo_type": compared_with([algos.dppo_policy_loss.__wrapped__], "dppo_type"),
        "reductions": compared_with(
            [algos.apply_loss_reduction_to_advantages_minibatch], "loss_reduction"
        ),
        "divergences": compared_with([algos.compute_approx_kl], "kl_estimator_type"),
        "tis_ratio_type": compared_with([corrections.compute_tis_ratio], "tis_ratio_type"),
        "sequence_mask_metric": compared_with(
            [corrections.compute_sequence_mask], "sequence_mask_metric"
        ),
    }


def exported_by_tunix() -> Exported:
    """tunix's registries, and the names of its aggregations and divergences."""
    package, common = from_package("tunix"), from_package("tunix.rl.common")
    registry = from_package("tunix.rl.function_registry").default_registry
    return {
        "advantages": sorted(registry.list_functions("advantage_estimator")),
        "policy losses": sorted(registry.list_functions("policy_loss_fn")),
        "value losses": sorted(registry.list_functions("value_loss_fn")),
        "reward managers": sorted(registry.list_functions("reward_manager")),
        "loss_algo": compared_with([package.GRPOConfig.__post_init__], "loss_algo"),
        "aggregations": compared_with([common.aggregate_loss], "loss_agg_mode"),
        "divergences": compared_with([common.compute_kl_divergence], "method"),
    }


PACKAGES = {
    "trl": (exported_by_trl, (f"trl=={trl.VERSION}",)),
    "verl": (exported_by_verl, (f"verl=={verl.VERSION}",)),
    "openrlhf": (exported_by_openrlhf, openrlhf.REQUIRES),
    "skyrl": (exported_by_skyrl, skyrl.REQUIRES),
    "tunix": (exported_by_tunix, (f"{tunix.PACKAGE}=={tunix.VERSION}",)),
}

# ---------------------------------------------------------------- what is said about it

BEGINNINGS = {
    "advantages": ("advantages {}",),
    "policy losses": ("policy loss {}",),
    "aggregations": ("aggregation {}",),
    "reductions": ("reduction {}",),
    "divergences": ("KL loss {}", "KL in the reward, {}"),
    "dppo_type": ("policy loss dppo, {}",),
    "tis_ratio_type": ("off-policy correction, tis_ratio_type={}",),
    "sequence_mask_metric": ("off-policy correction, sequence_mask_metric={}",),
    "is_correction_level": ("is_correction {}",),
    "is_correction_mode": ("is_correction token, {}",),
    "is_correction_gating": ("is_correction token, mask, {}",),
    "loss_algo": ("policy loss grpo, loss_algo={}",),
    "GRPOConfig.loss_type": ("GRPO trainer, loss_type={}",),
}
"""Registry -> how the names of its entries begin, behind the package."""
JUDGED = {
    ("loss_algo", "grpo"): "tunix: policy loss grpo",
    ("losses", "PolicyLoss"): "openrlhf: policy loss ppo",
    ("is_correction_gating", "ratio"): "openrlhf: is_correction token, mask, stale sampler",
    ("trainers", "GRPOTrainer"): "trl: GRPO trainer, defaults",
    ("trainers", "RLOOTrainer"): "trl: RLOO trainer, beta = 0",
    ("GRPOConfig.scale_rewards", "group"): "trl: GRPO trainer, defaults",
    ("GRPOConfig.scale_rewards", "batch"): "trl: GRPO trainer, scale_rewards=batch, dr_grpo",
    (
        "GRPOConfig.scale_rewards",
        "none",
    ): "trl: GRPO trainer, loss_type=dr_grpo, scale_rewards=none",
    ("GRPOConfig.importance_sampling_level", "token"): "trl: GRPO trainer, defaults",
    (
        "GRPOConfig.importance_sampling_level",
        "sequence",
    ): "trl: GRPO trainer, importance_sampling_level=sequence, luspo",
    ("GRPOConfig", "beta"): "trl: GRPO trainer, beta = 0.3, dr_grpo",
    ("GRPOConfig", "use_bias_correction_kl"): (
        "trl: GRPO trainer, beta = 0.3, use_bias_correction_kl=False, luspo"
    ),
    ("GRPOConfig", "delta"): "trl: GRPO trainer, delta=1.5, dr_grpo",
    ("GRPOConfig", "off_policy_mask_threshold"): (
        "trl: GRPO trainer, off_policy_mask_threshold=0.5, dr_grpo"
    ),
    ("GRPOConfig", "importance_sampling_level"): (
        "trl: GRPO trainer, importance_sampling_level=sequence, grpo"
    ),
    ("GRPOConfig", "loss_type"): "trl: GRPO trainer, defaults",
    ("GRPOConfig", "scale_rewards"): "trl: GRPO trainer, defaults",
    ("GRPOConfig", "mask_truncated_completions"): (
        "trl: GRPO trainer, mask_truncated_completions, dr_grpo"
    ),
    ("GRPOConfig", "top_entropy_quantile"): (
        "trl: GRPO trainer, top_entropy_quantile=0.5, dr_grpo"
    ),
    ("RLOOConfig", "beta"): "trl: RLOO trainer, beta = 0.3",
    ("RLOOConfig", "normalize_advantages"): "trl: RLOO trainer, normalize_advantages",
}
"""(registry, name) -> the entry that judges it, where its name does not say so."""

PAIRS = "it learns from pairs or labels that are given: no answer is drawn inside the loss"
TEACHER = "it follows a teacher's distribution: there is no reward"
ONE_STEP = "clipping and its parameters do nothing at the first step, where the ratios are 1"
SIZES = "a size, not a formula; the settings vary it"
VLLM = "it corrects for vLLM's probabilities, which need a GPU"
ENTROPY = "the entropy bonus is another objective, off by default"
SHAPE = "the parameter of a gate that has an entry at its default"
INPUTS = "it changes what is read or logged, not the loss"
BRANCH = "mixtures of experts alone have it"
CRITIC = "it trains a critic"
SEVERAL = "it combines several reward functions; the referee has one"
REASONS = {
    **{("losses", name): PAIRS for name in ("DPOLoss", "PairWiseLoss", "LogExpLoss")},
    **{("losses", name): "it imitates given answers" for name in ("GPTLMLoss", "SFTLoss")},
    ("losses", "ValueLoss"): CRITIC,
    ("value losses", "ppo"): CRITIC,
    ("reward managers", "sequence-level"): SEVERAL,
    ("reward managers", "agentic-sequence-level"): SEVERAL,
    ("advantages", "gdpo"): "it needs rewards of several dimensions for every answer",
    ("divergences", "full"): "kl_penalty_forward raises a NotImplementedError",
    **{("trainers", name): PAIRS for name in ("DPOTrainer", "KTOTrainer")},
    ("trainers", "RewardTrainer"): "it trains a reward model",
    ("trainers", "SFTTrainer"): "it imitates given answers",
    ("trainers", "DistillationTrainer"): TEACHER,
    **{
        ("experimental trainers", name): PAIRS
        for name in ("cpo.CPOTrainer", "kto.KTOTrainer", "orpo.ORPOTrainer", "tpo.TPOTrainer")
    },
    **{
        ("experimental trainers", name): TEACHER
        for name in (
            "async_distillation.AsyncDistillationTrainer",
            "distillation.DistillationTrainer",
            "gkd.GKDTrainer",
            "gold.GOLDTrainer",
            "iw_opd.IWOPDTrainer",
            "sdft.SDFTTrainer",
            "sdpo.SDPOTrainer",
            "server_distillation.ServerDistillationTrainer",
        )
    },
    ("experimental trainers", "bema_for_ref_model.DPOTrainer"): PAIRS,
    ("experimental trainers", "online_dpo.OnlineDPOTrainer"): (
        "a preference loss on drawn pairs: it does not claim the gradient of a reward"
    ),
    ("experimental trainers", "a2po.A2POTrainer"): (
        "a regression on advantages: it does not claim the gradient of a reward"
    ),
    ("experimental trainers", "async_grpo.AsyncGRPOTrainer"): (
        "its answers come from a vLLM server, which needs a GPU"
    ),
    ("experimental trainers", "gmpo.GMPOTrainer"): (
        "the geometric mean of the ratios; verl's policy loss geo_mean has an entry"
    ),
    **{
        ("GRPOConfig", name): ENTROPY
        for name in (
            "entropy_coef",
            "entropy_coef_delta",
            "entropy_coef_max",
            "entropy_coef_min",
            "entropy_target",
            "use_adaptive_entropy",
        )
    },
    **{
        ("GRPOConfig", name): SHAPE
        for name in (
            "sapo_temperature_neg",
            "sapo_temperature_pos",
            "vespo_k_neg",
            "vespo_k_pos",
            "vespo_lambda_neg",
            "vespo_lambda_pos",
        )
    },
    **{
        ("GRPOConfig", name): VLLM
        for name in (
            "use_vllm",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
        )
    },
    ("GRPOConfig", "num_iterations"): ONE_STEP,
    ("GRPOConfig", "steps_per_generation"): ONE_STEP,
    ("GRPOConfig", "max_completion_length"): SIZES,
    ("GRPOConfig", "multi_objective_aggregation"): SEVERAL,
    ("RLOOConfig", "mask_truncated_completions"): (
        "as in GRPOConfig, which has an entry: it leaves out answers that were cut off"
    ),
    ("RLOOConfig", "reward_clip_range"): "it changes the reward, and with it the objective",
    **{
        (config, name): reason
        for config in ("GRPOConfig", "RLOOConfig")
        for name, reason in (
            ("epsilon_high", ONE_STEP),
            ("num_generations", SIZES),
            ("num_generations_eval", SIZES),
            ("pad_to_multiple_of", SIZES),
            ("reward_weights", SEVERAL),
            ("router_aux_loss_coef", BRANCH),
            ("chat_template_kwargs", INPUTS),
            ("log_multimodal", INPUTS),
        )
    },
}
"""(registry, name) -> why there is no entry."""


def answered(package: str, exported: Exported) -> list[Line]:
    """A line for every exported name: its entry, or the reason, or neither."""
    names = [entry.name for entry in ENTRIES]
    lines = []
    for registry, parts in exported.items():
        for part in parts:
            entry = JUDGED.get((registry, part), "")
            for beginning in BEGINNINGS.get(registry, ()):
                # the whole name, or the name and a comma
                wanted = f"{package}: {beginning.format(part)}"
                found = [name for name in names if name == wanted or name.startswith(wanted + ",")]
                entry = entry or next(iter(found), "")
            if entry and entry not in names:
                raise ValueError(f"{registry} {part}: there is no entry {entry!r}.")
            reason = REASONS.get((registry, part), "")
            lines.append(Line(package, registry, part, entry, reason))
    return lines


# ---------------------------------------------------------------- the command


def read_apart(package: str, environments: Path) -> Exported:
    """What the package exports, read in the environment made for it."""
    python = environment_of(PACKAGES[package][1], environments)
    code = (
        "import json; from arsm_experiments.ecosystem.coverage import PACKAGES; "
        f"print('exported', json.dumps(PACKAGES[{package!r}][0]()))"
    )
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, env=variables(), check=False
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("exported ")), None)
    if line is None:
        raise RuntimeError(f"{package} could not be read: {done.stderr[-500:]}")
    return json.loads(line.removeprefix("exported "))


def main(arguments: list[str] | None = None) -> None:
    """Print how much is covered, write coverage.csv, and fail if something is not."""
    parser = argparse.ArgumentParser(
        prog="python -m arsm_experiments.ecosystem.coverage", description=__doc__
    )
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="write FOLDER/coverage.csv")
    parser.add_argument("--environments", type=Path, default=default_folder(), metavar="FOLDER")
    given = parser.parse_args(arguments)
    lines = [
        line
        for package in PACKAGES
        for line in answered(package, read_apart(package, given.environments))
    ]
    if given.export:
        with (given.export / "coverage.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Line._fields)
            writer.writerows(lines)
    judged = sum(bool(line.entry) for line in lines)
    missing = [line for line in lines if not line.entry and not line.reason]
    print(f"{len(lines)} names: {judged} have an entry, {len(lines) - judged} a reason why not.")
    if missing:
        sys.exit(
            "Neither entry nor reason: " + "; ".join(f"{m.registry} {m.name}" for m in missing)
        )


if __name__ == "__main__":
    main()
