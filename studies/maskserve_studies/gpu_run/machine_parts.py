"""The parts of a machine's measurement other than plain steps: kernels of a step, loads during
steps, rivals, T5 and the VAE. A part that cannot run gives its reason.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from transformers import T5Config, T5EncoderModel

from maskserve_benchmarks.checkout import DEMO_MODEL
from maskserve_benchmarks.published_models import FLUX_VAE, T5_XXL
from maskserve_benchmarks.steps.step_rig import Bench
from maskserve_benchmarks.timing import Timer
from maskserve_engine.batch.graphs import Graphs
from maskserve_engine.batch.transfer import moved
from maskserve_engine.cache.entries import Coded, encode
from maskserve_engine.cache.entry_file import StoredEntry
from maskserve_engine.cache.folder_tier import FolderTier
from maskserve_engine.cache.loader import CudaMover, HostMover, LinkRates, Loader, Mover
from maskserve_engine.cache.memory_tier import MemoryTier
from maskserve_engine.cache.registered import Registrar
from maskserve_engine.cache.store import Handle, Store
from maskserve_engine.cache.tier import Note
from maskserve_engine.fitting.entry_store import open_reserve
from maskserve_engine.layers.attention import bucket, missing_varlen, segments, varlen
from maskserve_engine.layers.scatter_kv import Change, KvSource, scatter_kv, slots_of
from maskserve_engine.spec.mmdit import RECORDED_ROWS
from maskserve_engine.stages.quantise import quantise

RATIO = 0.11
WAYS = {"gathered": LinkRates(direct=0.0), "direct": LinkRates(gathered=1.0)}
"""Link rates that force the loader to use one of its two ways, whichever is faster."""
RIVALS = ("eager", "compiled", "fp8, compiled")
_KEY, _ENDLESS = "template", 2**50
_BUFFER = 32 * 2**20
_ROUNDS, _CALLS = 3, 20
_LOADS = 2
"""Loads that rows may have in flight: those of the last step and of the next step."""
_SHM = Path("/dev/shm")
Figures = dict[str, Any]
Quantise = Callable[[Any, Any, torch.device], None]


def as_served(bench: Bench) -> Any:
    """The bench's weights as a worker has them. Where CUDA graphs exist, rows with
    `FlowRow.recorded` are recorded.
    """
    graphs = Graphs.on(bench.device, bench.dtype, RECORDED_ROWS)
    return (
        bench.weights if graphs is None else replace(bench.weights, graphs=graphs, placed_bytes=0)
    )


def time_loads(bench: Bench, batches: Sequence[int]) -> list[Figures]:
    """Time three things: steps whose entries are on the device, steps that load all their entries
    from files in memory at the same time, and the loads alone. Each way of the loader that works
    here is timed. On a GPU, loads use a reserve and steps are recorded, as in the engine.
    """
    weights, bench.weights = bench.weights, as_served(bench)
    try:
        return _time_loads(bench, batches)
    finally:
        bench.weights, bench.batch = weights, None


def _time_loads(bench: Bench, batches: Sequence[int]) -> list[Figures]:
    bench.fill_entry("kv")
    device = bench.device
    mover: Mover = HostMover()
    if device.type == "cuda":
        mover = CudaMover(device, _BUFFER, registrar=Registrar(device))
    figures = []
    with tempfile.TemporaryDirectory(dir=_SHM if _SHM.is_dir() else None) as folder:
        tier = FolderTier("host", folder, _ENDLESS, opened=mover.register)
        # The device has no budget for entries, and loads are forced; else entries would stay there.
        reserve = open_reserve(mover, _LOADS * max(batches) * bench.entry.room)
        store = Store(MemoryTier(0), [tier], None, Loader(mover), reserve=reserve)
        try:
            for way, batch in ((way, batch) for way in WAYS for batch in batches):
                timing = _time_load(bench, store, mover, way, batch)
                if timing is not None:
                    figures.append({"way": way, "batch": batch, **timing})
        finally:
            store.close()
    return figures


def _time_load(bench: Bench, store: Store, mover: Mover, way: str, batch: int) -> Figures | None:
    entry = bench.entry
    if store.lower.locate(_KEY, [entry.anchor]) is None:
        store.put(_KEY, entry, Note(_KEY, 1, 1.0))
        store.settle()
    store.hold(_KEY, entry.anchor)  # opens the file if it is not open
    store.settle()
    source = store.hold(_KEY, entry.anchor)
    assert source is not None
    assert isinstance(source.entry, StoredEntry)
    if isinstance(mover, CudaMover):
        mover.rates = WAYS[way]
    if way == "direct" and source.entry.file.registered is None:
        return None
    rows = [bench.row(RATIO, seed) for seed in range(batch)]
    for row in rows:
        row.recorded = True
    device_entries = [row.entry for row in rows]
    parts = [(block, "kv") for block in range(bench.blocks)]
    timer, request_number = Timer(bench.device), 0
    bench.batch = None

    def request() -> list[Handle]:
        nonlocal request_number
        request_number += 1
        handles = []
        for row in rows:
            assert row.selection is not None
            handle = store.request(_KEY, entry.anchor, row.selection, source, force=True)
            assert handle is not None
            assert store.reserve is None or handle.load.memory is not None, "no room in the reserve"
            handle.want(parts, request_number)
            handles.append(handle)
        return handles

    def without_loads() -> None:
        for row, device_entry in zip(rows, device_entries, strict=True):
            row.entry = device_entry
        bench.step(rows, "kv")

    def with_loads() -> None:
        handles = request()
        for row, handle in zip(rows, handles, strict=True):
            row.entry = handle
        bench.step(rows, "kv")
        release(handles)

    def loads() -> None:
        handles = request()
        for handle in handles:
            for part in parts:
                handle.wait_whole(*part)
        release(handles)

    def release(handles: Sequence[Handle]) -> None:
        for handle in handles:
            handle.release()

    handles = request()
    nbytes = sum(handle.load.nbytes for handle in handles)
    release(handles)
    del handles  # a handle keeps its memory
    stats_before = _allocator(bench.device)
    ms = in_turn(
        timer, {"alone_ms": without_loads, "beside_ms": with_loads, "load_ms": loads}, _ROUNDS
    )
    stats_after = _allocator(bench.device)
    allocations = {name: stats_after[name] - stats_before[name] for name in stats_after}
    per_s = round(nbytes / 1e6 / ms["load_ms"], 4)
    return {**ms, "bytes": nbytes, "gb_per_s": per_s, "allocator": allocations}


def _allocator(device: torch.device) -> dict[str, int]:
    """The counters of torch's allocator on a GPU: how often it returned memory to the driver (the
    whole device waits for that), how often that did not help, and the bytes that it holds.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = ("num_alloc_retries", "num_ooms", "reserved_bytes.all.current")
    return {name: int(stats.get(name, 0)) for name in names}


