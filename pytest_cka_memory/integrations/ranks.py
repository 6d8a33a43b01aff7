"""Which rank of a job of torchrun this process is."""

import os
from collections.abc import Mapping
from typing import NamedTuple


class Rank(NamedTuple):
    """One process of a job that torchrun started."""

    number: int
    """From 0, over all machines."""
    world_size: int
    """Number of ranks."""
    local: int
    """From 0, on this machine."""
    attempt: str
    """How often torchrun has restarted the ranks; separates their data from earlier attempts."""

    @property
    def name(self) -> str:
        """The rank as reports write it."""
        return f"rank {self.number}"


def this_rank(environ: Mapping[str, str] = os.environ) -> Rank | None:
    """Return the rank of this process; None outside torchrun, and if there is only one rank.

    ``RANK`` and ``WORLD_SIZE`` alone are not enough: clusters set them in every process of a job.
    """
    if "TORCHELASTIC_RUN_ID" not in environ or int(environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return Rank(
        number=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local=int(environ["LOCAL_RANK"]),
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
