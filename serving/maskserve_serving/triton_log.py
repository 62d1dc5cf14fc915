"""What a worker's log says of its start."""

from __future__ import annotations

import re
from pathlib import Path

# Triton quotes a Python model's failure as "<type>: <sentence>\n\nAt:\n  <frames>".
_FAILED = re.compile(r"failed to load '([^']+)' version \d+: (\w+[\w ]*?): (.*)")
_LOADED = re.compile(r"successfully loaded '([^']+)'")
_ABORTED = re.compile(r"^terminate called after throwing an instance of '([^']+)'", re.MULTILINE)
_ERROR_LINE = re.compile(r"^(?:E\d{4} [\d:.]+ \d+ [^\]]*\] ?|error: )\"?(.*?)\"?$")
# Said of every start on a machine without a GPU.
_HARMLESS = ("CudaDriverHelper", "CUDA driver version is insufficient")


def loaded_models(text: str) -> set[str]:
    """Names of the models that Triton says it has loaded."""
    return set(_LOADED.findall(text))


def failure(text: str) -> str | None:
    """Why the server did not start, as one sentence; None if the log does not say."""
    found = _FAILED.search(text)
    if found is not None:
        return f"model {found.group(1)} failed to load: {_clean(found.group(3))}"
    aborted = _ABORTED.search(text)
    if aborted is not None:
        return f"tritonserver aborted ({aborted.group(1)})"
    errors = [match.group(1) for match in map(_ERROR_LINE.match, text.splitlines()) if match]
    errors = [e for e in errors if e.strip() and not any(words in e for words in _HARMLESS)]
    return _clean(errors[0]) if errors else None


def read_log(path: Path, start: int = 0) -> str:
    """The log from byte `start` on; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(start)
            return log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _clean(sentence: str) -> str:
    return sentence.replace("\\n", "\n").split("\n")[0].strip().strip('"')
