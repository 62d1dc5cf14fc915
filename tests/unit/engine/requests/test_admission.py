"""Admission checks before the queue, and primings that cannot begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from maskserve_common.errors import Overloaded
from maskserve_common.resources.resource_states import Resource
from maskserve_engine.requests.admission import AdmissionChecks
from maskserve_engine.requests.execution_plan import DENSE, ExecutionPlan
from maskserve_engine.requests.primings import Primings

NET, LORA = Resource("controlnet", "n"), Resource("lora", "l")


class Adapters:
    """Which of an edit's adapters are away, and what was asked of it."""

    def __init__(self, nets: tuple[Resource, ...], loras: tuple[Resource, ...], fast: bool) -> None:
        self.nets, self.loras, self.fast = nets, loras, fast
        self.named: list[Any] = []
        self.owners: set[str] = set()

    def absent_nets(self, edit: Any) -> tuple[Resource, ...]:
        return self.nets

    def absent_loras(self, edit: Any) -> tuple[Resource, ...]:
        return self.loras

    def may_begin_without(self, edit: Any) -> bool:
        return self.fast

    def use_loras(self, edit: Any) -> None:
        self.named.append(edit)

    def hold_for_entries(self, owner: str, job: Any) -> None:
        self.owners.add(owner)

    def let_go(self, owner: str) -> None:
        self.owners.discard(owner)

    def works_of_entries(self, job: Any) -> tuple[()]:
        return ()


class Edit:
    """An edit with a number of plans chosen so far."""

    deadline = 1.0

    def __init__(self, plans_chosen: int = 1) -> None:
        self.plans_chosen = plans_chosen

    def set_plan(self, plan: ExecutionPlan, adapter: Any) -> None:
        self.plan = plan


def checks(
    adapters: Adapters, edits: dict[str, Any] | None = None, due_times: Any = None
) -> AdmissionChecks:
    """The checks of a worker without a cache, whose batch has two rows."""
    table: Any = SimpleNamespace(edits=edits or {}, running=list, waiting=list)
    return AdmissionChecks(cast(Any, None), table, cast(Any, adapters), 2, due_times, None, None)


@pytest.mark.parametrize(
    ("nets", "loras", "fast", "late", "missing", "named"),
    [
        ((), (), False, 0, (), True),
        ((NET,), (LORA,), False, 0, (NET, LORA), False),  # they travel at the same time
        ((), (LORA,), False, 0, (LORA,), False),
        ((), (LORA,), True, 1, (), False),
        ((), (LORA,), True, 2, (LORA,), False),  # the batch has two rows
        ((NET,), (LORA,), True, 0, (NET, LORA), False),  # nothing goes without its ControlNets
    ],
)
def test_adapters_are_waited_for_together_and_fast_edits_go_without_loras(
    nets: Any, loras: Any, fast: bool, late: int, missing: Any, named: bool
) -> None:
    edits = {str(n): SimpleNamespace(loras=SimpleNamespace(late=n < late)) for n in range(3)}
    adapters = Adapters(nets, loras, fast)
    edit: Any = Edit()
    assert checks(adapters, edits).missing(edit) == missing
    assert bool(adapters.named) == named


def test_an_edit_whose_template_is_lost_again_and_again_is_refused() -> None:
    edit: Any = Edit(plans_chosen=5)
    with pytest.raises(Overloaded, match="lost 5 times"):
        checks(Adapters((), (), False)).missing(edit)


@pytest.mark.parametrize(("plans_chosen", "is_checked"), [(0, True), (1, False)])
def test_an_edit_is_judged_by_its_deadline_once(plans_chosen: int, is_checked: bool) -> None:
    judged: list[Any] = []
    due_times: Any = SimpleNamespace(check=lambda *args: judged.append(args))
    edit: Any = Edit(plans_chosen)
    assert not checks(Adapters((), (), False), due_times=due_times).missing(edit)
    assert edit.plan is DENSE
    assert bool(judged) == is_checked


@pytest.mark.parametrize("prompt", [False, True])
def test_a_priming_that_cannot_begin_holds_no_lora(prompt: bool) -> None:
    """The encoder has not told its priming prompt yet, or the queue is full."""

    def full(ticket: Any) -> None:
        raise Overloaded("the queue is full")

    ended: list[Any] = []
    cache: Any = SimpleNamespace(
        key_of=lambda job: "k",
        priming_prompt=lambda job: {} if prompt else None,
        anchors=lambda job: (1,),
        begin=lambda key: None,
        end=lambda key, template_id, complete: ended.append(complete),
    )
    model: Any = SimpleNamespace(tokens=lambda job: SimpleNamespace(total=4))
    adapters = Adapters((), (), False)
    primings = Primings(
        model,
        cache,
        cast(Any, SimpleNamespace(submit=full)),
        cast(Any, None),
        cast(Any, adapters),
        lambda key: None,
    )
    settings = SimpleNamespace(priority=0)
    request = SimpleNamespace(settings=settings, template_id="t")
    job: Any = SimpleNamespace(request=request, adapters="a")
    primings.begin(job, urgent=False)
    assert not adapters.owners
    assert not primings.active
    assert ended == [False] * prompt
