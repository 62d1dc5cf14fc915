"""The models `edit` and `edit_stream`, which respond for a pipeline that cannot report its own end.

Neither a cancel nor the death of a model's process crosses a Triton ensemble, so each front watches
for both and responds by itself. Its parts, and their threads:

    EditFront       `execute` takes requests in, without waiting; a pool has one thread per edit
                    in flight, blocked in the pipeline's responses
    Calls           the edits in flight, by id
    Watcher         one thread: cancels, deadlines, the worker's health, probes
    Withdrawals     one thread receives cancels by id; a few ask the denoiser to free rows
    MetricsThread   publishes how edits ended
    Results         one thread lets the denoiser prime results that edits keep
    AdapterStore    one thread lists the adapters, a few load those of accepted edits to the host

If the denoiser dies, a pool thread stays blocked for good; the watcher has answered its client.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from maskserve_common.config import Config
from maskserve_common.contracts.edit_kinds import check_references, edit_kind
from maskserve_common.contracts.meta import meta_for_client, with_result, with_slack
from maskserve_common.contracts.parameters import parameters
from maskserve_common.contracts.request import AcceptedEdit
from maskserve_common.contracts.settings import parse_settings
from maskserve_common.contracts.tensors import PICTURES
from maskserve_common.errors import EngineFailed, MaskserveError, Overloaded, guarded
from maskserve_common.files.stages import NO_ANSWER, StageOutages
from maskserve_common.files.values import ENCODING, MAKE, RUN
from maskserve_common.observations import Observations
from maskserve_common.tracing import TRACEPARENT, Tracer, make_tracer
from maskserve_engine.spec.control_nets import ControlNets
from maskserve_engine.spec.ip_adapters import IpAdapters
from maskserve_engine.spec.model_spec import ModelSpec
from maskserve_lora.store import AdapterStore
from maskserve_triton.accept import accept_edit
from maskserve_triton.acks import AckSender
from maskserve_triton.admission import OPEN, AdmissionState, InFlight
from maskserve_triton.after_steps import AfterSteps
from maskserve_triton.answer import Answer
from maskserve_triton.call import Call, Calls, limited_request
from maskserve_triton.cancels import Withdrawals
from maskserve_triton.metrics import FrontMetrics, MetricsThread
from maskserve_triton.pipeline import Event, encode_edit, run_edit
from maskserve_triton.request_log import RequestLog
from maskserve_triton.results import Results
from maskserve_triton.tensor_io import read_bytes, read_elements
from maskserve_triton.traffic import Traffic, is_probe
from maskserve_triton.watcher import Watcher


class EditFront:
    """One front model.

    Args:
        api: triton_python_backend_utils.
        config: configuration of this worker.
        spec: spec of the served model.
        name: name of the front.
        streaming: whether progress and previews are sent on.
        tracer: by default, as the configuration says.
        lost_s: seconds after the engine has released an edit when its answer counts as lost.
    """

    def __init__(
        self,
        api: Any,
        config: Config,
        spec: ModelSpec,
        name: str,
        *,
        streaming: bool,
        tracer: Tracer | None = None,
        lost_s: float = 60.0,
    ) -> None:
        self._api = api
        self._config = config
        self._spec = spec
        self._name = name
        self._streaming = streaming
        self._admission = AdmissionState(config.runtime_dir)
        self._in_flight = InFlight(config.runtime_dir, name)
        self._stages = StageOutages(config)
        self._tracer = tracer or make_tracer(config, name)
        self._observations = Observations()
        metrics = FrontMetrics(api, config.worker, name, self._observations)
        self._metrics = MetricsThread(metrics)
        self._adapters = AdapterStore(config)
        self._adapters.start()
        self._nets, self._ip_adapters = ControlNets(config, spec), IpAdapters(config, spec)
        self._results = Results(api, config, spec)
        self._pool = ThreadPoolExecutor(config.engine.front_threads, f"{name}-pool")
        self._calls = Calls()
        self._after_steps = AfterSteps()
        self._traffic = Traffic()
        self._withdrawals = Withdrawals(api, config.runtime_dir, name, self._calls)
        self._watcher = Watcher(config, name, self._calls, self._withdrawals, self._traffic, lost_s)

    def execute(self, requests: list[Any]) -> None:
        """Take requests in; each is answered later, exactly once."""
        for request in requests:
            if is_probe(request):
                self._watcher.probe(Answer(self._api, request.get_response_sender()))
                continue
            self._in_flight.enter()
            span = self._tracer.open("pipeline", request)
            request_log = RequestLog(self._name, self._observations, self._in_flight.leave, span)
            answer = Answer(self._api, request.get_response_sender(), request_log.record_end)
            try:
                self._accept(request, answer, request_log)
            except Exception as error:
                answer.fail(guarded(request_log.request_id, error))

    def close(self) -> None:
        """Stop the threads; edits still in flight are answered."""
        self._watcher.close()
        self._withdrawals.close()
        self._calls.fail_all(Overloaded("the worker is stopping"))
        self._adapters.close()
        self._results.close()
        self._metrics.close()
        self._tracer.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _accept(self, request: Any, answer: Answer, request_log: RequestLog) -> None:
        """Check a request and start its edit.

        Raises:
            MaskserveError: its settings or the number of its pictures are refused.
        """
        pictures = {
            declared.name: read_elements(self._api, request, declared) for declared in PICTURES
        }
        pictures["IMAGE"] = pictures["IMAGE"] or [b""]
        edit, limit_name = self._check(request, pictures, request_log)
        problem = self._unavailable()
        if problem is not None:
            answer.fail(problem)
            return
        run, encoding = (str(parameters(request).get(name, "")) for name in (RUN, ENCODING))
        request_log.encodes = encoding == MAKE
        parent = request_log.span.traceparent
        self._start(Call(edit, pictures, answer, limit_name, parent, run, encoding), request_log)

    def _check(
        self, request: Any, pictures: dict[str, list[bytes]], request_log: RequestLog
    ) -> tuple[AcceptedEdit, str]:
        """Return the edit of a request, and the name of the limit on its time."""
        prompt, settings = [read_bytes(self._api, request, name) for name in ("PROMPT", "SETTINGS")]
        limited = limited_request(parse_settings(settings), request, streaming=self._streaming)
        request_log.request_id = limited.settings.request_id or ""
        request_log.due = limited.due_ms is not None or self._config.slo.enabled
        images, mask = pictures["IMAGE"], any(pictures["MASK"])
        check_references(images, limited.settings, self._spec.most_pictures)
        request_log.kind = kind = edit_kind(limited.settings, image=bool(images[0]), mask=mask)
        edit = accept_edit(
            limited.settings,
            prompt,
            self._spec,
            self._config,
            self._adapters.catalogue,
            self._nets,
            kind,
            self._ip_adapters,
        )
        after_token_s = self._after_steps.per_token_s
        return replace(edit, due_ms=limited.due_ms, after_token_s=after_token_s), limited.limit_name

    def _unavailable(self) -> MaskserveError | None:
        """Return why the worker takes no edit now; None: it takes edits."""
        if self._admission.state() != OPEN:
            return Overloaded("the worker is draining and takes no new edits")
        if self._stages.names():
            return Overloaded(NO_ANSWER)
        return self._watcher.problem()

    def _start(self, call: Call, request_log: RequestLog) -> None:
        """Watch an edit, begin to load its LoRAs, and let a thread of the pool run it."""
        for lora in call.edit.loras:
            self._adapters.begin(lora.name, lora.version)
        self._calls.add(call)
        self._watcher.wake()
        self._pool.submit(self._run, call, request_log)

    def _run(self, call: Call, request_log: RequestLog) -> None:
        try:
            for lora in call.edit.loras:
                if lora.text:
                    self._adapters.fetch(lora.name, lora.version)
            if not call.answer.done:
                self._relay(call, request_log)
                call.answer.fail(EngineFailed("the pipeline ended without an answer"))
        except Exception as error:
            call.answer.fail(guarded(call.request_id, error))
        finally:
            if call.sent:
                self._traffic.record_end()
            self._calls.remove(call)

    def _relay(self, call: Call, request_log: RequestLog) -> None:
        settings, stage_parameters = call.edit.settings, {TRACEPARENT: call.traceparent}
        if call.run:
            stage_parameters[RUN] = call.run
        if call.encoding:
            stage_parameters[ENCODING] = call.encoding
        if call.encoding == MAKE:
            meta = encode_edit(self._api, call.inputs(), stage_parameters, call.request_id)
            call.answer.finish({"IMAGE": b"", "META": json.dumps(meta).encode()})
            return
        follows_steps = settings.progress or settings.preview_every
        acks = AckSender(self._config.runtime_dir) if follows_steps else None
        call.sent = True
        for event in run_edit(self._api, call.inputs(), stage_parameters, call.request_id, acks):
            call.last_event = time.monotonic()
            self._traffic.record_event()
            if event.kind == "final":
                self._finish(call, request_log, event)
            elif self._streaming:
                call.answer.event(event.kind, {"IMAGE": event.image, "META": event.meta})

    def _finish(self, call: Call, request_log: RequestLog, event: Event) -> None:
        settings, template_id = call.edit.settings, None
        if settings.keep_result:  # before the check, which also takes time
            template_id = self._results.keep(event.image, call.request_id)
        meta = self._with_slack(call, request_log, event)
        if settings.keep_result:
            meta = with_result(meta, template_id)
        meta = meta_for_client(meta, event.values, insists=settings.insists)
        answered = call.answer.finish({"IMAGE": event.image, "META": meta})
        if template_id is not None and answered and settings.cache != "off":
            self._results.prime(template_id, call.request_id)

    def _with_slack(self, call: Call, request_log: RequestLog, event: Event) -> bytes:
        """Add the outcome of the due time, if there is one, to META of the final event."""
        taken_s = time.monotonic() - call.accepted
        self._after_steps.learn(event.values, taken_s)
        due_ms = event.values.get("due_ms")
        if due_ms is None:
            return event.meta
        request_log.slack_s = due_ms / 1e3 - taken_s
        return with_slack(event.meta, due_ms, 1e3 * taken_s)