def in_turn(
    timer: Timer, variants: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, float]:
    """Median milliseconds. A first call of each way is not timed."""
    for call in variants.values():
        call()
    rounds_ms = [{name: timer.ms(call) for name, call in variants.items()} for _ in range(rounds)]
    return {
        name: round(statistics.median(round_ms[name] for round_ms in rounds_ms), 3)
        for name in variants
    }


def time_attention(bench: Bench, batches: Sequence[int], ratios: Sequence[float]) -> list[Figures]:
    """One block's attention for rows that leave their text out, with the variable-length kernel and
    with `scaled_dot_product_attention`. Rows of one length use the latter if cuDNN runs it.
    """
    heads, head_dim = bench.config["num_attention_heads"], bench.config["attention_head_dim"]
    keys, figures = bench.work.tokens[0] + bench.text, []
    for batch, ratio in product(batches, ratios):
        queries = bucket(round(ratio * bench.work.tokens[0]))
        rows = moved(segments([queries] * batch, [keys] * batch), bench.device)
        shapes = [(batch * item, heads, head_dim) for item in (queries, keys, keys)]
        query, key, value = (torch.randn(s, device=bench.device).to(bench.dtype) for s in shapes)
        by_row = (x.view(batch, -1, heads, head_dim) for x in (query, key, value))
        q, k, v = (x.transpose(1, 2) for x in by_row)
        variants: dict[str, Callable[[], object]] = {
            "sdpa_ms": partial(F.scaled_dot_product_attention, q, k, v)
        }
        if bench.device.type == "cuda" and missing_varlen(bench.device, bench.dtype) is None:
            variants["varlen_ms"] = partial(varlen, query, key, value, rows)
        timer = Timer(bench.device)
        ms = in_turn(
            timer, {name: repeated(call, _CALLS) for name, call in variants.items()}, _ROUNDS
        )
        timings = {name: round(item / _CALLS, 4) for name, item in ms.items()}
        figures.append(
            {"batch": batch, "mask_ratio": ratio, "queries": queries, "keys": keys, **timings}
        )
    return figures


