"""Four families of black boxes with discrete inputs: QUBO in blocks, schedules, MAX-SAT, and
architectures.

Every instance is made from its number alone and evaluates a whole batch of points: int64 [N, K] ->
float64 [N].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class BlackBox:
    """An instance, to be maximised."""

    family: str
    instance: int
    sizes: tuple[int, ...]
    f: Callable[[Array], Array]


BLOCKS, BLOCK = 40, 4


def qubo(instance: int) -> BlackBox:
    """x'Qx of a normal Q over 40 blocks of 4 bits, one bit of each block set: 40 variables, and a
    term for each of them and for each of their 780 pairs.
    """
    rng = np.random.default_rng([4, instance])
    bits = BLOCKS * BLOCK
    coupling = np.triu(rng.normal(size=(bits, bits)))
    offset = BLOCK * np.arange(BLOCKS)

    def f(z: Array) -> Array:
        on = z + offset
        return coupling[on[:, :, None], on[:, None, :]].sum((1, 2))

    return BlackBox("QUBO", instance, (BLOCK,) * BLOCKS, f)


JOBS, MACHINES, CLASSES_OF_PRIORITY, KINDS = 40, 5, 4, 4


def schedule(instance: int) -> BlackBox:
    """Minus the weighted lateness of 40 jobs on five unrelated machines, with set-up times.

    A job has two choices: its machine, and one of four classes of priority. Each machine does its
    jobs in the order of their classes, and of their due times within one; a change to another kind
    of job takes time, which depends on both kinds.
    """
    rng = np.random.default_rng([5, instance])
    duration = rng.integers(5, 30, (JOBS, MACHINES)).astype(np.float64)
    setup = rng.integers(5, 25, (KINDS, KINDS)) * (1.0 - np.eye(KINDS))
    kind = rng.integers(0, KINDS, JOBS)
    weight = rng.integers(1, 6, JOBS)
    due = rng.uniform(0, 0.6 * duration.mean() * JOBS / MACHINES, JOBS)
    by_due = due.argsort().argsort()

    def f(z: Array) -> Array:
        machine, priority = z[:, :JOBS], z[:, JOBS:]
        order = (priority * JOBS + by_due).argsort(1)
        rows = np.arange(len(z))
        clock, last = np.zeros((len(z), MACHINES)), np.full((len(z), MACHINES), -1)
        lateness = np.zeros(len(z))
        for job in order.T:
            on = machine[rows, job]
            before = last[rows, on]
            change = np.where(before < 0, 0.0, setup[before, kind[job]])
            clock[rows, on] += change + duration[job, on]
            last[rows, on] = kind[job]
            lateness += weight[job] * np.maximum(0.0, clock[rows, on] - due[job])
        return -lateness / 100

    return BlackBox("schedule", instance, (MACHINES,) * JOBS + (CLASSES_OF_PRIORITY,) * JOBS, f)


def maxsat(instance: int) -> BlackBox:
    """Satisfied clauses of a uniform random 3-SAT formula with 100 variables and 430 clauses.

    Each clause has three different variables, each negated with probability 1/2. Reference:
    Mitchell, Selman and Levesque, Hard and easy distributions of SAT problems, AAAI 1992; the
    hardest have about 4.3 clauses per variable.
    """
    rng = np.random.default_rng([2, instance])
    variables = np.stack([rng.choice(100, 3, replace=False) for _ in range(430)])
    wanted = rng.integers(0, 2, (430, 3))

    def f(z: Array) -> Array:
        return (z[:, variables] == wanted).any(-1).sum(-1).astype(np.float64)

    return BlackBox("MAX-SAT", instance, (2,) * 100, f)


IMAGES, CLASSES, WIDTH = 400, 8, 16
OPERATIONS = (
    lambda x, w: np.zeros_like(x),
    lambda x, w: x,
    lambda x, w: np.maximum(x @ w, 0),
    lambda x, w: np.tanh(x @ w),
    lambda x, w: np.sin(2 * (x @ w)),
    lambda x, w: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3),
)


def architecture(instance: int) -> BlackBox:
    """Validation accuracy of a cell with five nodes, in percent: 10 edges with six operations each,
    and five options.

    The edges j -> i of a directed acyclic graph carry nothing, the identity, one of three random
    layers, or a normalisation; a node adds up what arrives, and the last four nodes feed a linear
    read-out whose four masks and ridge are choices too. Weights are random, fixed by the instance,
    and only the read-out is trained, by least squares: the accuracy is deterministic, and costs a
    millisecond. The task is a mixture of eight bent Gaussians.
    """
    rng = np.random.default_rng([3, instance])
    edges = [(j, i) for i in range(1, 5) for j in range(i)]
    weights = rng.normal(size=(len(edges), WIDTH, WIDTH)) / np.sqrt(WIDTH)
    label = rng.integers(0, CLASSES, 2 * IMAGES)
    x = rng.normal(size=(2 * IMAGES, WIDTH)) + 0.35 * rng.normal(size=(CLASSES, WIDTH))[label]
    x = (
        x
        + 0.5
        * np.sin(1.5 * x @ rng.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH))
        * (label % 2 * 2 - 1)[:, None]
    )
    target = np.eye(CLASSES)[label]
    ridges = np.array([0.01, 1.0, 100.0])
    known: dict[bytes, float] = {}

    def accuracy(z: Array) -> float:
        nodes = [x]
        for i in range(1, 5):
            arriving = [
                OPERATIONS[z[e]](nodes[j], weights[e]) for e, (j, to) in enumerate(edges) if to == i
            ]
            nodes.append(sum(arriving) / np.sqrt(i))
        read = [
            np.ones((2 * IMAGES, 1)),
            *(node for node, on in zip(nodes[1:], z[10:14], strict=True) if on),
        ]
        features = np.concatenate(read, 1)
        train, valid = features[:IMAGES], features[IMAGES:]
        ridge = ridges[z[14]] * np.eye(features.shape[1])
        readout = np.linalg.solve(train.T @ train + ridge, train.T @ target[:IMAGES])
        return 100 * float(((valid @ readout).argmax(-1) == label[IMAGES:]).mean())

    def f(z: Array) -> Array:
        for row in z:
            if (key := row.tobytes()) not in known:
                known[key] = accuracy(row)
        return np.array([known[row.tobytes()] for row in z])

    return BlackBox("architecture", instance, (6,) * 10 + (2,) * 4 + (3,), f)


FAMILIES: dict[str, Callable[[int], BlackBox]] = {
    "QUBO": qubo,
    "schedule": schedule,
    "MAX-SAT": maxsat,
    "architecture": architecture,
}
