"""Verdicts of a vision-language model at the operator's URL, by OpenAI's chat API.

The operator chooses the URL, so any network is allowed; but redirects and proxies are not used, and
answers are bounded in time and bytes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import msgspec
from msgspec import Meta

from maskserve_common.errors import EngineFailed
from maskserve_common.imaging.images import encode_png
from maskserve_workflows.node_request import ModelSetup, NodeRequest
from maskserve_workflows.node_types import node, node_model
from maskserve_workflows.pictures import read_picture
from maskserve_workflows.ports import Picture, Verdict, Words
from maskserve_workflows.values import Judgement

_QUESTION: Final = (
    "How well does the picture show this: {statement}\n"
    "Answer with a whole number from 0 (not at all) to 100 (exactly), and nothing else."
)
_AT_ONCE: Final = 8
_MOST_BYTES: Final = 2**20


@node(model="verify", price_s=1.0, deterministic=False)
def agrees(
    picture: Picture, statement: Words | str, *, enough: Annotated[float, Meta(ge=0, le=1)] = 0.7
) -> Verdict:
    """Ask the operator's vision-language model whether the statement is true of the picture: a
    score from 0 to 1, which passes from `enough` on.
    """
    raise NotImplementedError


@node_model("verify", source="verify_url")
class VerifyNodes:
    """A vision-language model at a URL."""

    def __init__(self, setup: ModelSetup) -> None:
        nodes, self._limits = setup.config.nodes, setup.config.limits
        key = Path(nodes.verify_key_file).read_text().strip() if nodes.verify_key_file else "none"
        self._url = f"{setup.source.rstrip('/')}/chat/completions"
        self._model = nodes.verify_model
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"}, timeout=nodes.verify_timeout_s,
            trust_env=False, follow_redirects=False,
        )  # fmt: skip
        self._threads = ThreadPoolExecutor(_AT_ONCE, "verify")

    def run(self, calls: Sequence[NodeRequest]) -> Iterable[dict[str, Any] | Exception]:
        """Yield each call's outputs; all calls run concurrently."""
        return self._threads.map(self._verdict, calls)

    def _verdict(self, request: NodeRequest) -> dict[str, Any] | Exception:
        try:
            score = self._score(request.inputs["picture"], request.inputs["statement"])
        except (httpx.HTTPError, httpx.InvalidURL):
            return EngineFailed("the verifier does not answer")
        except Exception as error:
            return error
        return {"verdict": Judgement(score, score >= request.settings["enough"])}

    def _score(self, encoded: bytes, statement: str) -> float:
        png = base64.b64encode(encode_png(read_picture(encoded, self._limits))).decode()
        content = [
            {"type": "text", "text": _QUESTION.format(statement=statement)},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}},
        ]
        body = {
            "model": self._model, "messages": [{"role": "user", "content": content}],
            "temperature": 0, "max_tokens": 16,
        }  # fmt: skip
        raw = b""
        with self._client.stream("POST", self._url, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise EngineFailed(f"the verifier answers with status {answer.status_code}")
            for part in answer.iter_bytes():
                raw += part
                if len(raw) > _MOST_BYTES:
                    raise EngineFailed(f"the verifier's answer is over {_MOST_BYTES} bytes")
        try:
            reply = msgspec.json.decode(raw)["choices"][0]["message"]["content"]
            number = re.search(r"\d+", reply)
        except (msgspec.MsgspecError, LookupError, TypeError):
            number = None
        if number is None:
            raise EngineFailed("the verifier answers with no number")
        return min(int(number[0]), 100) / 100
