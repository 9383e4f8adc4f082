"""Write estimates.json from the definitions: python -m tests.golden.write."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from arsm.noise import argmin_sample, dirichlet
from tests import by_definition

GENERATOR = torch.Generator().manual_seed(2019)
ROWS, SAMPLES, VARIABLES, CATEGORIES = 2, 5, 2, 4


def main() -> None:
    logits = torch.randn(ROWS, VARIABLES, CATEGORIES, dtype=torch.float64, generator=GENERATOR)
    log_pi = dirichlet(logits, GENERATOR, SAMPLES)
    table = torch.randn(CATEGORIES, CATEGORIES, dtype=torch.float64, generator=GENERATOR) + 2
    each = torch.randint(CATEGORIES, (ROWS, VARIABLES), generator=GENERATOR)
    common = torch.rand(ROWS, CATEGORIES, generator=GENERATOR).argsort(-1)[:, :2]
    draws = argmin_sample(logits.unsqueeze(1).expand_as(log_pi), log_pi)
    z, first = draws[:, 0], log_pi[:, 0]

    def f(points: Tensor) -> Tensor:
        return table[points[:, 0], points[:, 1]]

    def case(words: str, gradients: list[Tensor], **more: list) -> dict:
        return {
            "estimator": words,
            "z": z.tolist(),
            "value": f(z).tolist(),
            "grad": torch.stack(gradients).tolist(),
        } | more

    rows = range(ROWS)
    cases = [
        case("arsm", [by_definition.arsm(logits[b], first[b], f) for b in rows]),
        case("arsm:pooled=True", [by_definition.pooled_arsm(logits[b], first[b], f) for b in rows]),
        case(
            "arsm:references=2",
            [by_definition.arsm(logits[b], first[b], f, common[b].tolist()) for b in rows],
            references=common.tolist(),
        ),
        case(
            "ars",
            [by_definition.ars(logits[b], first[b], each[b], f) for b in rows],
            references=each.tolist(),
        ),
        case(
            f"rloo:samples={SAMPLES},ridge=1.0",
            [by_definition.ridge_rloo(logits[b], draws[b], f(draws[b]), 1.0) for b in rows],
            z=draws.tolist(),
            value=[float(f(draws[b]).mean()) for b in rows],
        ),
    ]
    golden = {
        "logits": logits.tolist(),
        "log_pi": log_pi.tolist(),
        "f": table.tolist(),
        "cases": cases,
    }
    (Path(__file__).parent / "estimates.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
