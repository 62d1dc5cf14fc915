"""Counts the device's memory before it is taken, and what is left for the cache."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path

import psutil
import torch

from maskserve_common.config import Config, ConfigError, Stage, sharing_the_device
from maskserve_common.config_file import read_json
from maskserve_common.contracts.memory_table import MemoryTable
from maskserve_common.files.safetensors_header import BadHeader, header_of
from maskserve_common.files.weight_files import weight_files
from maskserve_common.liveness import signed_in
from maskserve_engine.adapters.lora_loader import estimated_bytes
from maskserve_engine.cache.sizing import TemplateSize
from maskserve_engine.families.adapter import Adapter
from maskserve_engine.families.encoder import RECORDED_LENGTHS, RECORDED_PROMPTS
from maskserve_engine.families.specs import control_work, recorded_rows
from maskserve_engine.planning.entry_bytes import FORMATS
from maskserve_engine.planning.flops import ModelWork
from maskserve_engine.planning.refresh_steps import step_cache_bytes
from maskserve_engine.spec.control_nets import ControlNets, KnownControlNet
from maskserve_engine.spec.model_index import read_model_index
from maskserve_engine.spec.model_spec import ModelSpec, refresh_rule, refresh_stride
from maskserve_engine.stages.loader import device_of, dtype_of, shape_of
from maskserve_engine.stages.quantise import bytes_as, gguf_bytes, largest_layer_bytes
from maskserve_engine.stages.vae import in_tiles, vae_dtype
from maskserve_engine.stages.vae_batches import shares_calls
from maskserve_lora.lora_header import BadAdapter, header_of_file
from maskserve_lora.storage import Storage, StorageFailed

_T5 = "T5EncoderModel"
"""Class in model_index.json to which `[model] t5_weights` and `t5_offload` apply."""
_DENOISERS = ("transformer", "unet")
GPU_SHARE, _CPU_SHARE = 0.8, 0.25
"""The cache's share of the remaining memory. GPU kernels need workspace, and the allocator leaves
gaps; a host's memory is shared with other programs.
"""
_PICTURE = 3
"""Channels of an image."""
_TILED = 5
"""Pictures that a VAE in tiles holds: 1.8 in overlapping tiles, their rows, and the result."""
_SECOND_PICTURE = 0.02
"""Largest share of a device's memory that a second picture may take in the VAE's encoder."""
DeviceMemory = tuple[int, int]
"""(all, free) bytes."""


def memory_table(
    config: Config, adapter: Adapter, size: TemplateSize, memory: DeviceMemory | None = None
) -> MemoryTable:
    """Count the memory of the denoiser's device, once its weights are there.

    Args:
        config: configuration of the worker.
        adapter: the model.
        size: size of a template.
        memory: total and free bytes of the device; None: as they are now.
    """
    device = device_of(config)
    total, free = memory or device_memory(device)
    step = step_bytes(config, adapter) + size.step_bytes
    keeps = adapter.spec.keeps_placed and not _recorded(config, adapter.spec)
    if config.cache.enabled and keeps:
        step += config.cache.placed_on(device.type)
    host_free = free if device.type == "cpu" else None
    adapters, controls = (
        adapter_bytes(config, host_free),
        control_bytes(config, adapter, host_free),
    )
    stage_bytes, pending_stage_bytes = _stage_bytes(config, adapter.spec, device, total)
    pending_bytes = step + adapters + controls + pending_stage_bytes
    cache = 0
    if config.cache.enabled:
        share = GPU_SHARE if device.type == "cuda" else _CPU_SHARE
        cache = config.cache.budget_bytes or int(share * max(0, free - pending_bytes))
    remaining = free - pending_bytes - cache
    used = (
        adapter.weight_bytes
        + sum(stage_bytes.values())
        + step
        + adapters
        + controls
        + cache
        + remaining
    )
    return MemoryTable(
        device=_name(device),
        total=total,
        weights=adapter.weight_bytes,
        encoder=stage_bytes["encoder"],
        decoder=stage_bytes["decoder"],
        step=step,
        cache=cache,
        others=max(0, total - used),  # mapped files count as free though they are weights
        left=remaining,
        rows=config.engine.max_rows,
        template=size.nbytes,
        adapters=adapters,
        controls=controls,
        own=default_passes(config, adapter.spec) * refresh_bytes(config, adapter, device.type),
    )


def _stage_bytes(
    config: Config, spec: ModelSpec, device: torch.device, total: int
) -> tuple[dict[Stage, int], int]:
    """Return the bytes that each stage takes on the denoiser's device of `total` bytes, and how
    many of them are still free.
    """
    stage_bytes: dict[Stage, int] = {}
    pending_bytes = 0
    for stage in ("encoder", "decoder"):
        stage_config = sharing_the_device(config, stage)
        if config.stages.service or device_of(stage_config) != device:
            stage_bytes[stage] = 0
            continue
        weights = weight_bytes(stage_config, stage, spec)
        work = call_bytes(stage_config, stage, spec, device.type, total)
        stage_bytes[stage] = weights + work
        pending_bytes += work if is_loaded(config, stage) else weights + work
    return stage_bytes, pending_bytes


def step_bytes(config: Config, adapter: Adapter) -> int:
    """Return the bytes of the largest step beside weights and entries: `max_rows` dense rows of the
    model's native size, each with a negative prompt where the model takes one.
    """
    spec = adapter.spec
    side = spec.native_resolution // spec.vae_scale_factor
    rows, passes = config.engine.max_rows, 1 + spec.two_passes
    text = spec.text_tokens(config.model.max_sequence_length)
    work, recorded = adapter.work(side, side), min(passes * rows, _recorded(config, spec))
    values = peak_values(work, passes * rows, text) + rows * still_values(work)
    if recorded:  # recorded steps keep their memory; others need theirs beside it
        values += peak_values(work, recorded, text) + _opened_values(config, spec, work, recorded)
    return int(values) * dtype_of(config).itemsize


def _opened_values(config: Config, spec: ModelSpec, work: ModelWork, passes: float) -> float:
    """Return the numbers that recorded steps of so many passes hold beside their own tensors: what
    ControlNets' residuals are added to, and what a UNet's step caches keep, of one row.
    """
    if work.joint:  # image tokens by themselves, and behind the text
        text = spec.text_tokens(config.model.max_sequence_length)
        controlled = (2 * work.tokens[0] + text) * float(work.widths.max())
        return passes * controlled if config.controls.folder else 0.0
    if config.controls.folder:
        return passes * work.opened_row
    return (1 + spec.two_passes) * work.opened_row if refresh_stride(config, spec) else 0.0


def _recorded(config: Config, spec: ModelSpec) -> float:
    """Return the most dense rows of a step that is recorded as a CUDA graph."""
    return recorded_rows(spec, config) if device_of(config).type != "cpu" else 0


def refresh_bytes(config: Config, adapter: Adapter, device: str) -> int:
    """Return the bytes of a pass in the step cache of an edit without a template, at native size
    and with nearly all tokens cached; 0: edits have no refresh steps.
    """
    spec = adapter.spec
    if not refresh_stride(config, spec):
        return 0
    side = spec.native_resolution // spec.vae_scale_factor
    return _step_cache_bytes(config, spec, adapter.work(side, side), device)


def default_passes(config: Config, spec: ModelSpec) -> int:
    """Return the passes of an edit that sets no guidance."""
    scale = spec.guidance_default(config.model.guidance_scale)
    return 1 + (spec.guidance == "cfg" and scale > spec.guides_above)


def _step_cache_bytes(config: Config, spec: ModelSpec, work: ModelWork, device: str) -> int:
    """Return the bytes of a row's step cache with nearly all tokens cached, in the model or one of
    its ControlNets, for one pass.
    """
    rule = refresh_rule(config, spec, device)
    text = rule.text * spec.text_tokens(config.model.max_sequence_length)
    dtype = str(dtype_of(config)).removeprefix("torch.")
    fmt = FORMATS[dtype if rule.format == "model" else rule.format]
    tokens = [tuple(float(n + text) for n in work.tokens)]
    return step_cache_bytes(work, tokens, fmt, 1 + spec.refresh.second_order)


def adapter_bytes(config: Config, host_free: int | None = None) -> int:
    """Return the bytes to reserve for LoRAs on the denoiser's device: their budget.

    A CPU takes memory for a file only when it loads the file, so it reserves at most what the files
    of a folder take, and a share of what is free.

    Args:
        config: configuration of the worker.
        host_free: free bytes of the host, if the device is a CPU; None: it is a GPU.
    """
    store, budget = config.adapters.store, config.adapters.device_bytes
    if not store:
        return 0
    if host_free is None:
        return budget
    return min(budget, int(_CPU_SHARE * host_free), _lora_bytes(config, budget))


def _lora_bytes(config: Config, unknown: int) -> int:
    """Return the bytes that all LoRAs of the store take once they are loaded; `unknown` if it is no
    folder of the host.
    """
    store = config.adapters.store
    if not Path(store).is_dir():
        return unknown
    try:
        files = Storage(store, config.adapters.timeout_s).files().values()
    except StorageFailed:
        return unknown
    return sum(
        estimated_bytes(config, _half_bytes(Path(store, file.path), file.nbytes))
        for file in files
        if file.nbytes <= config.adapters.max_bytes
    )


def _half_bytes(path: Path, nbytes: int) -> int:
    """Return about how many bytes the factors of a LoRA file take in half precision."""
    try:
        return header_of_file(path).product_bytes or nbytes
    except (BadAdapter, OSError):
        return nbytes


def control_bytes(config: Config, adapter: Adapter, host_free: int | None = None) -> int:
    """Return the ControlNets' bytes on the denoiser's device: their budget (on a CPU as
    `adapter_bytes` says), each row's step cache in the largest net for each pass, and the residuals
    of rows and lookahead. With a service the denoiser holds the residuals alone (`service_bytes`).
    """
    controls, nets = config.controls, _nets(config, adapter)
    works = _net_works(adapter, nets)
    if not controls.folder:
        return 0
    residual_bytes, rows = _residual_bytes(config, works), config.engine.max_rows
    ahead = config.cache.enabled and refresh_stride(config, adapter.spec) > 0
    row_bytes = _passes(adapter.spec) * (rows + ahead) * residual_bytes
    if controls.service:
        return row_bytes
    budget = controls.device_bytes
    if host_free is not None:
        net_bytes = sum(net.numbers for net in nets) * dtype_of(config).itemsize
        budget = min(budget, int(_CPU_SHARE * host_free), net_bytes)
    return budget + row_bytes + _net_cache_bytes(config, adapter.spec, works)


def service_bytes(config: Config, adapter: Adapter) -> int:
    """Return the bytes of a ControlNet service's device for one such worker: the nets' budget, the
    model's modules that they run, the step caches of the worker's rows, the largest step, and the
    memory that it lends.
    """
    spec, works = adapter.spec, _net_works(adapter, _nets(config, adapter))
    text, rows = spec.text_tokens(config.model.max_sequence_length), config.engine.max_rows
    passes = _passes(spec) * rows
    peak = max((peak_values(work, passes, text) for work in works), default=0)
    step = peak * dtype_of(config).itemsize + passes * _residual_bytes(config, works)
    fixed_bytes = config.controls.device_bytes + config.controls.ipc_bytes
    fixed_bytes += adapter.net_module_bytes
    return fixed_bytes + step + _net_cache_bytes(config, spec, works)


def _nets(config: Config, adapter: Adapter) -> list[KnownControlNet]:
    """Return the usable ControlNets of the folder."""
    return [net for net in ControlNets(config, adapter.spec).all() if not net.problem]


def _net_works(adapter: Adapter, nets: Iterable[KnownControlNet]) -> list[ModelWork]:
    """Return the work of each ControlNet at the model's native size."""
    spec = adapter.spec
    side = spec.native_resolution // spec.vae_scale_factor
    return [control_work(spec, net.config, side, side) for net in nets]


