"""The picture of a cluster: what Prometheus answers becomes curves, and those a small picture."""

from __future__ import annotations

import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image

from maskserve_harness.cluster.picture import PANELS, plot, query_range


class Prometheus(BaseHTTPRequestHandler):
    """Answers each range query with two series."""

    def do_GET(self) -> None:
        asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        begin = float(asked["start"][0])
        series = [
            {"metric": {"worker": name}, "values": [[begin + i, str(i * rate)] for i in range(60)]}
            for name, rate in (("worker-0", 1), ("worker-1", 2))
        ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"result": series}}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_curves_of_prometheus_become_a_small_picture(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Prometheus) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        panels = {title: query_range(url, query, 1e9, 1e9 + 60) for title, query in PANELS.items()}
        server.shutdown()
    for curves in panels.values():
        assert curves["worker-1"] == (list(range(60)), [2.0 * i for i in range(60)])
    path = tmp_path / "cluster.png"
    plot(panels, 30.0, path)
    assert path.stat().st_size < 200_000
    with Image.open(path) as picture:
        assert min(picture.size) > 300
