"""The admission between a worker's fronts and whoever stops it."""

from __future__ import annotations

import threading
from pathlib import Path

from maskserve_triton.admission import AdmissionState, InFlight


def test_states_are_seen_by_others(tmp_path: Path) -> None:
    gate, other = AdmissionState(tmp_path), AdmissionState(tmp_path)
    assert other.state() == "open"
    gate.drain()
    assert other.state() == "draining"
    gate.stop()
    assert other.state() == "stopped"


def test_a_damaged_gate_counts_as_draining(tmp_path: Path) -> None:
    (tmp_path / "admission").write_text("")
    assert AdmissionState(tmp_path).state() == "draining"


def test_counts_add_up_over_fronts(tmp_path: Path) -> None:
    admission = AdmissionState(tmp_path)
    assert admission.in_flight() == 0
    with InFlight(tmp_path, "edit") as edits, InFlight(tmp_path, "edit_stream") as streams:
        edits.enter()
        edits.enter()
        streams.enter()
        assert admission.in_flight() == 3
        edits.leave()
        assert admission.in_flight() == 2


def test_a_front_that_starts_anew_counts_from_zero(tmp_path: Path) -> None:
    InFlight(tmp_path, "edit").enter()
    assert AdmissionState(tmp_path).in_flight() == 1
    InFlight(tmp_path, "edit")
    assert AdmissionState(tmp_path).in_flight() == 0


def test_counting_from_many_threads(tmp_path: Path) -> None:
    with InFlight(tmp_path, "edit") as edits:

        def work() -> None:
            for _ in range(200):
                edits.enter()
                edits.leave()
            edits.enter()

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert edits.count == AdmissionState(tmp_path).in_flight() == 8
