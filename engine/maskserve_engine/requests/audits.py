"""A guard against drift: some cached edits are repeated without the cache and compared.

A sampled share of cached edits is kept with its result, and computed once more by a dense row when
the engine has nothing else to do. The *drift* of an edit is how far the cached latents lie from the
dense ones inside the mask: root mean square of the difference over that of the dense latents. A
template of which one edit drifted beyond the limit runs dense from then on.

Used by the engine thread only.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from maskserve_common.config import CacheConfig
from maskserve_common.contracts.settings import PRIORITIES
from maskserve_common.logs import about
from maskserve_common.lru_cache import LruCache
from maskserve_common.observations import Observations
from maskserve_engine.base.job import EditJob
from maskserve_engine.batch.transfer import HostCopy

_log = logging.getLogger(__name__)
_WAITING = 8
"""Edits kept for an idle moment; each holds its encodings and latents."""
_REMEMBERED = 4096
"""Templates whose drift is kept."""
_LABELLED = 64
"""Most templates with a histogram on the metrics page."""


@dataclass(frozen=True, slots=True)
class Audit:
    """A cached edit to repeat without the cache."""

    key: str
    """Key of the template's entries."""
    job: EditJob
    latents: HostCopy
    """[C, h, w] final latents of the cached row."""

    def dense_job(self) -> EditJob:
        """Return the edit with a new id, after all others and without a client."""
        settings = structs.replace(
            self.job.request.settings,
            deadline_ms=None,
            priority=PRIORITIES[0],
            progress=False,
            preview_every=0,
        )
        name = f"audit#{self.job.request.request_id}"  # no client's id has a `#`
        return replace(
            self.job,
            request=replace(self.job.request, request_id=name, settings=settings, due_ms=None),
        )


@dataclass(slots=True)
class _Drift:
    audits: int = 0
    total: float = 0.0
    largest: float = 0.0


class Audits:
    """Chooses the edits to repeat, and judges templates by the results.

    Args:
        config: `[cache]`.
        observations: histograms that get the drift of each audited edit.
    """

    def __init__(self, config: CacheConfig, observations: Observations) -> None:
        self._share, self._limit = config.audit_share, config.audit_limit
        self._observations = observations
        self._random = random.Random()
        self._waiting: deque[Audit] = deque(maxlen=_WAITING)
        self._compared: deque[tuple[Audit, HostCopy]] = deque()
        """Repeated audits whose latents are still being copied to the host."""
        self._drifts: LruCache[str, _Drift] = LruCache(_REMEMBERED)
        self._labels: set[str] = set()
        self.done = 0
        self.distrusted = 0
        """Number of templates beyond the limit."""

    def offer(self, key: str, job: EditJob, latents: HostCopy) -> None:
        """Sample a cached edit that has ended; the oldest kept edit makes room."""
        if self._random.random() < self._share:
            self._waiting.append(Audit(key, job, latents))

    def next(self) -> Audit | None:
        """Return the next edit to repeat; None: there is none."""
        return self._waiting.popleft() if self._waiting else None

    def compare(self, audit: Audit, dense: HostCopy) -> None:
        """Add the dense result of an edit; it is judged once both latents are on the host."""
        self._compared.append((audit, dense))
        self.judge_arrived()

    def judge_arrived(self) -> None:
        while self._compared and self._compared[0][1].arrived():
            audit, dense = self._compared.popleft()
            self.judge(audit, dense.array())

    def judge(self, audit: Audit, dense: NDArray[np.float32]) -> float:
        """Return the drift of an edit, and record it if it is a number.

        Args:
            audit: the edit.
            dense: [C, h, w] its latents computed without the cache.
        """
        drift = drift_of(audit.latents.array(), dense, audit.job.edit_mask)
        if not math.isfinite(drift):
            return drift  # the edit has overflowed; its client got an error
        drift_record = self._drifts.get(audit.key) or _Drift()
        self._drifts.put(audit.key, drift_record)
        if drift_record.largest <= self._limit < drift:
            self.distrusted += 1
            _log.warning(
                "template %s: an edit drifted by %.3f, [cache] audit_limit is %.3f; its edits run "
                "dense from now on",
                audit.job.request.template_id,
                drift,
                self._limit,
                extra=about(audit.job.request.request_id),
            )
        drift_record.audits += 1
        drift_record.total += drift
        drift_record.largest = max(drift_record.largest, drift)
        self.done += 1
        self._observations.add("cache_drift", drift, self._label(audit.job.request.template_id))
        return drift

    def over_limit(self, key: str) -> float | None:
        """Return the largest drift of a template beyond the limit; None for any other."""
        drift_record = self._drifts.get(key)
        return (
            drift_record.largest
            if drift_record is not None and drift_record.largest > self._limit
            else None
        )

    def figures(self, key: str) -> dict[str, float | int | bool]:
        """Return a template's audit figures, for people; empty before its first audit."""
        drift_record = self._drifts.get(key)
        if drift_record is None:
            return {}
        return {
            "audits": drift_record.audits,
            "drift_mean": round(drift_record.total / drift_record.audits, 4),
            "drift_max": round(drift_record.largest, 4),
            "runs_dense": drift_record.largest > self._limit,
        }

    def counters(self) -> dict[str, float]:
        return {"audits_total": self.done, "cache_distrusts_total": self.distrusted}

    def _label(self, template_id: str) -> str:
        """Return the template's label, or `other` beyond the first ones: the metrics page must not
        grow with what clients send.
        """
        label = template_id[:12]
        if label not in self._labels and len(self._labels) >= _LABELLED:
            return "other"
        self._labels.add(label)
        return label


def drift_of(
    cached: NDArray[np.float32], dense: NDArray[np.float32], edit_mask: NDArray[np.uint8]
) -> float:
    """Return the difference of latents [C, h, w] under the mask [H, W], relative to the dense
    ones.
    """
    _, h, w = dense.shape
    height, width = edit_mask.shape
    under = edit_mask.reshape(h, height // h, w, width // w).max(axis=(1, 3)) > 0
    difference, size = (cached - dense)[:, under], dense[:, under]
    return float(np.sqrt(np.square(difference).mean() / max(float(np.square(size).mean()), 1e-12)))
