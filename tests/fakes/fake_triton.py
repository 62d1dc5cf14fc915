"""A program that stands for tritonserver: it answers over HTTP and keeps a record.

No model runs, so a start takes a moment. It stops answering when a file says so. It has a child
that outlives it, like a model's process.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """\
#!{python}
import sys
sys.path[:0] = {path!r}
import http.server, os, subprocess, threading, time, tomllib
from maskserve_common.status import StatusWriter, WorkerStatus

def record():
    with open(os.environ["MASKSERVE_CONFIG"], "rb") as file:
        writer = StatusWriter(tomllib.load(file)["runtime_dir"] + "/status")
    while True:
        writer.write(WorkerStatus("worker-0", "m", "ready", max_rows=1, max_waiting=1))
        time.sleep(0.1)

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        while os.path.exists({deaf!r}):
            time.sleep(0.05)
        self.send_response(200)
        self.end_headers()

outlive = f"while kill -0 {{os.getpid()}} 2>/dev/null; do sleep 0.1; done; sleep {lingers_s}"
subprocess.Popen(["/bin/sh", "-c", outlive], stdout=subprocess.DEVNULL)
threading.Thread(target=record, daemon=True).start()
port = next(int(a.split("=")[1]) for a in sys.argv if a.startswith("--http-port="))
print("fake Triton at", port, flush=True)
if os.path.exists({says!r}):
    print(open({says!r}).read(), flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def fake_triton(folder: Path, lingers_s: float = 0.0) -> Path:
    """Write the program to `folder`. While `folder/deaf` exists it answers nobody. At its start it
    prints the content of `folder/says`.
    """
    program = folder / "tritonserver"
    program.write_text(
        _PROGRAM.format(
            python=sys.executable,
            path=sys.path,
            deaf=str(folder / "deaf"),
            says=str(folder / "says"),
            lingers_s=lingers_s,
        )
    )
    program.chmod(0o755)
    return program
