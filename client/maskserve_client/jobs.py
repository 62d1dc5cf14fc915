"""`/v1/jobs` of a router: edits without an open connection."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from maskserve_client import wire
from maskserve_client.router_http import RouterHttp
from maskserve_client.wire import ImageInput
from maskserve_common.errors import DeadlineExceeded

_PATH = "/v1/jobs"
_ENDS = ("succeeded", "failed", "cancelled")
_POLL_S = 0.5


class EditJobs(RouterHttp):
    """The jobs of an API key.

        jobs = EditJobs("http://localhost:8080", key="…")
        name = jobs.add("room.png", "mask.png", "a red sofa", num_inference_steps=20)["id"]
        [picture] = pictures(jobs.wait(name))

    A job is a dictionary with `id`, `status` (`queued`, `running`, `succeeded`, `failed`,
    `cancelled`), `progress`, `error`, and once it has succeeded `result`.
    """

    def add(
        self,
        image: ImageInput | None,
        mask: ImageInput | None,
        prompt: str,
        *,
        images: Sequence[ImageInput] = (),
        control: Sequence[ImageInput] = (),
        idempotency_key: str = "",
        **fields: Any,
    ) -> dict[str, Any]:
        """Submit an edit as a job and return the job at once.

        Args:
            image: the picture; None with the setting `template_id`, or without a source.
            mask: mask of the picture's size; None without a mask, or if a setting selects the
                edited part.
            prompt: what to paint there.
            images: references, as in `Client.edit`.
            control: a picture for each of the setting `controls`; an edit with these has no
                references.
            idempotency_key: repeated calls with the same key return the same job.
            fields: settings of an edit, and fields of `/v1/images/edits` such as `n`, `webhook`,
                `output_url`.

        Raises:
            MaskserveError: the server's error, or ServerUnavailable.
            OSError: a path cannot be read.
        """
        pictures = [picture for picture in (image, *images, *control) if picture is not None]
        files = [("image", wire.image_bytes(picture)) for picture in pictures]
        if mask is not None:
            files.append(("mask", wire.image_bytes(mask, "mask")))
            fields = {"mask_mode": "auto", **fields}
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self.send_form(_PATH, {"prompt": prompt, **fields}, files, headers)

    def list(self) -> list[dict[str, Any]]:
        """Return the last hundred jobs, without results."""
        jobs: list[dict[str, Any]] = self.call("GET", _PATH)["data"]
        return jobs

    def get(self, job_id: str) -> dict[str, Any]:
        """Return one job."""
        return self.call("GET", _path(job_id))

    def wait(self, job_id: str, timeout: float | None = None) -> dict[str, Any]:
        """Wait until a job has ended, and return it.

        Args:
            job_id: id of the job.
            timeout: seconds to wait; None: for ever.

        Raises:
            DeadlineExceeded: it has not ended by then; it continues.
            MaskserveError: the server's error, or ServerUnavailable.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (job := self.get(job_id))["status"] not in _ENDS:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"{job_id} is {job['status']} after {timeout:g} s")
            time.sleep(_POLL_S)
        return job

    def delete(self, job_id: str) -> dict[str, Any]:
        """Cancel an open job, or delete an ended one."""
        return self.call("DELETE", _path(job_id))


def pictures(job: Mapping[str, Any]) -> list[bytes]:
    """Return the picture files of a succeeded job; none if they went to its `output_url`."""
    encoded = [item.get("b64_json") for item in job["result"]["data"]]
    return [base64.b64decode(item) for item in encoded if item]


def _path(job_id: str) -> str:
    return f"{_PATH}/{quote(job_id, safe='')}"