def _passes(spec: ModelSpec) -> int:
    return 2 if spec.two_passes else 1


def _residual_bytes(config: Config, works: Iterable[ModelWork]) -> int:
    """Return the bytes that the largest net keeps for one pass: residuals, encoded picture."""
    return int(
        dtype_of(config).itemsize * max((work.carried_numbers for work in works), default=0.0)
    )


def _net_cache_bytes(config: Config, spec: ModelSpec, works: Iterable[ModelWork]) -> int:
    """Return the bytes of all rows' step caches in the largest net."""
    if not config.cache.enabled:
        return 0
    device = device_of(config).type
    net_bytes = max((_step_cache_bytes(config, spec, work, device) for work in works), default=0)
    return _passes(spec) * config.engine.max_rows * net_bytes


def peak_values(work: ModelWork, passes: float, text: int) -> int:
    """Return the numbers that a dense step of `passes` holds at once, without `still_values`."""
    return int(passes * (work.peak_row + text * work.peak_text) + work.peak_once)


def still_values(work: ModelWork) -> float:
    """Return the numbers of keys and values, in all blocks, of references that do not depend on the
    row; both passes read them.
    """
    return float(2 * work.still * work.widths.sum())


def weight_bytes(config: Config, stage: Stage, spec: ModelSpec) -> int:
    """Return the bytes of the parts of the model folder that a stage loads, in the form in which it
    runs them; the encoder's with the image encoder of IP-Adapters. They are read from the headers
    of files; without such files, or with a quantised T5, they follow from the classes. A T5 that is
    moved layer by layer counts its largest layer.
    """
    total, folder = 0, Path(config.model.path)
    for part, class_names in read_model_index(folder).items():
        if part != "vae" and not (stage == "encoder" and part.startswith("text_encoder")):
            continue
        files, t5 = _files(config, part), class_names[-1] == _T5
        form = config.model.t5_weights if t5 else "bf16"
        if t5 and config.model.t5_offload:
            total += largest_layer_bytes(shape_of(config, part))
        elif files and form == "bf16":
            dtype = vae_dtype(config, spec, stage) if part == "vae" else dtype_of(config)
            total += sum(map(_numbers, files)) * dtype.itemsize
        elif (folder / part / "config.json").is_file():
            total += bytes_as(shape_of(config, part), form, whole=True)
    return total + (image_encoder_bytes(config, spec) if stage == "encoder" else 0)


