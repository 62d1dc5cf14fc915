"""Who has which template: told by changes, and in whole by workers that know no changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import grpc
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from maskserve_common.contracts.status_record import TemplateChanges
from maskserve_router.config import router_config_of
from maskserve_router.workers.template_index import TemplateIndex
from maskserve_router.workers.worker import PolledStatus, Worker
from tests.support.examples import examples
from tests.support.router import FAST, Faulty, cluster, until

IDS = [f"{number:032x}" for number in range(300)]


@examples(60)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(("add", "remove", "clear", "again")),
            st.integers(0, 2),
            st.sampled_from(("device", "host", "disk")),
            st.sets(st.sampled_from("abcdef")),
        ),
        max_size=40,
    )
)
def test_an_index_knows_who_has_what(steps: list[tuple[str, int, str, set[str]]]) -> None:
    index = TemplateIndex()
    numbers = [index.join() for _ in range(3)]
    assert numbers == [0, 1, 2]
    truth: list[dict[str, set[str]]] = [{}, {}, {}]
    for operation, worker, tier, ids in steps:
        tier_ids = truth[worker].setdefault(tier, set())
        match operation:
            case "add":
                index.add(worker, tier, ids)
                tier_ids |= ids
            case "remove":
                index.remove(worker, tier, ids)
                tier_ids -= ids
            case "clear":
                index.clear(worker)
                truth[worker] = {}
            case "again":
                index.leave(worker)
                assert index.join() == worker
                truth[worker] = {}
    for worker, tiers in enumerate(truth):
        assert {t: set(ids) for t, ids in index.of(worker).items()} == {
            tier: ids for tier, ids in tiers.items() if ids
        }
        for tier, ids in tiers.items():
            view_ids = index.view(worker).get(tier, ())
            assert [template_id in view_ids for template_id in "abcdef"] == [
                template_id in ids for template_id in "abcdef"
            ]
    for tier in ("device", "host", "disk"):
        for template_id in "abcdef":
            holder_flags = [template_id in tiers.get(tier, ()) for tiers in truth]
            assert index.holders(tier, template_id, 3).tolist() == holder_flags


async def test_changes_since_another_version_are_not_guessed_from() -> None:
    worker = Worker("w:1", router_config_of({}))
    status = PolledStatus("w", "m", "ready", 1, 1)

    def hear(changes: TemplateChanges | None, **record: Any) -> Mapping[str, list[str]]:
        worker.take_status(structs.replace(status, template_changes=changes, **record), 0.0)
        return worker.index.of(worker.number)

    assert hear(TemplateChanges("a-1", "", {"host": ("x", "y")})) == {"host": ["x", "y"]}
    assert hear(TemplateChanges("a-2", "a-1", {}, {"host": ("x",)})) == {"host": ["y"]}
    assert worker.templates_version == "a-2"
    assert hear(TemplateChanges("b-7", "b-6", {"host": ("z",)})) == {}
    assert worker.templates_version == ""
    assert hear(TemplateChanges("b-7", "", {"host": ("z",)})) == {"host": ["z"]}
    # An older worker at the same address, and back.
    assert hear(None, templates={"disk": ("w",)}) == {"disk": ["w"]}
    assert worker.templates_version is None
    assert hear(None, templates={"disk": ("w",)}) == {"disk": ["w"]}
    assert hear(None, templates={}) == {}
    assert hear(TemplateChanges("c-1", "", {"host": ("x",)})) == {"host": ["x"]}
    await worker.upstream.close()


class Old(Faulty):
    """Knows no changes, as workers before them."""

    async def _infer(self, raw: bytes, context: Any) -> bytes:
        if b'"status"' in raw and b'"templates"' in raw:
            error_text = "[INVALID_REQUEST] OP.templates: is not a key of status; accepted: op"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error_text)
        return await super()._infer(raw, context)


def holding(worker: Faulty, *ids: str) -> None:
    worker._status = structs.replace(worker._status, templates={"host": ids})


def known(place: Worker) -> list[str]:
    return sorted(place.index.of(place.number).get("host", []))


async def test_workers_of_both_kinds_are_followed() -> None:
    async with cluster(hardware=FAST, kinds=(Faulty, Old)) as (router, workers):
        places = [router.pool.workers[worker.address] for worker in workers]
        assert [place.ready for place in places] == [True, True]
        assert places[1].templates_version is None
        for ids in (IDS[:200], IDS[100:], IDS[50:60], []):
            for worker in workers:
                holding(worker, *ids)
            for place in places:
                await until("it is known", lambda p=place, ids=ids: known(p) == ids)
        assert all(place.misses == 0 and place.up for place in places)


async def test_a_restarted_worker_s_templates_are_known_anew() -> None:
    async with cluster(hardware=FAST, models=("flux",)) as (router, (worker,)):
        place = router.pool.workers[worker.address]
        holding(worker, *IDS[:3])
        await until("known", lambda: len(known(place)) == 3)
        worker.silent = True
        await until("down", lambda: not place.up)
        worker._listings = type(worker._listings)()
        holding(worker, IDS[7])
        worker.silent = False
        await until("known anew", lambda: place.index.of(place.number) == {"host": [IDS[7]]})
        assert place.templates_version not in ("", None)


async def test_a_record_of_a_hundred_thousand_templates_is_no_miss() -> None:
    """The worker is an older one, which lists them each time: the router asks it less often."""
    many = [f"{number:032x}" for number in range(150_000)]
    async with cluster(hardware=FAST, kinds=(Old,), models=("flux",)) as (router, (worker,)):
        place = router.pool.workers[worker.address]
        holding(worker, *many)
        raw = worker.control_answer({"op": "status"})
        assert len(raw) > 4 * 2**20
        assert json.loads(raw)["templates"]["host"][-1] == many[-1]
        await until("known", lambda: len(known(place)) == len(many))
        await asyncio.sleep(0.3)
        assert place.up
        assert router.pool._interval_s(place) > 10 * router.pool.config.workers.poll_interval_s
