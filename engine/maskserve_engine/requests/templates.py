"""Templates in the cache, and which edits may read them (design §4).

Plain bookkeeping: the engine thread looks up an edit's template here and reports how a priming
ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from maskserve_common.config import Config
from maskserve_common.contracts.keys import (
    NO_SCOPE,
    STILL,
    Anchor,
    TemplateKey,
    entries_id,
    nearest_anchor,
    sharing,
)
from maskserve_common.errors import Overloaded
from maskserve_common.lru_cache import LruCache
from maskserve_common.shares import room
from maskserve_engine.base.job import Conditioning, EditJob
from maskserve_engine.cache.priming_prompt import PRIMING_PROMPT
from maskserve_engine.cache.store import Store
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.requests.execution_plan import ExecutionPlan
from maskserve_engine.spec.model_spec import anchor_stride, dense_steps

_REMEMBERED = 4096
WORTH_PRIMING = 2
"""Uses of a template from which it is primed; pictures sent once are not worth it."""


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """The state of an edit's template in the cache."""

    key: str
    """Key of the entries that fit the edit."""
    anchors: tuple[Anchor, ...]
    """Anchors of the complete template."""
    reads: tuple[Anchor | None, ...]
    """Anchor that each step of the edit would read; None: it computes all tokens."""
    dense_steps: int
    """Number of first steps that compute all tokens."""
    tier: str | None
    """Tier of the template; None: it is not primed."""
    priming: bool
    is_loading: bool
    """Whether to wait for it; see `TemplateCache.is_loading`."""
    may_prime: bool
    """Whether it can be primed now: it is not being loaded, and priming was not put off."""
    worth_priming: bool
    """Whether it can be primed now and was seen often enough."""
    is_known_picture: bool
    """Whether the edit sees a window of a picture that is registered, or of which earlier edits saw
    windows.
    """


@dataclass(slots=True)
class TemplateUses:
    """How often a template was used."""

    uses: int = 0
    retry_at: int = 0
    """Number of uses from which priming is tried again for a template that could not be primed."""

    @property
    def may_prime(self) -> bool:
        return self.uses >= self.retry_at

    @property
    def worth_priming(self) -> bool:
        """Whether it has been used often enough, and priming is not put off."""
        return self.uses >= max(WORTH_PRIMING, self.retry_at)


class ReuseCounter:
    """Counts how often each recent template, and each picture of windows, was used, by key; this
    decides when templates are primed.
    """

    def __init__(self) -> None:
        self._recent: LruCache[str, TemplateUses] = LruCache(_REMEMBERED)

    def of(self, key: str) -> TemplateUses:
        return self._recent.get(key) or TemplateUses()

    def add(self, key: str) -> None:
        """Count a use of a template."""
        reuse = self.of(key)
        reuse.uses += 1
        self._recent.put(key, reuse)

    def put_off(self, key: str) -> None:
        """Put off a template that could not be primed, until it has been used twice as often."""
        reuse = self._recent.get(key)
        if reuse is not None:  # otherwise no edit has used it yet
            reuse.retry_at = 2 * reuse.uses


