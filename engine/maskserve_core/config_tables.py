"""The tables of the configuration, as frozen dataclasses: every key has a default, a range and a
sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
ENTRY_FORMATS = ("model", "int8", "float8", "int4")
_DEVICE = r"[a-z]+(:\d+)?"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def option(
    default: Any, doc: str, *, low: Any = None, high: Any = None, of: Any = None, form: str = ""
) -> Any:
    """A key.

    Args:
        default: its value; says its type, too.
        doc: what it means.
        low: least value.
        high: largest value.
        of: the values that it may have.
        form: regular expression that it matches unless it is empty.
    """
    metadata = {"doc": doc, "low": low, "high": high, "of": of, "form": form}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`[model]`: which model is served and the defaults of its edits."""

    path: str = option("", "Folder in diffusers format, or a hub id.")
    name: str = option("", "Name clients may ask for; empty: the last part of the path.")
    revision: str = option("", "Hub revision; empty: the default branch.")
    device: str = option(
        "auto",
        "Of the denoiser: `auto`, `cpu`, `cuda` or `cuda:N`, N counted over the worker's own GPUs.",
        form=_DEVICE,
    )
    encoder_device: str = option(
        "", "Of VAE and text encoders, as `device`; empty: the denoiser's.", form=_DEVICE
    )
    decoder_device: str = option("", "Of the VAE's decoder, likewise.", form=_DEVICE)
    dtype: str = option(
        "auto", "`auto` (float32 on CPU, bfloat16 on CUDA) or a dtype.", of=("auto", *DTYPES)
    )
    native_resolution: int = option(
        0,
        "Side of the square whose area bounds the model's input; 0: asked of the model.",
        low=0,
        high=8192,
    )
    max_sequence_length: int = option(
        512,
        "Text tokens of the T5 prompt; UNets take as many as their tokenizer says.",
        low=1,
        high=4096,
    )
    num_inference_steps: int = option(
        0, "Default steps; 0: those of the model's pipeline in diffusers.", low=0, high=1000
    )
    guidance_scale: float = option(
        0.0,
        "Default guidance; 0: that of the model's pipeline in diffusers.",
        low=0.0,
        high=1000.0,
    )
    mask_ring: int = option(
        1, "Default tokens round the mask that a cached edit computes too.", low=0, high=64
    )
    outside_noise: str = option(
        "template",
        "Noise outside the mask where the model has Inpaint semantics: `template` (the same for "
        "every edit of a picture, so that cached and dense edits agree) or `edit` (diffusers' own, "
        "from the edit's seed). Under the mask it is always the edit's.",
        of=("template", "edit"),
    )
    first_block_threshold: float = option(
        0.0,
        "Default change of what the first block adds below which a step leaves the other blocks "
        "out (FirstBlockCache; FLUX only); 0 leaves out none.",
        low=0.0,
        high=10.0,
    )
    torch_threads: int = option(0, "CPU threads of the denoiser; 0: all.", low=0, high=1024)
    compile: bool = option(
        False,
        "Whether what is before and after attention in FLUX blocks is compiled at start "
        "(torch.compile; needs a C++ compiler).",
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """`[limits]`: what one request may ask at most."""

    max_image_bytes: int = option(50 * 2**20, "Encoded bytes of an image.", low=1024, high=2**31)
    max_pixels: int = option(50_000_000, "Decoded pixels of an image.", low=64, high=2**31)
    max_side: int = option(16384, "Longest side of an image.", low=8, high=65535)
    max_prompt_chars: int = option(32_000, "Characters of a prompt.", low=1, high=10**6)
    max_template_bytes: int = option(
        2**30, "Encoded bytes of all registered images.", low=0, high=2**50
    )
    max_steps: int = option(200, "Denoising steps of one edit.", low=1, high=1000)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`[engine]`: the step loop."""

    max_rows: int = option(8, "Rows of the running batch.", low=1, high=256)
    max_waiting: int = option(
        256, "Edits waiting for a row; one more is refused.", low=1, high=10**6
    )
    drain_grace_s: float = option(
        60.0, "Time that accepted edits have to finish.", low=0, high=3600
    )
    heartbeat_s: float = option(0.1, "How often an idle engine says it is alive.", low=0.01, high=5)
    heartbeat_timeout_s: float = option(
        10.0, "Silence after which the engine counts as hung.", low=0.2, high=600
    )
    stuck_timeout_s: float = option(
        120.0,
        "Time after which a worker counts as stuck: edits are on their way to the engine or back "
        "and none comes through, or a front does not answer the supervisor. Longer than encoding "
        "or decoding one picture takes.",
        low=1,
        high=86400,
    )
    watch_interval_s: float = option(
        0.02,
        "How often fronts look for a cancel; less often when steps are longer.",
        low=0.001,
        high=1,
    )
    warm_up: bool = option(
        True,
        "Whether encoder, denoiser and decoder run once before the worker is ready: on a GPU at "
        "the model's native size, dense and cached, on a CPU at a small one.",
    )
    front_threads: int = option(64, "Edits one front serves at once.", low=1, high=4096)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """`[cache]`: template activations."""

    enabled: bool = option(True, "Whether templates are primed and cached rows served.")
    budget_bytes: int = option(
        0,
        "Bytes on the device, of entries and of what rows have loaded; 0: of what weights, stages "
        "and the largest step leave free, 80 % on a GPU and a quarter on a CPU.",
        low=0,
        high=2**50,
    )
    host_dir: str = option(
        "",
        "Folder of the host tier, on a tmpfs that the host's workers share; empty: no such tier.",
    )
    host_bytes: int = option(
        0, "Bytes of the host tier; 0: half of what is free there.", low=0, high=2**50
    )
    disk_dir: str = option(
        "",
        "Folder of the disk tier; empty: no such tier. Where the file does not name it, "
        "`maskserve serve` takes `entries` in the user's cache folder (`--entries DIR`: another, "
        "`--entries ''`: none).",
    )
    disk_bytes: int = option(
        0, "Bytes of the disk tier; 0: half of what is free there.", low=0, high=2**53
    )
    remote_url: str = option(
        "", "URL of the remote tier, as fsspec takes it (s3://bucket/folder); empty: no such tier."
    )
    remote_bytes: int = option(2**40, "Bytes of the remote tier.", low=0, high=2**60)
    remote_patience_s: float = option(
        10.0,
        "Seconds after which an edit no longer waits for its template from the remote tier.",
        low=0.01,
        high=3600.0,
    )
    entry_kind: str = option(
        "kv",
        "What is kept per block: `kv`, `h`, `both`, or `auto`: for each block what the planner "
        "would take at a mask ratio of 0.2 from the host tier.",
        of=("kv", "h", "both", "auto"),
    )
    cfg_entries: str = option(
        "shared",
        "Under classifier-free guidance, `shared`: both passes of a step read the same entries; "
        "`own`: the pass of the negative prompt reads entries primed without a prompt, at "
        "twice the bytes. The same where that is what an empty prompt is (SD 2.1).",
        of=("shared", "own"),
    )
    plan: str = option(
        "auto",
        "`auto`: each step loads, projects or computes blocks as is fastest; `fixed`: every block "
        "takes its entry, whatever that costs.",
        of=("auto", "fixed"),
    )
    conv_halo: int = option(
        0,
        "UNets: positions round the mask's box, at each level, on which cached rows compute their "
        "convolutions; farther out these read the template's feature maps, which are kept besides. "
        "Goes with `entry_kind` `kv`, and `plan` is `fixed`. 0: the whole picture.",
        low=0,
        high=64,
    )
    entry_format: str = option("int4", "Storage of entries.", of=ENTRY_FORMATS)
    placed_bytes: int = option(
        2**26,
        "FLUX: bytes in which the decoded keys and values of the running cached rows stay from "
        "step to step, if those of all blocks fit; else each step decodes its entries anew. They "
        "count as a step's.",
        low=0,
        high=2**50,
    )
    stride: int = option(
        0,
        "So many steps of the priming schedule share an anchor; as many as it has, or more: one "
        "serves all. 0: what the model needs, all steps for FLUX Fill, 7 for others.",
        low=0,
        high=1000,
    )
    dense_steps: int = option(
        0,
        "First steps of a cached edit that compute all tokens: nearer to a dense edit, above all "
        "where the model has Inpaint semantics, for that many dense steps.",
        low=0,
        high=1000,
    )
    dense_above_ratio: float = option(
        0.9, "Mask ratio from which a row runs dense even on a hit.", low=0.0, high=1.0
    )
    priming_share: float = option(
        0.25, "Share of steps that priming may take from live rows.", low=0.0, high=1.0
    )
    audit_share: float = option(
        0.0,
        "Share of cached edits that are made again without the cache, when the engine has nothing "
        "else to do, and compared.",
        low=0.0,
        high=1.0,
    )
    audit_limit: float = option(
        0.25,
        "Difference of such an edit, relative, beyond which its template runs dense from then on.",
        low=0.0,
        high=100.0,
    )


@dataclass(frozen=True, slots=True)
class StagesConfig:
    """`[stages]`: what surrounds an edit's steps, the encoder and the decoder."""

    prompt_bytes: int = option(
        2**28,
        "Bytes of prompts' embeddings that the encoder keeps; FLUX.1's takes 8 MB. 0: none.",
        low=0,
        high=2**40,
    )
    template_bytes: int = option(
        2**28,
        "Bytes of templates' VAE moments that the encoder keeps; FLUX.1's at 1024 x 1024 take "
        "2 MB. 0: none.",
        low=0,
        high=2**40,
    )


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """`[adapters]`: the LoRAs that edits may name."""

    store: str = option(
        "",
        "Where they are: a folder, or a URL as fsspec takes it (s3://bucket/folder). An adapter "
        "NAME is the file NAME.safetensors, or NAME/pytorch_lora_weights.safetensors. Empty: "
        "edits may name none.",
    )
    rescan_s: float = option(10.0, "How often the store is listed anew.", low=0.05, high=86400.0)
    timeout_s: float = option(
        20.0,
        "Time in which the store answers one call, or brings the next 8 MiB of a file.",
        low=0.05,
        high=3600.0,
    )
    host_dir: str = option(
        "",
        "Folder of files ready for use, on a tmpfs that the host's workers share; empty: in the "
        "runtime folder.",
    )
    host_bytes: int = option(2**32, "Bytes of that folder.", low=2**10, high=2**50)
    disk_dir: str = option(
        "", "Folder on a disk between the store and the host's memory; empty: no such tier."
    )
    disk_bytes: int = option(2**36, "Bytes of that folder.", low=2**10, high=2**53)
    device_bytes: int = option(
        2**31, "Bytes of adapters that stay on the denoiser's device.", low=2**10, high=2**50
    )
    max_bytes: int = option(2**30, "Largest file of an adapter.", low=2**10, high=2**40)
    max_rank: int = option(256, "Largest rank of an adapter.", low=1, high=4096)
    profiles: str = option(
        "",
        "JSON file: adapter to the sigma until which an edit with `adapters: fast` may go without "
        "it. Empty, or an adapter that is not in it: not at all.",
    )
    entries: str = option(
        "own",
        "Cached activations for edits with adapters: `own`, primed with the adapters; `base`, "
        "those of the model without any.",
        of=("own", "base"),
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`[log]`: what a worker's own processes write down (docs/observability.md)."""

    level: str = option("INFO", "Lines below this level are left out.", of=LOG_LEVELS)
    format: str = option(
        "json", "`json`: an object per line; `text`: for people.", of=("json", "text")
    )
    file: str = option(
        "",
        "Lines are appended to this file, which all processes share; empty: to standard error, "
        "which is Triton's log. `maskserve serve` names one per worker unless this is set.",
    )


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """`[trace]`: OpenTelemetry spans (docs/observability.md)."""

    otlp_url: str = option(
        "",
        "Where spans go (OTLP over HTTP), as http://collector:4318/v1/traces; empty: nowhere.",
        form=r"https?://[^\s/]+/\S*",
    )
    rate: int = option(
        1,
        "One request in so many is traced, beside those whose client sends a trace context.",
        low=1,
        high=10**9,
    )
    timeout_s: float = option(
        2.0, "Time to send a batch of spans; then it is lost.", low=0.1, high=60
    )
    interval_s: float = option(1.0, "How often spans are sent.", low=0.05, high=60)
    queue: int = option(
        4096, "Spans of one process waiting to be sent; more are lost.", low=1, high=10**6
    )
