"""A syncer's own histograms, as its /metrics shows them: what they took in between two looks.

before = await histogram(page, LOOP_LAG)
...                                             what is measured
lag = (await histogram(page, LOOP_LAG)).since(before)
lag.quantile(0.99), lag.share_above(0.02)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from syncer_service.metrics import PREFIX

LOOP_LAG: Final = f"{PREFIX}_event_loop_lag_seconds"
"""How late the syncer's event loop came back from short waits; 20 samples a second."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram.

    Attributes:
        bounds: upper bounds, rising; the last one is infinite.
        counts: samples up to each bound.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    def since(self, before: Buckets) -> Buckets:
        """What came after an earlier look at the same histogram.

        Raises:
            ValueError: it is another histogram, or that of another process.
        """
        counts = tuple(late - early for late, early in zip(self.counts, before.counts, strict=True))
        if self.bounds != before.bounds or min(counts) < 0:
            raise ValueError("the earlier look was at another histogram, or at that of another process")
        return Buckets(self.bounds, counts)

    def quantile(self, share: float) -> float:
        """An upper bound of what `share` of the samples do not exceed: the bound of a bucket; NaN without samples."""
        if not self.counts[-1]:
            return float("nan")
        return next(
            bound for bound, count in zip(self.bounds, self.counts, strict=True) if count >= share * self.counts[-1]
        )

    def share_above(self, bound: float) -> float:
        """Share of the samples above one of the bounds; NaN without samples.

        Raises:
            ValueError: it is none of them.
        """
        if bound not in self.bounds:
            raise ValueError(f"bound = {bound:g}: the histogram's are {', '.join(f'{b:g}' for b in self.bounds)}")
        return 1 - self.counts[self.bounds.index(bound)] / self.counts[-1] if self.counts[-1] else float("nan")


async def histogram(page: str, name: str) -> Buckets:
    """A histogram without labels of a running syncer.

    Args:
        page: URL of its status page, "http://127.0.0.1:8080/".
        name: of the histogram, without "_bucket".

    Raises:
        KeyError: the syncer has none of that name.
    """
    return parsed(await _exposition(page), name)


async def readings(page: str) -> dict[str, float]:
    """All samples of a running syncer's own metrics, by name and labels as exposed, without the prefix.

    Args:
        page: URL of its status page.
    """
    pairs = (line.rsplit(" ", 1) for line in (await _exposition(page)).splitlines() if line.startswith(f"{PREFIX}_"))
    return {name.removeprefix(f"{PREFIX}_"): float(value) for name, value in pairs}


async def _exposition(page: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{page}metrics") as answer:
        answer.raise_for_status()
        return await answer.text()


def parsed(exposition: str, name: str) -> Buckets:
    """A histogram without labels from the text of /metrics.

    Raises:
        KeyError: there is none of that name.
    """
    for family in text_string_to_metric_families(exposition):
        if family.name == name:
            found = [sample for sample in family.samples if sample.name == f"{name}_bucket"]
            bounds = tuple(float(sample.labels["le"]) for sample in found)
            return Buckets(bounds, tuple(sample.value for sample in found))
    raise KeyError(f"no histogram {name!r}")
