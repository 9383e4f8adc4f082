"""Joining a Ray cluster."""

from __future__ import annotations

import os
import socket
from typing import Any

ANSWER_WITHIN = 5.0
"""Seconds until an address that does not answer is refused."""


def import_ray() -> Any:
    """Import Ray, or say how to install it."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ValueError(
            "The Ray engine needs ray; install it with `pip install 'arsm[cluster]'`."
        ) from None
    return ray


def join_cluster(workers: int | None, address: str | None) -> tuple[Any, bool, int]:
    """Ray, whether it was started here, and the number of workers: `workers`, or one
    per CPU of the cluster.

    Joins the cluster at HOST:PORT, or starts a local one; an existing connection of
    this process is reused.
    """
    ray = import_ray()
    start = not ray.is_initialized()
    if start:
        if address is not None:
            _check_answers(address)
        options: dict[str, Any] = {"num_cpus": workers} if address is None and workers else {}
        ray.init(
            address=address or "local", log_to_driver=False, include_dashboard=False, **options
        )
    return ray, start, workers or int(ray.cluster_resources().get("CPU", os.cpu_count() or 1))


def _check_answers(address: str) -> None:
    """Check the address first: Ray itself would wait for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f'"{address}" is no address of a Ray cluster; write HOST:PORT.')
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_WITHIN).close()
    except OSError as error:
        raise ValueError(
            f"Nothing answers at {address} ({error}); start a cluster there with `ray start "
            "--head`, or leave the address out for a local one."
        ) from None
