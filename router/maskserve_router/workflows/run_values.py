"""The values of one workflow run that are files in this host's folder."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from maskserve_common.files.values import Values, parse
from maskserve_router.fair_share import IN_A_THREAD
from maskserve_workflows.plan import WorkflowPlan
from maskserve_workflows.values import NamedValue, map_parts, named_in
from maskserve_workflows.wire import picture_of, read_all

_IMAGE_KINDS = ("picture", "mask")


class RunValues:
    """Holds the values of a run until `end`. Without a folder, values stay bytes.

    Args:
        values: the folder.
        scope: scope of the client.
        later: calls a function that may wait for the folder's lock, perhaps later in a thread; by
            default it calls at once.
    """

    def __init__(
        self,
        values: Values,
        scope: str,
        later: Callable[..., object] = lambda call, *arguments: call(*arguments),
    ) -> None:
        self._values, self._scope, self._later = values, scope, later
        self.run = secrets.token_hex(16) if values.host else ""
        self.host = values.host
        self._inputs: dict[NamedValue, bytes] = {}
        self._names: dict[str, int] = {}
        """Name -> bytes of the values that the run holds."""
        self.count = self.bytes = 0
        """Number and bytes of all values that the run has had so far."""
        values.begin(scope, self.run)

    def end(self) -> None:
        """Free all values of the run."""
        if self.run:
            self._later(self._values.end, self._scope, self.run)

    def turn_bytes(self, size: int) -> int:
        """Return the size for `FairShare.run` of work on `size` bytes of values.

        Work that may wait for the folder's lock always takes a thread.
        """
        return max(size, IN_A_THREAD) if self.run else size

    def store_inputs(self, plan: WorkflowPlan, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs with pictures and masks stored as files, which each node reads."""
        kinds = {plan_input.name: plan_input.kind for plan_input in plan.inputs}
        return {
            name: self._put(value) if kinds[name] in _IMAGE_KINDS else value
            for name, value in inputs.items()
        }

    def store_bytes(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a node's outputs with bytes (of a node on another host) stored as files."""

        def put(part: Any) -> Any:
            element = isinstance(part, bytes) and self._values.put([part], self._scope, self.run)
            return NamedValue(element) if element else part

        return {name: map_parts(value, put) for name, value in outputs.items()}

    def register(self, outputs: Mapping[str, Any]) -> None:
        """Register outputs that are files, so that `free` can remove them."""
        for value in named_in(list(outputs.values())):
            reference = parse(value.element)
            if reference is None:
                continue
            name, nbytes = reference
            if name not in self._names:
                self._names[name] = nbytes
                self.count, self.bytes = self.count + 1, self.bytes + nbytes

    def free(self, needed: Iterable[Any]) -> None:
        """Remove the files of all values that are not among the needed ones."""
        if self._names:
            needed_names = {_name(value) for value in named_in(list(needed))}
            unneeded_names = [name for name in self._names if name not in needed_names]
            for name in unneeded_names:
                del self._names[name]
            if unneeded_names:
                self._later(self._values.free, unneeded_names, self._scope, self.run)

    def exists(self, value: NamedValue) -> bool:
        """Return True if a value can be read. An input of the client always can, because the run
        also keeps its bytes.

        It takes no lock, because a value stays until the run frees it.
        """
        if parse(value.element) is None or self._values.has(_name(value), self._scope, self.run):
            return True
        if value in self._inputs:
            value.replace_with(self._inputs[value])
            return True
        return False

    def read(self, references: Mapping[str, Any]) -> dict[str, Any]:
        """Return these values with references replaced by data (`wire.read_all`)."""
        return read_all(references, self._values, self._scope)

    def _put(self, value: bytes) -> bytes | NamedValue:
        reference = self._values.put([value], self._scope, self.run)
        if reference is None:
            return value
        stored = picture_of(reference)
        assert isinstance(stored, NamedValue)
        self._inputs[stored] = value
        self.register({"": stored})
        return stored


def _name(value: NamedValue) -> str:
    parsed_name = parse(value.element)
    return "" if parsed_name is None else parsed_name[0]
