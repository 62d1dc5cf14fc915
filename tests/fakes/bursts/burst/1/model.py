"""burst: sends the requested number of events as fast as it can, then a final one."""

import json
import threading

import triton_python_backend_utils as pb_utils

from maskserve_triton.acks import AckReceiver, FlowControl
from maskserve_triton.answer import Answer
from maskserve_triton.tensor_io import read_bytes


class TritonPythonModel:
    def initialize(self, args):
        self._acks = None

    def execute(self, requests):
        for request in requests:
            document = json.loads(read_bytes(pb_utils, request, "ASKED"))
            answer = Answer(pb_utils, request.get_response_sender())
            if document["paced"] and self._acks is None:
                self._acks = AckReceiver(document["runtime_dir"])
            work = self._paced if document["paced"] else straight
            threading.Thread(target=work, args=(answer, document), daemon=True).start()

    def finalize(self):
        if self._acks is not None:
            self._acks.close()

    def _paced(self, answer, settings):
        events = Arriving(answer, lambda: self._acks.drop(settings["key"]))
        self._acks.keep(settings["key"], events)
        for _ in range(settings["events"]):
            events.event("progress", {"META": b"event"})
            events.arrived.acquire()
        events.finish({"META": b"final"})


class Arriving(FlowControl):
    def __init__(self, answer, ended):
        super().__init__(answer, ended)
        self.arrived = threading.Semaphore(0)

    def acknowledge(self):
        super().acknowledge()
        self.arrived.release()


def straight(answer, settings):
    for _ in range(settings["events"]):
        answer.event("progress", {"META": b"event"})
    answer.finish({"META": b"final"})