def image_encoder_bytes(config: Config, spec: ModelSpec) -> int:
    """Return the bytes of the image encoder of IP-Adapters; 0: the worker serves none."""
    if not (config.ip_adapters.folder and spec.ip_adapters):
        return 0
    files = weight_files(config.ip_adapters.encoder_folder).files
    return sum(map(_numbers, files)) * dtype_of(config).itemsize


def ip_adapter_bytes(config: Config, spec: ModelSpec, device: str) -> int:
    """Return the bytes to reserve for IP-Adapters on the encoder's device: their budget, on a CPU
    at most what the files of the folder take.
    """
    settings = config.ip_adapters
    if not (settings.folder and spec.ip_adapters):
        return 0
    if device != "cpu":
        return settings.device_bytes
    files, total = Path(settings.folder).glob("*.safetensors"), 0
    for file in files:
        with suppress(BadHeader, OSError):
            total += _numbers(file) * dtype_of(config).itemsize
    return min(settings.device_bytes, total)


def _files(config: Config, part: str) -> tuple[Path, ...]:
    """Return the files of a part's weights.

    Raises:
        ConfigError: the configuration has to name the variant.
    """
    folder = Path(config.model.path) / part
    try:
        return weight_files(folder, config.model.variant).files
    except ValueError as error:
        raise ConfigError(f"[model] variant: {folder} {error}") from error


