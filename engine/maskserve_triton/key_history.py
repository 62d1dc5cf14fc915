"""Request history of each API key, so that META reveals nothing about other keys' requests."""

from __future__ import annotations

import hashlib

from maskserve_common.contracts.keys import NO_SCOPE, scope_of
from maskserve_common.contracts.request import EditRequest
from maskserve_common.lru_cache import LruCache

_REMEMBERED = 65_536
_PRIMED_AT = 2
"""Edits of a template that a key must have sent before one of its own may be cached: the background
primes a template when it is seen for the second time.
"""
TEMPLATE, PROMPT, REFERENCES, CACHE = "template", "prompt", "references", "cache"


class KeyHistory:
    """Counts recent templates and prompts by API key; for one thread at a time."""

    def __init__(self) -> None:
        self._uses: LruCache[tuple[str, ...], int] = LruCache(_REMEMBERED)

    def new_of(self, edit: EditRequest) -> list[str]:
        """Record an edit, and return which of TEMPLATE, PROMPT and REFERENCES (already encoded) and
        CACHE (already primed) its key's own requests cannot explain. A template that the edit names
        belongs to the key or is shared with it. Without separate keys every request counts as the
        key's own.
        """
        scope, settings = scope_of(edit.request_id), edit.settings
        if scope == NO_SCOPE:
            return []
        texts = repr((edit.prompt, settings.negative_prompt)).encode()
        digest = hashlib.blake2b(texts, digest_size=16).hexdigest()
        new_inputs = [] if self._add((scope, PROMPT, digest)) else [PROMPT]
        reference_uses = [
            self._add((scope, REFERENCES, reference.pixels_id)) for reference in edit.references
        ]
        new_inputs += [] if all(reference_uses) else [REFERENCES]
        if not edit.template_id:
            return new_inputs
        template_uses = self._add((scope, TEMPLATE, edit.template_id))
        if settings.template_id is None:
            new_inputs += [] if template_uses else [TEMPLATE]
            new_inputs += [CACHE] if template_uses < _PRIMED_AT else []
        return new_inputs

    def _add(self, item: tuple[str, ...]) -> int:
        """Count a use, and return the number of those before it."""
        previous = self._uses.get(item) or 0
        self._uses.put(item, previous + 1)
        return previous
