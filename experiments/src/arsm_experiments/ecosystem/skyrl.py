"""SkyRL's advantages and policy losses, where they can be imported."""

from __future__ import annotations

from arsm_experiments.ecosystem.entry import Entry, Found, from_package


def registries() -> Found:
    """Its registries do not import under Python 3.11 with the pydantic that pip chooses."""
    found = from_package("skyrl.backends.skyrl_train.utils.ppo_utils")
    names = [
        *found.AdvantageEstimatorRegistry.list_available(),
        *found.PolicyLossRegistry.list_available(),
    ]
    return Found("not judged", f"It imports here; write entries for {', '.join(map(str, names))}.")


ENTRIES = (
    Entry("skyrl: registries", "skyrl", "skyrl", "advantages and policy losses", registries),
)
