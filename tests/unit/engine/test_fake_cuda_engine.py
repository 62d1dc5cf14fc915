"""The engine's own loop on a CUDA device that computes nothing: rows come and go, answers and
previews leave, and no turn waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from maskserve_engine.base.device_clock import Span
from maskserve_engine.base.job import ProgressEvent
from maskserve_engine.base.mailbox import OutputThread
from maskserve_engine.batch.sequence_parallel import Exchange
from maskserve_engine.cache.store import Store
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.encoder import Encoder
from maskserve_engine.families.flux.adapter import FluxAdapter
from maskserve_engine.families.mmdit.rows import FlowRow
from maskserve_engine.families.registry import load_adapter, load_encoder
from maskserve_engine.families.unet.adapter import UnetAdapter
from maskserve_engine.families.unet.rows import UnetRow
from maskserve_engine.loop.local_executor import LocalExecutor
from maskserve_engine.requests.executor import StepInput, StepResult
from maskserve_engine.requests.state import Priming, RequestState
from maskserve_engine.start.assembly import assemble
from maskserve_studies.kernels.fake_cuda import DEVICE, FakeCuda, fake_weights
from tests.fakes.jobs import config_of, guided
from tests.support import examples
from tests.support.covering import is_unet
from tests.support.draws import fresh_rng
from tests.support.engines import job
from tests.support.sink import Sink

pytestmark = pytest.mark.spread("loop", sort=is_unet)

T = TypeVar("T")
Real = FluxAdapter | UnetAdapter
MODELS = ("fill", "inpaint", "sd-base", "sdxl-fill")
# Of two models of a family these do more: a negative prompt, and a condition with sizes.
ONE_OF_A_FAMILY = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("fill", "sd-base"))) for name in MODELS
]


def aside(call: Callable[[], T]) -> T:
    """Done by another thread, where tensors are real: as the thread that hands edits in does."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def on_fake(real: Real) -> Real:
    """The adapter with its model on the fake device."""
    model = fake_weights(real.model.to("meta"))
    if isinstance(real, FluxAdapter):
        return FluxAdapter(real.spec, model, real.sampler)
    return UnetAdapter(real.spec, model, real.sampler, exact_vae=False, halo=real._halo)


class Watched(LocalExecutor):
    """Writes down what each step ran."""

    def __init__(self, adapter: Adapter, store: Store, loop: Loop) -> None:
        super().__init__(adapter, store)
        self._loop = loop

    def run(self, step: StepInput, exchange: Exchange | None = None) -> StepResult:
        result = super().run(step, exchange)
        self._loop.spans.append(result.span)
        self._loop.primed = any(row.startswith("prime:") for row in step.rows)
        self._loop.looked_ahead = any(row.looked_ahead for row in result.rows)
        self._loop.ran = [
            (row_result.row, row_result.read, row_result.text) for row_result in result.rows
        ]
        return result


class Loop:
    """An engine on the fake device that a test turns by hand; each turn is judged.

    None may wait. One that makes no row, and whose rows are those of the turn before and leave out
    what they left out then, copies nothing between host and device but answers and previews, and
    for priming rows and rows with lookahead, whose tokens change.
    """

    def __init__(self, folder: Path, real: Real, encoder: Encoder, cuda: FakeCuda) -> None:
        self.cuda, self.encoder = cuda, encoder
        adapter = on_fake(real)
        adapter.anchors = lambda *of: aside(lambda: real.anchors(*of))  # type: ignore[method-assign]
        config = config_of(
            folder,
            model={"device": str(DEVICE), "dtype": "bfloat16"},
            cache={"budget_bytes": 2**28, "dense_above_ratio": 1.0},
        )
        self.engine = assemble(
            config,
            adapter,
            lambda: aside(lambda: encoder.encode_prompt("")),
            executor=lambda adapter, store: Watched(adapter, store, self),
        )
        self.engine.output.start()
        self.ran: list[tuple[str, bool, bool]] = []
        """Rows of the last turn, and whether each read an entry and computed its text."""
        self.spans: list[Span] = []
        """Spans of all turns."""
        self.looked_ahead = False
        """Whether one of them computed an anchor ahead."""
        self.steady = 0
        """Turns in which nobody came or went."""
        self.primed = False
        """Whether the last turn primed a template."""

    def submit(self, seed: int, name: str, **settings: Any) -> Sink:
        sink = Sink()
        aside(lambda: self.engine.submit(job(self.encoder, seed, name, **settings), sink))
        return sink

    def turn(self) -> None:
        """One turn of the engine, judged."""
        before, running_before, looked_ahead = self.ran, self._running_ids(), self.looked_ahead
        with self.cuda.watch() as log:
            self.engine.run_once()
        self.cuda.catch_up()
        assert [copy for copy in log.copies if "waits" in copy] == []
        changed = (
            self.primed
            or self.looked_ahead
            or looked_ahead
            or not self._running_ids() <= running_before
        )
        if self.ran == before and not changed:
            assert [copy for copy in log.copies if "in transfer.__init__" not in copy] == []
            self.steady += 1

    def _running_ids(self) -> set[str]:
        manager = self.engine.manager
        request_states: list[RequestState | Priming] = [*manager.edits.values()]
        request_states += manager.primings.active.values()
        return {edit.request_id for edit in request_states if edit.running}

    def close(self) -> None:
        self.engine.output.close(5.0)
        self.engine.cache.store.close()