def time_placing(bench: Bench, batches: Sequence[int]) -> list[Figures]:
    """Time the placing of one block's cached activations, with none, one or two changes added.
    `gb_per_s` counts every byte read or written once.
    """
    width, tokens = bench.weights.width, round((1.0 - RATIO) * bench.work.tokens[0])
    figures = []
    for batch, changes, format in product(batches, range(3), ("int8", "int4")):

        def coded(format: str = format) -> Coded:
            return encode(torch.randn(tokens, width, device=bench.device).to(bench.dtype), format)

        spans = [(n * tokens, (n + 1) * tokens) for n in range(batch)]
        slots = moved(slots_of(spans), bench.device)
        sources = [
            KvSource(
                (coded(), coded()), None,
                tuple(Change((coded(), coded()), 0.25) for _ in range(changes)),
            )
            for _ in range(batch)
        ]  # fmt: skip
        outs = torch.empty(2, batch * tokens, width, device=bench.device, dtype=bench.dtype)
        call = partial(scatter_kv, sources, outs.unbind(), slots)
        ms = in_turn(Timer(bench.device), {"ms": repeated(call, _CALLS)}, _ROUNDS)["ms"] / _CALLS
        read = sum(part.nbytes for source in sources for part in source.parts) * (1 + changes)
        per_s = round((read + outs.nbytes) / 1e6 / ms, 1)
        step = {"batch": batch, "format": format, "changes": changes}
        figures.append({**step, "ms": round(ms, 4), "gb_per_s": per_s})
    return figures


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Make the call this many times in a row, so that the device runs one call while the host
    launches the next.
    """

    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def time_rivals(
    bench: Bench,
    batches: Sequence[int],
    rounds: int,
    rivals: Sequence[str] = RIVALS,
    quantised: Quantise = quantise,
) -> list[Figures]:
    """Dense steps of diffusers' transformer with the same weights: as it is, with compiled blocks,
    and with blocks in FP8 as well. They take turns with our dense and cached steps. A rival that
    cannot run here has a reason (`why`) in place of a time.
    """
    bench.fill_entry("kv")
    models: dict[str, Any] = {}
    why: dict[str, str] = {}
    for name in rivals:
        try:
            models[name] = rival_of(bench, name, quantised)
        except Exception as error:  # libraries and drivers raise all kinds of errors
            why[name] = in_words(error)
    figures = []
    for batch in batches:
        inputs = inputs_of(bench, batch)
        dense = [bench.row(None, seed) for seed in range(batch)]
        cached = [bench.row(RATIO, seed) for seed in range(batch)]
        variants: dict[str, Callable[[], object]] = {}
        for name, model in list(models.items()):
            call = partial(answer_of, model, inputs)
            try:
                call()
                variants[name] = call
            except Exception as error:
                why[name] = in_words(error)
                del models[name]

        def step(rows: list[Any]) -> None:
            bench.batch = None
            bench.step(rows, "kv")

        our_ways = {
            "ours, dense": partial(step, dense),
            f"ours, m = {RATIO:g}": partial(step, cached),
        }
        ms = in_turn(Timer(bench.device), {**our_ways, **variants}, rounds)
        figures += [{"batch": batch, "who": name, "ms": value} for name, value in ms.items()]
    bench.batch = None
    return [*figures, *({"who": name, "why": value} for name, value in why.items())]


def rival_of(bench: Bench, name: str, quantised: Quantise = quantise) -> Any:
    """A copy of the model that shares its weights."""
    tensors = chain(bench.model.parameters(), bench.model.buffers())
    model = deepcopy(bench.model, {id(tensor): tensor for tensor in tensors})
    if "fp8" in name:
        quantised(model, "fp8", bench.device)
    if "compiled" in name:
        model.compile_repeated_blocks()
    return model


def inputs_of(bench: Bench, batch: int) -> Figures:
    """The inputs that diffusers' pipeline gives the transformer at one step."""
    config, (height, width) = bench.config, bench.grid
    ids = torch.zeros(height * width, 3, device=bench.device)
    ids[:, 1] = torch.arange(height, device=bench.device).repeat_interleave(width)
    ids[:, 2] = torch.arange(width, device=bench.device).repeat(height)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, device=bench.device).to(bench.dtype)

    guidance = torch.full((batch,), 3.5, device=bench.device) if config["guidance_embeds"] else None
    return {
        "hidden_states": some(height * width, config["in_channels"]),
        "encoder_hidden_states": some(bench.text, config["joint_attention_dim"]),
        "pooled_projections": some(config["pooled_projection_dim"]),
        "timestep": torch.full((batch,), 0.5, device=bench.device).to(bench.dtype),
        "img_ids": ids,
        "txt_ids": torch.zeros(bench.text, 3, device=bench.device),
        "guidance": guidance,
    }


