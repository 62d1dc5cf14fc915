"""Which templates are primed, which edits may use them, and who waits for that (design §4).

Plain bookkeeping on the engine thread: the engine asks what to do with a job, and tells what became
of a priming row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from maskserve_core.config import CacheConfig
from maskserve_core.contracts.entry_key import Anchor, TemplateKey, nearest_anchor
from maskserve_engine.cache.entries import AnchorEntry
from maskserve_engine.cache.priming_prompt import PRIMING_PROMPT
from maskserve_engine.cache.store import MemoryStore
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.job import Conditioning, EditJob

_REMEMBERED_SIGHTS = 4096


@dataclass(frozen=True, slots=True)
class Route:
    """How an edit runs."""

    how: str
    """`dense`, `cached`, or `wait` (until its template is primed)."""
    outcome: str
    """What META says: `hit`, `miss` or `off`."""
    entries: tuple[AnchorEntry | None, ...] = ()
    """Per step, when cached."""
    prime: bool = False
    """Whether the template should now be primed."""


@dataclass(slots=True)
class Priming:
    """A template on its way into the store."""

    key: str
    template_id: str
    anchors: tuple[Anchor, ...]
    job: EditJob
    """The edit (or registration) whose encodings are used."""
    noise_seed: int
    waiting: list[str] = field(default_factory=list)
    """Request ids of edits that wait for it."""


class TemplateCache:
    """Decides hits, priming and pins over one store.

    Args:
        config: `[cache]`.
        adapter: the model family.
        model_revision: digest of the served weights.
        dtype: of the model, for the key.
        default_steps: schedule on which anchors are chosen.
        prompt: reads the priming prompt's embedding; None while it is not known.
    """

    def __init__(
        self,
        config: CacheConfig,
        adapter: Adapter,
        model_revision: str,
        dtype: str,
        default_steps: int,
        prompt: Callable[[], Conditioning | None],
    ) -> None:
        self.config, self.adapter = config, adapter
        self.model_revision, self.dtype = model_revision, dtype
        self.default_steps = default_steps
        self.prompt = prompt
        self.store = MemoryStore(config.budget_bytes)
        self.hits = self.misses = 0
        self.primed = self.unprimed = 0
        self.priming: dict[str, Priming] = {}
        self._sights: OrderedDict[str, int] = OrderedDict()
        self._ids: dict[str, str] = {}  # entry key -> template id, for people
        self._pinned: set[str] = set()  # template ids
        # Sights from which a template that could not be primed is tried again.
        self._retry_at: dict[str, int] = {}
        self._listed: tuple[str, ...] | None = None
        """What `template_ids` says; None since something was stored, evicted or begun."""

    def key_of(self, job: EditJob) -> str:
        """The name of the entries that fit this edit."""
        settings = job.request.settings
        guidance = settings.guidance_scale if self.adapter.facts.guidance == "embedded" else None
        return TemplateKey(
            model_revision=self.model_revision,
            adapters=(),
            pixels_id=job.request.pixels_id or job.request.template_id,
            noise_seed=self.noise_seed(job),
            priming_prompt=PRIMING_PROMPT,
            guidance=guidance,
            text_tokens=len(job.conditioning["prompt_embeds"]),
            dtype=self.dtype,
            entry_kind=self.config.entry_kind,
            entry_format=self.config.entry_format,
        ).digest()

    def noise_seed(self, job: EditJob) -> int:
        """Seed of the template's own noise: a function of its pixels."""
        return int((job.request.pixels_id or job.request.template_id)[:12], 16)

    def route(self, job: EditJob, mask_ratio: float) -> Route:
        """Decide how the edit runs and whether its template is worth priming now."""
        settings = job.request.settings
        if settings.cache == "off" or not self.config.enabled:
            return Route("dense", "off")
        if settings.cache != "require" and mask_ratio >= self.config.dense_above_ratio:
            # Computing nearly everything is faster than loading the rest.
            return Route("dense", "off")
        key = self.key_of(job)
        seen = self._saw(key)
        entries = self._entries(key, job)
        if entries is not None:
            self.hits += 1
            return Route("cached", "hit", entries)
        self.misses += 1
        fit = seen >= self._retry_at.get(key, 0)
        if settings.cache == "require" or (settings.reproducible and fit):
            return Route("wait", "hit", prime=fit and key not in self.priming)
        # One-shot images are not worth it: a template is primed from its second sight on.
        return Route("dense", "miss", prime=fit and seen >= 2 and key not in self.priming)

    def begin(self, job: EditJob) -> Priming | None:
        """Start priming the job's template; None while the priming prompt is unknown."""
        if self.prompt() is None:
            return None
        key = self.key_of(job)
        tokens = self.adapter.tokens(job).total
        anchors = self.adapter.anchors(tokens, self.default_steps, self.config.stride)
        priming = Priming(key, job.request.template_id, anchors, job, self.noise_seed(job))
        self.priming[key] = priming
        self._listed = None
        # What is half primed serves nobody and must not be evicted by its own second half.
        self.store.pin(key)
        return priming

    def keep(self, priming: Priming, entry: AnchorEntry) -> bool:
        """Store one anchor; False when there is no room for it, which ends the priming."""
        evictions = self.store.evictions
        self._listed = None
        if not self.store.put(priming.key, entry):
            return False
        self._ids[priming.key] = priming.template_id
        if self.store.evictions > evictions:
            held = self.store.templates()
            self._ids = {key: name for key, name in self._ids.items() if key in held}
        return True

    def wants(self, job: EditJob) -> str:
        """State of the job's template: `primed`, `priming` or `absent`."""
        key = self.key_of(job)
        if key in self.priming:
            return "priming"
        return "primed" if self.store.anchors(key) else "absent"

    def pin(self, template_id: str) -> bool:
        """Keep a template's entries, those to come too, from eviction; whether any are held."""
        keys = self._keys_of(template_id)
        if template_id not in self._pinned:
            self._pinned.add(template_id)
            for key in keys:
                self.store.pin(key)
        return bool(keys)

    def unpin(self, template_id: str) -> bool:
        """Undo `pin`; False when it was not pinned."""
        if template_id not in self._pinned:
            return False
        self._pinned.discard(template_id)
        for key in self._keys_of(template_id):
            self.store.unpin(key)
        return True

    def end(self, priming: Priming, *, complete: bool, unfit: bool = False) -> None:
        """The priming row is gone.

        Args:
            priming: what `begin` returned.
            complete: all anchors were kept; else what was kept is dropped.
            unfit: it did not fit the budget or the device's memory; it is tried again when it
                has been asked for twice as often.
        """
        self.priming.pop(priming.key, None)
        self._listed = None
        if complete:
            self.primed += 1
        else:
            self.unprimed += 1
            self._evict(priming.key)
        if not (complete and priming.template_id in self._pinned):
            self.store.unpin(priming.key)  # else its own pin becomes the template's
        if unfit and priming.key in self._sights:  # else nobody has edited it yet
            self._retry_at[priming.key] = 2 * self._sights[priming.key]

    def evict(self, template_id: str) -> int:
        """Drop a template's entries; returns bytes. Rows that run keep what they hold."""
        self.unpin(template_id)
        return sum(self._evict(key) for key in self._keys_of(template_id))

    def templates(self) -> list[dict[str, object]]:
        """What is held, least recently used first."""
        return [
            {
                "template_id": self._ids.get(key, ""),
                "key": key,
                "tier": "device",
                "pinned": self._ids.get(key, "") in self._pinned,
                "bytes": nbytes,
                "anchors": len(self.store.anchors(key)),
                "priming": key in self.priming,
            }
            for key, nbytes in self.store.templates().items()
        ]

    def counters(self) -> dict[str, float]:
        """Totals, and behind a dot those of one tier or outcome."""
        return {
            "cache_hits_total": self.hits,
            "cache_hits_total.device": self.hits,
            "cache_misses_total": self.misses,
            "cache_evictions_total": self.store.evictions,
            "cache_evictions_total.device": self.store.evictions,
            # Entries in memory have no checksum that could fail; files will.
            "cache_corrupt_total": 0,
            "primings_total.done": self.primed,
            "primings_total.given_up": self.unprimed,
        }

    def template_ids(self) -> tuple[str, ...]:
        """Ids of the templates whose entries are all there; asked for at every step."""
        if self._listed is None:
            held = [key for key in self.store.templates() if key not in self.priming]
            self._listed = tuple(dict.fromkeys(self._ids[key] for key in held if key in self._ids))
        return self._listed

    def _keys_of(self, template_id: str) -> list[str]:
        """Keys of the template's whole entries (those on their way have a pin of their own)."""
        held = self.store.templates()
        return [
            key
            for key, name in self._ids.items()
            if name == template_id and key in held and key not in self.priming
        ]

    def _evict(self, key: str) -> int:
        self._listed = None
        self._ids.pop(key, None)
        return self.store.evict(key)

    def _saw(self, key: str) -> int:
        self._sights[key] = self._sights.pop(key, 0) + 1
        if len(self._sights) > _REMEMBERED_SIGHTS:
            forgotten, _ = self._sights.popitem(last=False)
            self._retry_at.pop(forgotten, None)
        return self._sights[key]

    def _entries(self, key: str, job: EditJob) -> tuple[AnchorEntry | None, ...] | None:
        """Per step of the edit the entry it would read; None when the template is not primed.

        Steps beyond the tolerance of every anchor compute all tokens.
        """
        if key in self.priming:
            return None
        anchors = self.store.anchors(key)
        if not anchors:
            return None
        chosen = []
        for sigma, timestep in self.adapter.sigmas(job):
            anchor = nearest_anchor(anchors, sigma, timestep, self.adapter.anchor_tolerance)
            chosen.append(None if anchor is None else self.store.get(key, anchor))
        return tuple(chosen) if any(entry is not None for entry in chosen) else None