@pytest.fixture(params=MODELS)
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    if "-" in request.param:
        folder: Path = request.getfixturevalue("tiny_unets")[request.param]
    else:
        folder = request.getfixturevalue(f"tiny_{request.param}")
    encoder = load_encoder(config_of(folder))
    real = load_adapter(config_of(folder, model={"dtype": "bfloat16"}))
    assert isinstance(real, FluxAdapter | UnetAdapter)
    with FakeCuda() as cuda:
        new_loop = Loop(folder, real, encoder, cuda)
        with new_loop.engine.adapter.session():
            yield new_loop
        new_loop.close()


@pytest.mark.parametrize("loop", ONE_OF_A_FAMILY, indirect=True)
def test_rows_come_and_go_and_no_turn_waits_for_them(loop: Loop) -> None:
    """Dense and cached ones, some with a negative prompt, of templates that are primed meanwhile;
    they leave when they are done or are cancelled.
    """
    rng = fresh_rng()
    sinks: dict[str, Sink] = {}
    reads, led = False, loop.engine.adapter.spec.true_cfg
    turns, most = (24, 12) if isinstance(loop.engine.adapter, FluxAdapter) else (12, 5)
    for number in range(examples.number(turns, least=6)):
        if number == 0 or rng.random() < 0.15:
            settings = guided(rng) if led and rng.random() < 0.5 else {}
            settings["cache"] = str(rng.choice(["off", "auto", "require"]))
            settings["num_inference_steps"] = int(rng.integers(2, most))
            settings["preview_every"] = int(rng.integers(3))
            sinks[str(number)] = loop.submit(int(rng.integers(2)), str(number), **settings)
        if rng.random() < 0.03:
            loop.engine.cancel(str(rng.choice(list(sinks))))
        if len(loop.engine.manager.scheduler) or not loop.engine.inbox.empty():
            loop.turn()
            reads |= any(read for _, read, _ in loop.ran)
    settings = {"num_inference_steps": max(4, most // 2), "cache": "require"}
    last = loop.submit(0, "last", **settings)
    while not last.events:
        loop.turn()
        reads |= any(read for _, read, _ in loop.ran)
    assert last.final().meta["cache"] == "hit"
    assert reads
    while len(loop.engine.manager.scheduler):
        loop.turn()
    steady, future = loop.steady, loop.submit(0, "alone", num_inference_steps=4, cache="off")
    while not future.events:
        loop.turn()
    assert loop.steady > steady + 1


def test_an_answer_is_told_when_the_device_has_it(loop: Loop) -> None:
    """Not before, though the turn that asked for it is over."""
    sink = loop.submit(0, "edit", num_inference_steps=1, cache="off")
    loop.engine.run_once()
    assert not loop.engine.manager.edits
    assert not sink.done.wait(0.05)
    loop.cuda.catch_up()
    assert sink.final().latents.ndim == 3


def test_the_host_stays_near_the_device(loop: Loop) -> None:
    """One step is under way when the next is decided: an edit that arrives then is in it, and a
    client is told of the steps that the device has done.
    """
    first = loop.submit(0, "first", num_inference_steps=8, progress=True, cache="off")
    for _ in range(6):
        loop.engine.run_once()
        done = sum(span.seconds() is not None for span in loop.spans)
        assert done >= len(loop.spans) - 1
        assert len(first.events) <= done
    second = loop.submit(0, "second", num_inference_steps=2, cache="off")
    loop.engine.run_once()
    assert "second" in {row for row, *_ in loop.ran}
    assert len(loop.spans) - done <= 2
    while not (first.done.is_set() and second.done.is_set()):
        if len(loop.engine.manager.scheduler):
            loop.engine.run_once()
        loop.cuda.catch_up()
    progress = [event.step for event in first.events if isinstance(event, ProgressEvent)]
    assert progress == [*range(1, len(first.events))]


def test_a_turn_that_waits_for_an_answer_is_seen(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputThread, "send_when_ready", lambda self, sink, make, _=None: make())
    loop.submit(0, "edit", num_inference_steps=2, preview_every=1, cache="off")
    with pytest.raises(AssertionError, match="the host waits"):
        loop.turn()


def test_a_turn_that_looks_at_a_row_is_seen(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (FlowRow, UnetRow):

        def looks(row: Any, *moves: Any, advance: Any = rows.advance) -> None:
            moves[0].cpu()
            advance(row, *moves)

        monkeypatch.setattr(rows, "advance", looks)
    loop.submit(0, "edit", num_inference_steps=4, cache="off")
    with pytest.raises(AssertionError, match="the host waits"):
        loop.turn()
