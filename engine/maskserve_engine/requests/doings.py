"""What each key has done here before, so that META tells it of its own doings and of no others'."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from maskserve_common.contracts.keys import NO_SCOPE, scope_of
from maskserve_common.contracts.request import EditRequest

_REMEMBERED = 65_536
_PRIMED_AT = 2
"""Edits of a template that a key has to have sent before one may be cached by its own doing: in
the background a template is primed on its second sight."""
TEMPLATE, PROMPT, CACHE = "template", "prompt", "cache"


class Doings:
    """Templates and prompts of late, by the key whose edits had them, and how many; for one thread
    at a time.
    """

    def __init__(self) -> None:
        self._done: OrderedDict[tuple[str, ...], int] = OrderedDict()

    def new_of(self, edit: EditRequest) -> list[str]:
        """What of an edit cannot be its key's own doing, of TEMPLATE and PROMPT (they are encoded)
        and CACHE (the template is primed); from now on this edit counts as done. A template that
        is named is the key's own, or shared with it. Where keys are not told apart all is one's
        own.
        """
        scope, settings = scope_of(edit.request_id), edit.settings
        if scope == NO_SCOPE:
            return []
        texts = repr((edit.prompt, settings.negative_prompt)).encode()
        digest = hashlib.blake2b(texts, digest_size=16).hexdigest()
        templates = self._add((scope, TEMPLATE, edit.template_id))
        new = [] if self._add((scope, PROMPT, digest)) else [PROMPT]
        if settings.template_id is None:
            new += [] if templates else [TEMPLATE]
            new += [CACHE] if templates < _PRIMED_AT else []
        return new

    def _add(self, thing: tuple[str, ...]) -> int:
        """Count one more; how many there were before."""
        previous = self._done.get(thing, 0)
        self._done[thing] = previous + 1
        self._done.move_to_end(thing)
        if len(self._done) > _REMEMBERED:
            self._done.popitem(last=False)
        return previous