@torch.inference_mode()
def answer_of(model: Any, inputs: Figures) -> torch.Tensor:
    answer: torch.Tensor = model(**inputs, return_dict=False)[0]
    return answer


def in_words(error: BaseException) -> str:
    """The first line of the error: some libraries print pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@torch.inference_mode()
def time_stages(device: torch.device, dtype: torch.dtype, *, demo: bool) -> Figures:
    """Time T5 over one prompt, and the VAE's encoding and decoding of one picture, with random
    weights.

    Args:
        device: the device of the weights.
        dtype: of the weights.
        demo: use the demo model's sizes, else FLUX.1's with 512 tokens and 1024 x 1024 pixels.
    """
    t5_config, vae_config, tokens, side = T5Config(**T5_XXL), FLUX_VAE, 512, 1024
    if demo:
        t5_config = T5Config.from_pretrained(DEMO_MODEL / "text_encoder_2")
        vae_config, tokens, side = AutoencoderKL.load_config(DEMO_MODEL / "vae"), 16, 128
    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            t5 = T5EncoderModel(t5_config).eval()
            vae = AutoencoderKL.from_config(vae_config).eval()
    finally:
        torch.set_default_dtype(previous_dtype)
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    picture = torch.zeros(1, 3, side, side, device=device, dtype=dtype)
    latents = vae.encode(picture).latent_dist.mean
    variants: dict[str, Callable[[], object]] = {
        "t5_ms": lambda: t5(ids),
        "encode_ms": lambda: vae.encode(picture),
        "decode_ms": lambda: vae.decode(latents),
    }
    return {"tokens": tokens, "side": side, **in_turn(Timer(device), variants, _ROUNDS)}
