"""The values of one run that are files in this host's folder."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from maskserve_common.files.values import Values, parse
from maskserve_workflows.plan import WorkflowPlan
from maskserve_workflows.values import NamedValue, changed, named_in
from maskserve_workflows.wire import drawn, read_all

_DRAWN = ("picture", "mask")


class RunValues:
    """Owns a run's values until `end`. Without a folder, values stay bytes.

    Args:
        values: the folder.
        scope: scope of the client.
        later: runs a call that may wait for the folder's lock; by default at once.
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
        """Count and bytes of all values that the run has held."""
        values.begin(scope, self.run)

    def end(self) -> None:
        """Free all values of the run."""
        if self.run:
            self._later(self._values.end, self._scope, self.run)

    def store_inputs(self, plan: WorkflowPlan, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs with pictures stored as files; each node reads them again."""
        kinds = {plan_input.name: plan_input.kind for plan_input in plan.inputs}
        return {
            name: self._put(value) if kinds[name] in _DRAWN else value
            for name, value in inputs.items()
        }

    def received(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a node's outputs, with bytes (such as another host's) stored as files."""

        def put(part: Any) -> Any:
            element = isinstance(part, bytes) and self._values.put([part], self._scope, self.run)
            return NamedValue(element) if element else part

        return {name: changed(value, put) for name, value in outputs.items()}

    def store(self, outputs: Mapping[str, Any]) -> None:
        """Register values that a node has stored as files."""
        for value in named_in(list(outputs.values())):
            if (parsed_name := parse(value.element)) is not None and parsed_name[
                0
            ] not in self._names:
                self._names[parsed_name[0]] = parsed_name[1]
                self.count, self.bytes = self.count + 1, self.bytes + parsed_name[1]

    def free(self, needed: Iterable[Any]) -> None:
        """Free all values that are not among the needed ones."""
        if self._names:
            needed_names = {_name(value) for value in named_in(list(needed))}
            unneeded_names = [name for name in self._names if name not in needed_names]
            for name in unneeded_names:
                del self._names[name]
            if unneeded_names:
                self._later(self._values.free, unneeded_names, self._scope, self.run)

    def exists(self, value: NamedValue) -> bool:
        """Return True if a value can be read; a client's own input always can.

        No lock is taken: a value stays until the run frees it.
        """
        if parse(value.element) is None or self._values.has(_name(value), self._scope, self.run):
            return True
        if value in self._inputs:
            value.is_now(self._inputs[value])
            return True
        return False

    def read(self, references: Mapping[str, Any]) -> dict[str, Any]:
        """Return `wire.read_all` of these values."""
        return read_all(references, self._values, self._scope)

    def _put(self, value: bytes) -> bytes | NamedValue:
        reference = self._values.put([value], self._scope, self.run)
        if reference is None:
            return value
        put = drawn(reference)
        assert isinstance(put, NamedValue)
        self._inputs[put] = value
        self.store({"": put})
        return put


def _name(value: NamedValue) -> str:
    parsed_name = parse(value.element)
    return "" if parsed_name is None else parsed_name[0]