class Pins:
    """Pins of templates. A template has entries under several keys (text lengths, formats); entries
    that templates share stay while one of them is pinned. Each owner has a share of each tier for
    pins; operators have all of it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: dict[str, set[str]] = {}
        """Keys of the entries pinned for each template id."""
        self._owners: dict[str, str] = {}
        """Owner of each pinned template id."""

    def __contains__(self, template_id: str) -> bool:
        return template_id in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def pin(self, template_id: str, owner: str = NO_SCOPE) -> bool:
        """Protect a template's present and later entries from eviction; return whether it has any
        now.

        Raises:
            Overloaded: the owner has its share of a tier pinned.
        """
        if template_id not in self:
            if not self._has_room(template_id, owner):
                raise Overloaded("this key has its share of the cache pinned; unpin a template")
            self._owners[template_id] = owner
        self._keys.setdefault(template_id, set())
        keys = self._store.keys_of(template_id)
        for key in keys:
            self.record_priming(template_id, key)
        return bool(keys)

    def record_priming(self, template_id: str, key: str) -> None:
        """Pin complete entries if a template that has them is pinned and there is room."""
        for name in sharing(template_id, self._keys):
            if self._has_room(name, self._owners[name]):
                self._keys[name].add(key)
                self._store.pin(key, pinned=True)

    def unpin(self, template_id: str) -> bool:
        """Unpin a template, also one that another worker of the host has pinned; return False when
        it was not pinned.
        """
        keys = self._store.keys_of(template_id)
        pinned = template_id in self or any(
            template.pinned
            for templates in self._store.entries().values()
            for key, template in templates.items()
            if key in keys
        )
        self._owners.pop(template_id, None)
        for key in self._keys.pop(template_id, set()).union(keys).difference(*self._keys.values()):
            self._store.pin(key, pinned=False)
        return pinned

    def _has_room(self, template_id: str, owner: str) -> bool:
        """Whether the template's entries fit its owner's share of each tier."""
        by_tier, entries_key = self._store.entries(), entries_id(template_id)
        owned = {entries_id(name) for name, pin_owner in self._owners.items() if pin_owner == owner}
        for tier in self._store.tiers if owner != NO_SCOPE else ():
            pinned_bytes = owned_bytes = template_bytes = 0
            for template in by_tier.get(tier.name, {}).values():
                name = entries_id(template.note.template_id)
                if name == entries_key:
                    template_bytes += template.nbytes
                elif template.pinned:
                    pinned_bytes += template.nbytes
                    owned_bytes += template.nbytes if name in owned else 0
            if template_bytes > room(tier.budget_bytes, pinned_bytes, owned_bytes, owner):
                return False
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError if the device pins entries of no pinned template; call it while
        nothing is primed.
        """
        stray_keys = self._store.memory.pinned.difference(*self._keys.values())
        assert not stray_keys, f"{len(stray_keys)} pins that nobody asked for"


