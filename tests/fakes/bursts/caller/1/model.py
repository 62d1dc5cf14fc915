"""caller: a front under load. Many threads call `burst`; another keeps Python's lock busy."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import triton_python_backend_utils as pb_utils

from maskserve_triton.acks import AckSender
from maskserve_triton.answer import Answer
from maskserve_triton.pipeline import responses_of
from maskserve_triton.tensor_io import output, read_bytes, tensor


class TritonPythonModel:
    def initialize(self, args):
        pass

    def execute(self, requests):
        for request in requests:
            document = json.loads(read_bytes(pb_utils, request, "ASKED"))
            answer = Answer(pb_utils, request.get_response_sender())
            threading.Thread(target=load, args=(answer, document), daemon=True).start()


def load(answer, settings):
    event = threading.Event()
    threading.Thread(target=keep_busy, args=(event,), daemon=True).start()
    with ThreadPoolExecutor(settings["threads"]) as pool:
        results = list(pool.map(call, [settings] * settings["calls"]))
    event.set()
    answer.finish({"META": json.dumps(results).encode()})


def call(settings):
    """The number of events before the final one."""
    acks = AckSender(settings["runtime_dir"])
    inputs = [tensor(pb_utils, "ASKED", json.dumps({**settings, "key": acks.key}).encode())]
    request = pb_utils.InferenceRequest(
        model_name="burst", requested_output_names=["META"], inputs=inputs
    )
    events = 0
    for response in responses_of(request):
        if settings["paced"]:
            acks.acknowledge()
        events += output(pb_utils, response, "META") == b"event"
    return events


def keep_busy(done):
    while not done.wait(0.001):
        sum(range(20_000))