def denoiser_bytes(config: Config, forms: Iterable[str]) -> dict[str, int]:
    """Return the denoiser's bytes in each form it can take, by its config.json. A folder that is
    already quantised has one form, as the headers of its files say; so has a GGUF file.
    """
    if config.model.gguf:
        return {"bf16": gguf_bytes(config)}
    folder = Path(config.model.path)
    part = next(name for name in _DENOISERS if (folder / name).is_dir())
    if read_json(folder / part / "config.json").get("quantization_config"):
        return {"bf16": sum(map(_file_bytes, _files(config, part)))}
    model = shape_of(config, part)
    return {form: bytes_as(model, form) for form in forms}


def image_bytes(config: Config, stage: Stage, spec: ModelSpec) -> int:
    """Return the VAE's bytes beside its weights for one image of the model's native size. Its
    layers of full resolution are the largest: a ResNet holds its level's input, its own input and
    three tensors of its output's size. In tiles it holds those of one tile, beside all tiles and
    the result.
    """
    channels = spec.latents.widths
    if not channels:
        return 0
    last, previous = channels[0], channels[min(1, len(channels) - 1)]
    live_channels = 5 * last if stage == "encoder" else previous + max(2 * previous, 3 * last)
    whole, itemsize = spec.native_resolution**2, vae_dtype(config, spec, stage).itemsize
    if not in_tiles(config, spec):
        return (live_channels + _PICTURE) * whole * itemsize
    tile = min(whole, spec.latents.tile**2)
    return (live_channels * tile + _TILED * _PICTURE * whole) * itemsize


