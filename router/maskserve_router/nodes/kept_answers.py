"""Answers of nodes that are kept for equal calls of the same key."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from maskserve_common.errors import TemplateNotFound
from maskserve_common.files.values import Values, parse
from maskserve_common.imaging.images import as_file
from maskserve_common.lru_cache import LruCache
from maskserve_router.config import WorkflowFiles
from maskserve_router.fair_share import FairShare
from maskserve_router.nodes.node_messages import NodeAnswer
from maskserve_workflows.values import NamedValue, map_parts, named_in
from maskserve_workflows.wire import nbytes, read_all

_SMALL = 512
"""Bytes of a kept answer beside its values."""


class AnswerKey(NamedTuple):
    """Key of a kept answer: the client's scope and the digest of the call."""

    scope: str
    digest: bytes


class KeptAnswers:
    """Keeps answers, and owns their values as a run does. Use it from the event loop only.

    Args:
        files: limits of kept answers.
        values: this host's folder of values.
        fair_share: the thread that may wait for the folder's lock.
    """

    def __init__(self, files: WorkflowFiles, values: Values, fair_share: FairShare) -> None:
        self._values, self._fair_share = values, fair_share
        self._owner = f"kept{secrets.token_hex(8)}"
        """Owner of the values, in place of a run; unique to this router."""
        self._scopes = set[str]()
        """Scopes in which values are owned."""
        self._answers: LruCache[AnswerKey, NodeAnswer] = LruCache(
            files.kept_bytes,
            _nbytes,
            lambda key: key.scope,
            files.kept_s,
            on_evict=self._forget,
        )
        self._pending: dict[AnswerKey, asyncio.Future[NodeAnswer]] = {}
        """Answers that are being made."""

    @property
    def nbytes(self) -> int:
        """Bytes of all kept answers."""
        return self._answers.nbytes

    async def answer(
        self, key: AnswerKey, run: str, make: Callable[[], Awaitable[NodeAnswer]]
    ) -> NodeAnswer:
        """Return the kept answer, that of an equal call under way, or a new one, which is kept.

        Args:
            key: key of the answer.
            run: run that will own the answer's values; empty: return bytes.
            make: calls a node server.
        """
        while (answer := self._answers.get(key)) is not None or key in self._pending:
            if answer is None:
                await asyncio.wait([pending := self._pending[key]])
                if pending.cancelled():
                    continue
                answer = pending.result()
            shared = await self._fair_share.locked(self._shared, answer, key.scope, run)
            if shared is not None:
                return shared._replace(reused=True)
            self._answers.drop(key)
        pending = self._pending[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await make()
            copy = _copied(answer)  # the run's values may be made again under other names
            await self._keep(key, copy)
            pending.set_result(copy)
            return answer
        finally:
            del self._pending[key]
            pending.cancel()  # no effect after an answer; otherwise a waiting call makes its own

    async def close(self) -> None:
        """Free the values of all answers."""
        for scope in self._scopes:
            await self._fair_share.locked(self._values.end, scope, self._owner)

    async def _keep(self, key: AnswerKey, answer: NodeAnswer) -> None:
        if names := _names(answer):
            self._scopes.add(key.scope)
            if not await self._fair_share.locked(self._take, names, key.scope):
                return
        self._answers.put(key, answer)

    def _take(self, names: Sequence[str], scope: str) -> bool:
        """Own the values of an answer. Return False: they no longer exist."""
        self._values.begin(scope, self._owner)
        return self._values.share(names, scope, self._owner)

    def _forget(self, key: AnswerKey, answer: NodeAnswer) -> None:
        """Free the values of an answer that is no longer kept."""
        if names := _names(answer):
            self._fair_share.later(self._values.free, names, key.scope, self._owner)

    def _shared(self, answer: NodeAnswer, scope: str, run: str) -> NodeAnswer | None:
        """Return an answer for a run, which then owns its values; None: they are gone."""
        if not (names := _names(answer)):
            return answer
        if not self._values.share(names, scope, self._owner):  # renews their time to live
            return None
        if run:
            return _copied(answer) if self._values.share(names, scope, run) else None
        try:
            files = read_all(answer.outputs, self._values, scope)
        except TemplateNotFound:
            return None
        return answer._replace(outputs={k: map_parts(v, _as_sent) for k, v in files.items()})


def _names(answer: NodeAnswer) -> list[str]:
    """Return the names of an answer's values in files."""
    parsed_names = (parse(value.element) for value in named_in(list(answer.outputs.values())))
    return [parsed_name[0] for parsed_name in parsed_names if parsed_name is not None]


def _copied(answer: NodeAnswer) -> NodeAnswer:
    def copied_part(part: Any) -> Any:
        return NamedValue(part.reference) if isinstance(part, NamedValue) else part

    return answer._replace(
        outputs={k: map_parts(v, copied_part) for k, v in answer.outputs.items()}
    )


def _as_sent(part: Any) -> Any:
    """Return a part as it is without a folder of values: bytes."""
    return as_file(part) if isinstance(part, memoryview) else part


def _nbytes(answer: NodeAnswer) -> int:
    return nbytes(answer.outputs) + _SMALL
