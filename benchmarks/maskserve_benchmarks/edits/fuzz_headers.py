"""Damage headers of LoRA files (safetensors) or GGUF files at random for some minutes. Each header
must be read or refused with an error, in bounded time and memory.

    scripts/bench fuzz_headers --form safetensors --minutes 10 --seed 1
    scripts/bench fuzz_headers --form gguf --minutes 10 --seed 1

Each file starts as a valid one, so that damage also reaches its inner parts. The command reads it
as a worker does: a LoRA by the catalogue, by the check of its values and by the loader; a GGUF file
by the check of its header and by its library. The result has the numbers of files that were read
and refused, the longest time, the growth of the process, and the error messages. A file that breaks
a rule is stored in --keep, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from maskserve_benchmarks.checkout import CHECKOUT
from maskserve_common.files.safetensors_header import head_of, reader_of
from maskserve_lora.base_layers import BaseLayers
from maskserve_lora.header_process import Bounds, describe_header
from maskserve_lora.lora_header import BadAdapter
from maskserve_lora.lora_plan import check_file

LIMIT_S = 5.0
"""Longest time for one file."""
LIMIT_BYTES = 2**30
"""Largest growth of the process's memory."""
LONGEST = 600
"""Most characters of an error message."""
_EXTREMES = (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
_TEXTS = (b"[" * 5000, b'"' + b"a" * 70_000 + b'"', b"-1", b"1e999", b"null", b"{}", b"[]", b'""',
          b"18446744073709551616", b"0.5", b"\\ud800", b"\xff\xfe", b"NaN")  # fmt: skip


class TooLong(Exception):
    """A file took longer than LIMIT_S."""


def loras() -> list[bytes]:
    """Return valid LoRA files: PEFT's form, kohya's with alphas, one with metadata, one of every
    form.
    """
    from safetensors.numpy import save

    def pair(name: str, first: str, second: str) -> dict[str, Any]:
        return {f"{name}.{first}.weight": np.ones((4, 128), np.float32),
                f"{name}.{second}.weight": np.ones((128, 4), np.float32)}  # fmt: skip

    q, flat = "transformer_blocks.0.attn.to_q", "double_blocks_0_img_attn_proj"
    peft = pair(f"transformer.{q}", "lora_A", "lora_B")
    kohya = pair(f"lora_unet_{flat}", "lora_down", "lora_up")
    alpha = {f"lora_unet_{flat}.alpha": np.array(4.0, np.float16)}
    metadata = {
        "lora_adapter_metadata": json.dumps(
            {"transformer.lora_alpha": 8, "transformer.alpha_pattern": {q: 2}}
        ),
        "ss_network_alpha": "4",
    }
    return [
        save(peft),
        save({**kohya, **alpha}),
        save(peft, metadata),
        save({**peft, **kohya}, metadata),
    ]


def ggufs() -> list[bytes]:
    """Return valid GGUF files, with tensors in several forms and metadata of every type."""
    import gguf

    files = []
    for rows in (2, 64):
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            writer = gguf.GGUFWriter(file.name, "flux")
            writer.add_array("words", [f"w{n}" for n in range(rows)])
            writer.add_array("numbers", list(range(rows)))
            writer.add_float32("share", 0.5)
            for number, form in enumerate(("F32", "Q8_0", "Q4_0", "BF16")):
                kind = gguf.GGMLQuantizationType[form]
                values = gguf.quants.quantize(np.ones((rows, 64), np.float32), kind)
                writer.add_tensor(
                    f"double_blocks.{number}.img_attn.proj.weight", values, raw_dtype=kind
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            files.append(Path(file.name).read_bytes())
    return files


def with_faults(raw: bytes, head: int, rng: np.random.Generator) -> bytes:
    """Return the file with one to four faults, most of them in its first `head` bytes."""
    data = bytearray(raw)
    for _ in range(int(rng.integers(1, 5))):
        reach = max(1, min(head, len(data)) if rng.random() < 0.9 else len(data))
        at = int(rng.integers(reach))
        match int(rng.integers(8)):
            case 0:
                data[at] = int(rng.integers(256))
            case 1:
                del data[at:]
            case 2:
                size = int(rng.choice((4, 8)))
                value = int(rng.choice(np.array(_EXTREMES, dtype=object)))
                data[at : at + size] = struct.pack("<Q", value)[:size]
            case 3:
                numbers = list(re.finditer(rb"\d+", bytes(data[:reach])))
                if numbers:
                    place = numbers[int(rng.integers(len(numbers)))]
                    value = int(rng.choice(np.array(_EXTREMES, dtype=object)))
                    data[place.start() : place.end()] = str(value).encode()
            case 4:
                data[at:at] = _TEXTS[int(rng.integers(len(_TEXTS)))]
            case 5:
                end = at + int(rng.integers(1, 200))
                data[at:at] = data[at:end] * int(rng.integers(1, 400))
            case 6:
                del data[at : at + int(rng.integers(1, 64))]
            case _:
                data += bytes(int(rng.integers(1, 4096)))
        if not data:
            break
    if rng.random() < 0.5 and raw[:4] != b"GGUF" and len(data) > 8:  # sometimes fix the length
        end = bytes(data).rfind(b"}") + 1
        data[:8] = max(0, end - 8).to_bytes(8, "little")
    return bytes(data)


def lora_reader(base: BaseLayers, bounds: Bounds, model: str) -> Callable[[Path], None]:
    """Return a function that reads a LoRA file as a worker does. It raises ValueError with a
    sentence if the worker refuses the file.
    """
    from maskserve_engine.adapters.lora_file import read_lora

    def read_file(path: Path) -> None:
        nbytes = path.stat().st_size
        with path.open("rb") as opened:
            head = head_of(reader_of(opened), nbytes)
        description = describe_header(head, nbytes, b"", bounds, base)
        if description.problem:
            raise BadAdapter(description.problem)
        check_file(path, base, max_bytes=bounds.max_bytes, max_rank=bounds.max_rank)
        read_lora(path, base, model)

    return read_file


def read_gguf(path: Path) -> None:
    """Read a GGUF file as a worker does, and turn any error into one sentence."""
    from maskserve_engine.stages.quantise import BAD_FILE, gguf_reader

    try:
        gguf_reader(path)
    except BAD_FILE as error:
        raise ValueError(
            str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        ) from error


def main() -> int:
    parser = argparse.ArgumentParser(prog=sys.argv[0], description=__doc__.split("\n\n")[0])
    parser.add_argument("--form", choices=("safetensors", "gguf"), default="safetensors")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--model", default=str(CHECKOUT / "assets/models/demo"), help="of the LoRAs"
    )
    parser.add_argument("--keep", type=Path, help="folder for files that broke a rule")
    options = parser.parse_args()
    if options.form == "safetensors":
        base = BaseLayers.of_folder(options.model)
        read_file = lora_reader(base, Bounds(options.model, "", 2**30, 256), options.model)
        whole = loras()
        heads = [8 + int.from_bytes(raw[:8], "little") for raw in whole]
    else:
        read_file, whole = read_gguf, ggufs()
        heads = [max(64, len(raw) // 2) for raw in whole]
    print(json.dumps(fuzz(options, read_file, whole, heads), indent=1))
    return 0


def fuzz(
    options: argparse.Namespace,
    read_file: Callable[[Path], None],
    whole: list[bytes],
    heads: list[int],
) -> dict[str, Any]:
    """Read damaged files and return the counts. Exit with 1 if a rule is broken."""
    rng, sentences, broken = np.random.default_rng(options.seed), Counter[str](), list[str]()
    read, worst, files = 0, 0.0, 0

    def raise_too_long(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, raise_too_long)
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        path = Path(folder, f"x.{options.form}")
        for raw in whole:  # imports the libraries and reads valid files first
            path.write_bytes(raw)
            read_file(path)
        initial_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            number = int(rng.integers(len(whole)))
            raw = with_faults(whole[number], heads[number], rng)
            path.write_bytes(raw)
            files, began, why = files + 1, time.perf_counter(), ""
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            try:
                read_file(path)
                read += 1
            except ValueError as error:
                why = str(error)
            except TooLong:
                broken.append(f"{files}: longer than {LIMIT_S} s")
            except Exception as error:
                broken.append(f"{files}: {type(error).__name__}: {error}"[:300])
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            worst = max(worst, time.perf_counter() - began)
            if "\n" in why or len(why) > LONGEST:
                broken.append(f"{files}: no sentence: {why[:200]!r}")
            if why:
                sentences[re.sub(r"'.*?'|\d+|\S+\.\S+", "…", why)[:60]] += 1
            if broken and options.keep and broken[-1].startswith(f"{files}:"):
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"{options.seed}-{files}.{options.form}").write_bytes(raw)
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - initial_kib) * 1024
    if growth > LIMIT_BYTES:
        broken.append(f"the process grew by {growth} bytes")
    report = {
        "form": options.form, "seed": options.seed, "minutes": options.minutes, "files": files,
        "read": read, "refused": sum(sentences.values()), "longest_s": round(worst, 4),
        "grown_mib": round(growth / 2**20, 1), "sentences": len(sentences),
        "most": sentences.most_common(12), "broken": broken[:20], "broken_count": len(broken),
    }  # fmt: skip
    if broken:
        print(json.dumps(report, indent=1))
        raise SystemExit(1)
    return report


if __name__ == "__main__":
    sys.exit(main())
