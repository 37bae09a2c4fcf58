"""One Ray cluster for all tests of a session, which a runtime joins instead of starting its own."""

from __future__ import annotations

import logging
import os

SLOTS = 64


def start() -> None:
    import ray

    from hybridflow.controller.runtime.ray.cluster import SETTINGS, SLOT

    os.environ.update(SETTINGS)
    ray.init(
        address="local",
        num_cpus=4,
        resources={SLOT: SLOTS},
        object_store_memory=1 << 30,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


def stop() -> None:
    import ray

    ray.shutdown()