class TemplateCache:
    """Templates, their priming and their pins, over one store.

    Args:
        config: configuration of the worker.
        adapter: the model.
        store: store of the entries.
        kinds: parts that priming keeps, per block.
        model_revision: digest of the served weights.
        dtype: dtype of the model, for the key.
        prompt: returns the priming prompt's embedding; None while it is not known.
    """

    def __init__(
        self,
        config: Config,
        adapter: Adapter,
        store: Store,
        kinds: tuple[frozenset[str], ...],
        model_revision: str,
        dtype: str,
        prompt: Callable[[], Conditioning | None],
    ) -> None:
        self.config, self.adapter, self.store = config.cache, adapter, store
        self.model_revision, self.dtype = model_revision, dtype
        self.default_steps = adapter.spec.steps_default(config.model.num_inference_steps)
        self.dense_steps = dense_steps(self.config.dense_steps, adapter.spec.dense_steps)
        self.kinds = kinds
        self.keeps_kv = all("kv" in parts for parts in kinds)
        """Whether all blocks keep keys and values. Then rows with a template and rows with refresh
        steps can share a plan, since step caches hold only keys and values."""
        self._kinds_text = ",".join("+".join(sorted(parts)) for parts in kinds)
        """The kinds as text, for the cache key."""
        if self.config.conv_halo:
            self._kinds_text += ",maps"
        self.prompt = prompt
        self.hits: Counter[str] = Counter()
        """Hits by the tier of the template."""
        self.misses = self.refreshed = 0
        self.primed = self.unprimed = 0
        self.priming: set[str] = set()
        """Keys of the templates that are being primed."""
        self._reuse = ReuseCounter()
        self.pins = Pins(store)
        self._listed: tuple[int, dict[str, tuple[str, ...]]] = (-1, {})
        """Result of `template_ids`, and the store's version that it belongs to."""

    def key_of(self, job: EditJob) -> str:
        """Return the key of the entries that fit this edit."""
        return self._template_key(job).digest()

    def _picture_key(self, job: EditJob) -> str:
        """Return a key of the edit's whole picture that edits of all its windows share."""
        picture = entries_id(job.request.template_id)
        return replace(self._template_key(job), pixels_id=picture, noise_seed=0).digest()

    def _template_key(self, job: EditJob) -> TemplateKey:
        settings, spec = job.request.settings, self.adapter.spec
        guidance = settings.guidance_scale if spec.guidance == "embedded" else None
        length = len(job.conditioning["prompt_embeds"])
        return TemplateKey(
            model_revision=self.model_revision,
            pixels_id=job.request.pixels_id or job.request.template_id,
            noise_seed=job.request.template_noise_seed,
            priming_prompt=job.request.prompt if spec.primed_by_prompt else PRIMING_PROMPT,
            guidance=guidance,
            text_tokens=spec.key_text(length, self.adapter.tokens(job).total),
            dtype=self.dtype,
            entry_kind=self._kinds_text,
            entry_format=self.config.entry_format,
            entry_halves=self.adapter.entry_halves,
            adapters=job.adapters,
        )

    def anchors(self, job: EditJob) -> tuple[Anchor, ...]:
        """Return the anchors of a primed template of this size, in priming order."""
        tokens, spec = self.adapter.tokens(job).total, self.adapter.spec
        anchors = self.adapter.anchors(
            tokens, self.default_steps, anchor_stride(self.config.stride, spec)
        )
        return (STILL, *anchors) if spec.semantics.exact else anchors

    def priming_prompt(self, job: EditJob) -> Conditioning | None:
        """Return the conditioning that primes the edit's template; None while it is not known."""
        return job.conditioning if self.adapter.spec.primed_by_prompt else self.prompt()

    def serves(self, job: EditJob) -> bool:
        """Whether rows of the edit may read or make entries."""
        return job.request.settings.cache != "off" and not self.dense_for(job)

    def dense_for(self, job: EditJob) -> str:
        """Return why the edit reads no template (`ExecutionPlan.dense_for`); empty: it may."""
        if job.request.kind != "inpaint":
            return job.request.kind
        tokens = self.adapter.tokens(job)
        # Computing nearly everything is faster than loading the rest.
        if tokens.active / tokens.total >= self.config.dense_above_ratio:
            return "mask_ratio"
        if job.references:
            return "references"
        sided = self.adapter.spec.dense_sides and tokens.cover_a_side
        return "mask_side" if sided else ""

    def look_up(self, job: EditJob, key: str, *, again: bool = False) -> CacheLookup:
        """Look up the template of an edit.

        Args:
            job: the edit.
            key: key of its template's entries.
            again: whether this edit was looked up before; the use is then not counted again.
        """
        request = job.request
        picture = key if request.window is None else self._picture_key(job)
        is_named = request.settings.template_id is not None
        if not again:
            for name in dict.fromkeys((key, picture)):
                self._reuse.add(name)
        anchors, dense_steps = self.anchors(job), self._dense_first(job)
        priming, is_loading, reuse = key in self.priming, self.is_loading(key), self._reuse.of(key)
        return CacheLookup(
            key=key,
            anchors=anchors,
            reads=self._nearest(anchors, job, dense_steps),
            dense_steps=dense_steps,
            tier=None if priming else self.store.locate(key, anchors),
            priming=priming,
            is_loading=is_loading,
            may_prime=not is_loading and reuse.may_prime,
            worth_priming=not is_loading and reuse.worth_priming,
            is_known_picture=picture != key and (is_named or self._reuse.of(picture).worth_priming),
        )

    def fetch(self, lookup: CacheLookup) -> bool:
        """Prepare the entries that an edit reads; return True when they are ready."""
        read = {STILL, *lookup.reads}
        return self.store.fetch(lookup.key, [a for a in lookup.anchors if a in read])

    def is_loading(self, key: str) -> bool:
        """Whether a template is being primed or fetched, so that waiting is worthwhile."""
        return key in self.priming or self.store.lower.busy(key)

    def count(self, plan: ExecutionPlan) -> None:
        """Count an execution plan as a hit, a miss or neither."""
        if plan.outcome == "hit":
            self.hits[plan.tier] += 1
        elif plan.outcome == "miss":
            self.misses += 1
        elif plan.outcome == "own":
            self.refreshed += 1

    def begin(self, key: str) -> None:
        """Begin the priming of a template."""
        self.priming.add(key)
        # A half-primed template serves no edit; its second half must not evict it.
        self.store.memory.pin(key, pinned=True)

    def priming_state(self, job: EditJob) -> str:
        """State of the job's template: `primed`, `priming` or `absent`."""
        key = self.key_of(job)
        if key in self.priming:
            return "priming"
        return "absent" if self.store.locate(key, self.anchors(job)) is None else "primed"

    def end(self, key: str, template_id: str, *, complete: bool, unfit: bool = False) -> None:
        """End the priming of a template, whose row is gone.

        Args:
            key: key of its entries.
            template_id: the template.
            complete: whether all anchors were kept; otherwise its entries are evicted.
            unfit: whether it did not fit the budget or the device's memory; it is tried again when
                the template has been used twice as often.
        """
        self.priming.discard(key)
        self.store.memory.pin(key, pinned=False)
        if unfit:
            self._reuse.put_off(key)
        if complete:
            self.primed += 1
            self.pins.record_priming(template_id, key)
        else:
            self.unprimed += 1
            self.store.evict(key)

    def evict(self, template_id: str) -> int:
        """Evict a template's entries; return their bytes. Running rows keep the entries that they
        read.
        """
        self.pins.unpin(template_id)
        return sum(
            self.store.evict(key)
            for key in self.store.keys_of(template_id)
            if key not in self.priming
        )

    def templates(self) -> list[dict[str, object]]:
        pinned = set(map(entries_id, self.pins))
        return [
            {
                "template_id": template.note.template_id,
                "key": key,
                "tier": tier,
                "pinned": template.pinned or entries_id(template.note.template_id) in pinned,
                "bytes": template.nbytes,
                "anchors": len(template.anchors),
                "whole": template.whole,
                "priming": key in self.priming,
            }
            for tier, templates in self.store.entries().items()
            for key, template in templates.items()
        ]

    def check_integrity(self, *, files: bool = True) -> None:
        """Check the accounts of an idle engine's cache: `Store.check_integrity`, and its pins.

        Raises:
            AssertionError: something is left that no edit, priming or pin needs.
        """
        self.store.check_integrity(files=files)
        self.pins.check_integrity()
        assert not self.priming, f"{len(self.priming)} templates are being primed by no row"

    def counters(self) -> dict[str, float]:
        """Return totals; those of one tier or outcome have its name behind a dot."""
        counters: dict[str, float] = {
            "cache_hits_total": self.hits.total(),
            "cache_misses_total": self.misses,
            "cache_own_total": self.refreshed,
            **self.store.counters(),
            "primings_total.done": self.primed,
            "primings_total.given_up": self.unprimed,
        }
        for tier in self.store.tiers:
            counters[f"cache_hits_total.{tier.name}"] = self.hits[tier.name]
        return counters

    def template_ids(self) -> dict[str, tuple[str, ...]]:
        """Return, per tier, `entries_id` of the templates that are complete;
        called at every step.
        """
        if self._listed[0] != self.store.version:
            version = self.store.version
            listed = {
                tier: tuple(
                    dict.fromkeys(
                        entries_id(template.note.template_id)
                        for template in templates.values()
                        if template.whole
                    )
                )
                for tier, templates in self.store.entries().items()
            }
            self._listed = version, listed
        return self._listed[1]

    def _dense_first(self, job: EditJob) -> int:
        return self.dense_steps.of(
            self.adapter.steps(job),
            prompt=job.request.prompt != PRIMING_PROMPT,
            side=self.adapter.tokens(job).cover_a_side,
        )

    def _nearest(
        self, anchors: tuple[Anchor, ...], job: EditJob, first: int
    ) -> tuple[Anchor | None, ...]:
        """Return the anchor whose entry each step of the edit would read.

        The `first` steps, and those beyond the tolerance of every anchor, compute all tokens
        (None).
        """
        reach = self.adapter.anchor_tolerance
        return tuple(
            None if step < first else nearest_anchor(anchors, sigma, timestep, reach)
            for step, (sigma, timestep) in enumerate(self.adapter.sigmas(job))
        )