def call_bytes(config: Config, stage: Stage, spec: ModelSpec, device: str, total: int) -> int:
    """Return the bytes of a stage's calls beside its weights, at native size, with the IP-Adapters
    that the encoder keeps; `device` is the kind of its device, which has `total` bytes.
    """
    if stage == "decoder":
        return image_bytes(config, stage, spec)
    recorded = recorded_text_bytes(config, spec) if device == "cuda" else 0
    pictures = encoded_at_once(config, spec, device, total) * image_bytes(config, stage, spec)
    return recorded + pictures + ip_adapter_bytes(config, spec, device)


def recorded_text_bytes(config: Config, spec: ModelSpec) -> int:
    """Return the bytes that a recorded text encoder keeps; 0: none is recorded.

    In a T5 four tensors of each width are alive at once beside the position bias, or three of the
    bias while it is computed. In a decoder all kept layers' states are, their stack, three tensors
    of a feed-forward's width, the mask, and the angles of positions; and the answers of all
    lengths.
    """
    if not (spec.recorded_text and config.engine.cuda_graphs) or config.model.t5_offload:
        return 0
    shape = read_json(Path(config.model.path) / spec.recorded_text / "config.json")
    length, lengths = config.model.max_sequence_length, 0
    if spec.template_tokens:
        lengths = -(-(length + spec.template_tokens) // RECORDED_LENGTHS)
        length = lengths * RECORDED_LENGTHS
    tokens = RECORDED_PROMPTS * length
    if spec.text_layers:
        shape = shape.get("text_config", shape)
        states = (spec.text_layers + 2) * int(shape["hidden_size"])
        head = int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])
        values = tokens * (states + 3 * int(shape["intermediate_size"]) + length + 2 * head)
        answered = sum(range(1, RECORDED_PROMPTS + 1)) * sum(range(1, lengths + 1))
        values += answered * RECORDED_LENGTHS * int(shape["hidden_size"])
    else:
        bias = int(shape["num_heads"]) * length**2
        widths = int(shape["d_model"]) + int(shape["d_ff"])
        values = max(4 * tokens * widths + bias, 3 * bias)
    return values * dtype_of(config).itemsize + tokens * torch.int64.itemsize


def encoded_at_once(config: Config, spec: ModelSpec, device: str, total: int) -> int:
    """Return the pictures of native size in a call of the VAE's encoder: two, a source and its
    masked picture, if the model takes both and the second one takes little of the device; else one.
    """
    pairs = spec.semantics.masked_picture and shares_calls(config.stages, device)
    return 2 if pairs and image_bytes(config, "encoder", spec) <= _SECOND_PICTURE * total else 1


def device_memory(device: torch.device) -> DeviceMemory:
    """Return (all, free) bytes; for a CPU the host's, free without swapping."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    host = psutil.virtual_memory()
    return int(host.total), int(host.available)


def _numbers(file: Path) -> int:
    return sum(prod(tensor.shape) for tensor in header_of(file).tensors.values())


def _file_bytes(file: Path) -> int:
    return sum(tensor.nbytes for tensor in header_of(file).tensors.values())


def is_loaded(config: Config, stage: Stage) -> bool:
    """Return whether the worker's process of a stage has loaded its model."""
    folder = config.runtime_dir
    return bool(folder) and any(model == stage for model, _ in signed_in(folder))


def host_row_bytes() -> int:
    """Return the bytes of host memory that step caches of a GPU's rows may take."""
    return int(_CPU_SHARE * psutil.virtual_memory().available)


def _name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"
