"""The configuration of a worker: its tables (every key has a default, a range and a sentence), and
what follows from them.

config_file.py reads it from a file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from maskserve_common.addresses import DNS
from maskserve_common.reading import Table

EntryFormat = Literal["model", "int8", "float8", "int4"]
ENTRY_FORMATS: tuple[EntryFormat, ...] = get_args(EntryFormat)
WeightForm = Literal["bf16", "fp8", "int8", "int8-dynamic", "nf4"]
WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Stage = Literal["encoder", "decoder"]
# Counts are made on torch's `meta`, which no worker serves from.
Device = Annotated[
    str,
    Meta(pattern=r"\A(auto|cpu|meta|cuda(:\d+)?)?\Z", description="auto, cpu, cuda or cuda:N"),
]
Addresses = Annotated[
    str,
    Meta(
        pattern=r"\A([^\s,]+:\d{1,5}( *, *[^\s,]+:\d{1,5})*)?\Z",
        description="HOST:PORT or dns:NAME:PORT, several with commas",
    ),
]


def _address_list(key: str, text: str) -> tuple[str, ...]:
    """Return the addresses of a key's value, which has commas between them.

    Raises:
        ConfigError: one is listed twice.
    """
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"{key}: {address} is listed twice; accepted: each address once")
    return addresses


class ModelConfig(Table, frozen=True):
    """`[model]`: which model is served and the defaults of its edits."""

    path: str = ""
    """Folder in diffusers format, or hub id."""
    name: str = ""
    """Name for clients; empty: the last part of the path."""
    revision: str = ""
    """Hub revision; empty: the default branch."""
    variant: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]*\Z")] = ""
    """Variant of the weight files, such as `fp16`."""
    device: Device = "auto"
    """Device of the denoiser. N counts the GPUs that the worker sees."""
    encoder_device: Device = ""
    """Device of the VAE and text encoders; empty: the denoiser's."""
    decoder_device: Device = ""
    """Device of the VAE's decoder; empty: the denoiser's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on CPU, bfloat16 on CUDA."""
    weights: WeightForm = "bf16"
    """Form of the denoiser's block weights. `bf16`: as in the folder, in `dtype`. All others need
    the extra `quantised`; `int8-dynamic` also multiplies in int8."""
    gguf: str = ""
    """GGUF file that replaces a FLUX folder's transformer (extra `quantised`); not with other
    `weights` or `fuse_loras`."""
    t5_weights: Literal["bf16", "int8"] = "bf16"
    """Form of a T5's weights; `int8` needs the extra `quantised`."""
    t5_offload: bool = False
    """Keep a T5 in host memory and copy it for each prompt; not with int8."""
    fuse_loras: tuple[str, ...] = ()
    """LoRAs added to the weights for every edit: FILE or FILE:SCALE."""
    native_resolution: Annotated[int, Meta(ge=0, le=8192)] = 0
    """Side of the largest square that the model sees; 0: the model's own."""
    max_sequence_length: Annotated[int, Meta(ge=1, le=4096)] = 512
    """Text tokens of a T5 prompt."""
    num_inference_steps: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Default steps; 0: the diffusers pipeline's."""
    guidance_scale: Annotated[float, Meta(ge=0.0, le=1000.0)] = 0.0
    """Default guidance; 0: the diffusers pipeline's."""
    mask_ring: Annotated[int, Meta(ge=0, le=64)] = 1
    """Default `mask_ring` of edits; FLUX Fill has at least two in steps that read a template and
    compute the text."""
    outside_noise: Literal["auto", "template", "edit"] = "auto"
    """Noise outside the mask, for models that blend the source in. `template`: one for all edits of
    a picture. `edit`: diffusers'. `auto`: `edit` without a cache or with `cache: off`, else
    `template`."""
    step_interval: Annotated[int, Meta(ge=1, le=8)] = 1
    """Not UNets: default `step_interval` of edits."""
    torch_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Most CPU threads of the denoiser; 0: all."""


class LimitsConfig(Table, frozen=True):
    """`[limits]`: bounds on one request."""

    max_image_bytes: Annotated[int, Meta(ge=1024, le=2**31)] = 50 * 2**20
    """Encoded bytes of an image, and of all images of an edit."""
    max_pixels: Annotated[int, Meta(ge=64, le=2**31)] = 50_000_000
    """Decoded pixels of an image, and of all images of an edit."""
    max_side: Annotated[int, Meta(ge=8, le=65535)] = 16384
    """Longest side of an image."""
    max_prompt_chars: Annotated[int, Meta(ge=1, le=10**6)] = 32_000
    """Characters of a prompt."""
    max_template_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 2**30
    """Encoded bytes of all registered images."""
    max_result_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 2**29
    """Encoded bytes of kept results."""
    result_expires_s: Annotated[float, Meta(ge=1, le=31 * 86400)] = 3600.0
    """Seconds for which an unused result is kept."""
    max_steps: Annotated[int, Meta(ge=1, le=1000)] = 200
    """Denoising steps of one edit."""


class EngineConfig(Table, frozen=True):
    """`[engine]`: the step loop."""

    max_rows: Annotated[int, Meta(ge=1, le=256)] = 8
    """Rows of the running batch."""
    batching: Literal["continuous", "static"] = "continuous"
    """`continuous`: edits join the batch at any step. `static`: they wait until all others have
    ended, for comparison; not with `policy` `deadline`, `rounds` or `together`."""
    devices: Literal[1, 2, 4, 8] = 1
    """Devices of this worker. Each holds the whole model."""
    policy: Literal["spread", "deadline", "rounds", "together", "cfg"] = "spread"
    """Use of several devices. `spread`: each has a batch of its own. `deadline`: transformers'
    steps get as many devices as due times need. `cfg`: two devices compute one pass of guidance
    each. For comparison, `rounds`: TetriServe's rounds; `together`: all devices work on one
    edit."""
    round_steps: Annotated[int, Meta(ge=1, le=1000)] = 5
    """`rounds`: length of a round, in steps of the slowest edit on its fastest number of
    devices."""
    costs: str = ""
    """JSON file of `scripts/bench profile_costs` with the costs of steps; empty: estimates at
    first."""
    max_waiting: Annotated[int, Meta(ge=1, le=10**6)] = 256
    """Most edits that wait for a row."""
    drain_grace_s: Annotated[float, Meta(ge=0, le=3600)] = 60.0
    """Seconds that accepted edits have to finish."""
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=5)] = 0.1
    """Seconds between signs of life of an idle engine."""
    heartbeat_timeout_s: Annotated[float, Meta(ge=0.2, le=600)] = 10.0
    """Seconds of silence after which the engine counts as hung."""
    stuck_timeout_s: Annotated[float, Meta(ge=1, le=86400)] = 120.0
    """Seconds without a finished edit, or without an answer of a front, after which a worker is
    restarted. Encoding and decoding a picture must take less."""
    watch_interval_s: Annotated[float, Meta(ge=0.001, le=1)] = 0.02
    """Seconds between two checks for a cancel."""
    warm_up: bool = True
    """Run each model once before the worker is ready."""
    cuda_graphs: bool = True
    """Record steps as CUDA graphs: all of a UNet, which takes as much memory as one step, and small
    ones of a transformer (the tokens of up to 2.3 dense rows, 3.8 of Qwen-Image, and fewer with a
    `max_rows` below 8); and the text encoders of FLUX.1 (T5), FLUX.2 and Qwen-Image. Not recorded:
    `reproducible` edits, and workers of a transformer with `placed_bytes` or several `devices`.
    Edits with LoRAs need the package `triton`."""
    front_threads: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Edits that one front serves at a time."""


class CacheConfig(Table, frozen=True):
    """`[cache]`: cached activations of templates."""

    enabled: bool = True
    """Prime templates and serve cached rows."""
    budget_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Device bytes for entries and loads. 0: 80 % (GPU) or a quarter (CPU) of what weights, stages
    and the largest step leave."""
    host_dir: str = ""
    """Folder of the host tier, on a tmpfs; workers of the host share it."""
    host_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Bytes of the host tier; 0: half of the free space."""
    register_host: bool = True
    """Let a GPU read the host tier's files directly."""
    disk_dir: str = ""
    """Folder of the disk tier; with `maskserve serve` by default that of `--entries`."""
    disk_bytes: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Bytes of the disk tier; 0: half of the free space."""
    remote_url: str = ""
    """fsspec URL of the remote tier (s3://bucket/folder)."""
    remote_bytes: Annotated[int, Meta(ge=0, le=2**60)] = 2**40
    """Bytes of the remote tier."""
    remote_patience_s: Annotated[float, Meta(ge=0.01, le=3600.0)] = 10.0
    """Seconds that an edit waits for its template from the remote tier."""
    entry_kind: Literal["kv", "h", "both", "auto"] = "kv"
    """Content of entries (docs/words.md). `auto`: for each block, what the planner would read
    from the host tier at a mask ratio of 0.2."""
    cfg_entries: Literal["shared", "own"] = "shared"
    """Entries of the two passes of guidance. `shared`: both read the same; `own`: the negative pass
    has its own."""
    plan: Literal["auto", "fixed"] = "auto"
    """`auto`: each step loads, projects or computes blocks, whichever is fastest; `fixed`: every
    block reads its entry."""
    conv_halo: Annotated[int, Meta(ge=0, le=64)] = 0
    """UNets: cached rows convolve the mask's box and so many positions around it; needs
    `entry_kind` `kv`. 0: the whole picture, and for rows with refresh steps one position."""
    entry_format: EntryFormat = "int4"
    """Storage format of entries."""
    placed_bytes: Annotated[int, Meta(ge=-1, le=2**50)] = -1
    """FLUX: bytes of decoded keys and values kept between steps. -1: 64 MiB on a GPU, 256 MiB on a
    CPU."""
    stride: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Steps of the schedule that share an anchor. 0: all for FLUX Fill, 7 for others."""
    dense_steps: Annotated[int, Meta(ge=-1, le=1000)] = -1
    """First steps of an edit with a template that compute all tokens. -1: none or one, by the model
    (docs/decisions/templates.md#decision)."""
    own_anchors: Annotated[float, Meta(ge=-1.0, le=1.0)] = -1.0
    """Distance between refresh steps, as a share of the steps. -1: as the model needs
    (docs/models.md). 0: no refresh steps: all models read templates, and edits without one run
    dense."""
    fidelity: Annotated[float, Meta(ge=-1.0, le=100.0)] = -1.0
    """Quality in dB, against dense edits, of edits that place their refresh steps by measured
    errors (docs/models.md, *by error*), if `own_anchors` is -1; on several devices only with
    `policy` `spread`. -1: 40. 0: off; models without a fixed distance then run dense."""
    own_format: Literal["auto", "model", "int8", "float8", "int4"] = "auto"
    """Storage format of the step cache. `auto`: int8 on a GPU, the model's on a CPU."""
    own_text: Literal["frozen", "computed"] = "frozen"
    """Text, and for FLUX Fill and klein the ring, in cached steps. `frozen`: interpolated; `plan`
    is then fixed. `computed`: computed in every step."""
    dense_above_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.9
    """Mask ratio from which an edit runs dense, even with `cache: require`."""
    priming_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.25
    """Work of priming beside edits, as a share of the edits' work."""
    audit_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of cached edits that an idle engine repeats densely and compares."""
    audit_limit: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.25
    """Relative difference of such an edit from which its template is no longer read."""

    def refresh_format_on(self, device: str) -> EntryFormat:
        """`own_format` of a worker on a device of this type."""
        if self.own_format != "auto":
            return self.own_format
        return "model" if device == "cpu" else "int8"

    def placed_on(self, device: str) -> int:
        """`placed_bytes` of a worker on a device of this type, such as `cpu`."""
        if self.placed_bytes >= 0:
            return self.placed_bytes
        return 2**28 if device == "cpu" else 2**26


class StagesConfig(Table, frozen=True):
    """`[stages]`: the encoder and the decoder."""

    service: Addresses = ""
    """gRPC addresses of stage services; the other keys then apply to these. Empty: the worker has
    its own stages."""
    decoder_service: Addresses = ""
    """gRPC addresses of the services with the decoder. Empty: those of `service` have it, too."""
    service_timeout_s: Annotated[float, Meta(ge=0.1, le=50.0)] = 30.0
    """Seconds without a service after which edits fail."""
    prompt_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**28
    """Bytes of kept prompt embeddings (FLUX.1's: 8 MB each). 0: none."""
    template_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**29
    """Bytes of kept template encodings (FLUX.1 Fill at 1024 x 1024: 20 MB each). 0: none."""
    encode_halo: Annotated[int, Meta(ge=0, le=64)] = 2
    """Fill models: latents around the mask that are encoded with it. 0: the whole masked picture,
    as for `reproducible` edits and `cache: off`."""
    decode_halo: Annotated[int, Meta(ge=0, le=64)] = 4
    """Positions around a cached edit's mask that are decoded with it. 0: the whole picture, as for
    dense and `reproducible` edits."""
    decode_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**26
    """Bytes of template norms kept for `decode_halo` (FLUX.1's: 2 MB each)."""
    vae_batches: Literal["auto", "on", "off"] = "auto"
    """Encode or decode waiting pictures of one size, up to 1024 x 1024, in one call, except
    `reproducible` edits'. `auto`: on a GPU."""
    vae_tiles: Literal["auto", "on", "off"] = "auto"
    """Let the VAE take pictures above its `sample_size` in tiles. `auto`: if the model's native
    size is above 1536."""

    def addresses(self, stage: Stage) -> tuple[str, ...]:
        """Addresses of a stage's services.

        Raises:
            ConfigError: one is listed twice, or only the decoder has a service.
        """
        if self.decoder_service and not self.service:
            problem = "stands alone; accepted: together with service, which has the encoder"
            raise ConfigError(f"[stages] decoder_service: {problem}")
        if stage == "decoder" and self.decoder_service:
            return _address_list("[stages] decoder_service", self.decoder_service)
        return _address_list("[stages] service", self.service)


class SloConfig(Table, frozen=True):
    """`[slo]`: due times of responses."""

    enabled: bool = False
    """Give edits without `deadline_ms` a due time by their size. They are finished even if late."""
    seconds_256: Annotated[float, Meta(gt=0.0, le=86400.0)] = 1.5
    """Seconds from acceptance to response, up to 256 x 256 model pixels."""
    seconds_512: Annotated[float, Meta(gt=0.0, le=86400.0)] = 2.0
    """Up to 512 x 512."""
    seconds_1024: Annotated[float, Meta(gt=0.0, le=86400.0)] = 3.0
    """Up to 1024 x 1024."""
    seconds_2048: Annotated[float, Meta(gt=0.0, le=86400.0)] = 5.0
    """Larger than 1024 x 1024."""
    refuse_above: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.5
    """The worker refuses an edit whose predicted time exceeds its `deadline_ms` by this factor; 0:
    never."""

    @property
    def times_ms(self) -> tuple[int, ...]:
        """Return the due times, in milliseconds, of edits without `deadline_ms`, in the order of
        `contracts.due_times.due_by_size`.
        """
        if not self.enabled:
            return ()
        seconds = (self.seconds_256, self.seconds_512, self.seconds_1024, self.seconds_2048)
        return tuple(round(1e3 * limit_s) for limit_s in seconds)


class AdaptersConfig(Table, frozen=True):
    """`[adapters]`: the LoRAs that edits may name."""

    store: str = ""
    """Folder or fsspec URL of LoRAs (docs/api.md#loras-and-controlnets). Names have letters,
    digits, '.', '_' and '-'."""
    rescan_s: Annotated[float, Meta(ge=0.05, le=86400.0)] = 10.0
    """Seconds between two listings of the store."""
    timeout_s: Annotated[float, Meta(ge=0.05, le=3600.0)] = 20.0
    """Seconds for one call of the store, or for the next 8 MiB of a file."""
    host_dir: str = ""
    """Folder of ready files, on a tmpfs that workers share; empty: in the runtime folder."""
    host_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**32
    """Bytes of that folder."""
    disk_dir: str = ""
    """Folder of a disk tier between store and host."""
    disk_bytes: Annotated[int, Meta(ge=2**10, le=2**53)] = 2**36
    """Bytes of that folder."""
    device_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**31
    """Most bytes of LoRAs on the device. A GPU reserves them all; a CPU what the files take, at
    most a quarter of the free memory."""
    max_bytes: Annotated[int, Meta(ge=2**10, le=2**40)] = 2**30
    """Largest file of an adapter."""
    max_rank: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Largest rank of an adapter."""
    profiles: str = ""
    """JSON file of `scripts/bench profile_lora`: for how many steps `adapters: fast` may go without
    each LoRA. Edits wait for all others."""
    entries: Literal["own", "base"] = "own"
    """Entries of edits with adapters. `own`: primed with the adapters. `base`: those of the model
    without them."""


class ControlsConfig(Table, frozen=True):
    """`[controls]`: the ControlNets that edits may name."""

    folder: str = ""
    """Folder with a diffusers folder NAME for each ControlNet."""
    device_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**33
    """Most bytes of ControlNets on the device, reserved as for LoRAs."""
    unequal_depths: Literal["each", "shallowest"] = "each"
    """FLUX ControlNets of different depths in one edit. `each`: each acts as it would alone.
    `shallowest`: as in diffusers."""
    service: Addresses = ""
    """gRPC addresses of ControlNet services; empty: nets run beside the base."""
    service_timeout_s: Annotated[float, Meta(ge=0.1, le=600.0)] = 5.0
    """Seconds of a service's silence after which its edits fail; less than `[engine]
    heartbeat_timeout_s`."""
    listen: str = ""
    """HOST:PORT at which a service accepts other hosts."""
    ipc_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Device bytes through which a service on a GPU sends residuals to the host's GPUs (CUDA IPC;
    tested on one GPU only). 0: through host memory."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the ControlNet services.

        Raises:
            ConfigError: one is listed twice, or other keys do not go with several.
        """
        addresses = _address_list("[controls] service", self.service)
        several = len(addresses) > 1 or self.service.startswith(DNS)
        if several and self.unequal_depths == "shallowest":
            raise ConfigError(
                '[controls] unequal_depths: "shallowest" does not go with several addresses in '
                "[controls] service, because one service must know all depths; "
                'accepted: "each", or one service'
            )
        return addresses


NODE_PATH_HELP: Final = "folders of node files, whose nodes workflows may have"
"""Help of `--node-path`."""


def node_path_folders(path: str) -> list[str]:
    """Folders of `--node-path`, which has colons between them."""
    return [os.path.abspath(folder) for folder in path.split(os.pathsep) if folder]


def is_url(source: str) -> bool:
    """Whether a model's source in `[nodes]` is a server, not a folder or hub id."""
    return source.startswith(("http://", "https://"))


class IpAdaptersConfig(Table, frozen=True):
    """`[ip_adapters]`: the IP-Adapters that edits may name."""

    folder: str = ""
    """Folder with a file NAME.safetensors for each IP-Adapter."""
    image_encoder: str = ""
    """Folder of the CLIP image encoder that they share; empty: `image_encoder` in `folder`."""
    device_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**31
    """Most bytes of IP-Adapters on the encoder's device, beside the image encoder."""

    @property
    def encoder_folder(self) -> Path:
        return Path(self.image_encoder or Path(self.folder) / "image_encoder")


class NodesConfig(Table, frozen=True):
    """`[nodes]`: the models of workflow nodes, in the file of `maskserve serve --nodes`. Relative
    paths begin at the file, and `[model] device` is the models' device. Any other key is the name
    of a model; its value is a folder, hub id or URL.
    """

    path: tuple[str, ...] = ()
    """Folders of node files, after those of `--node-path`."""
    models: dict[str, str] = msgspec.field(default_factory=dict)
    """The same as a table: folder, hub id or URL by name."""
    verify_url: Annotated[str, Meta(pattern=r"\A(https?://\S+)?\Z")] = ""
    """URL, up to `/v1`, of an OpenAI-compatible vision server that answers `agrees`."""
    verify_model: str = ""
    """Name of that server's model."""
    verify_key_file: str = ""
    """File with that server's API key."""
    verify_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 60.0
    """Seconds of that server's silence after which a call fails."""
    load: Literal["start", "use"] = "start"
    """When models are loaded: at the `start`, if `device_bytes` has room, or at first `use`."""
    device_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 8 * 2**30
    """Bytes of loaded weights. A further model replaces the idle one that is used least."""

    def source(self, key: str) -> str:
        """Folder, hub id or URL under a key; empty: none."""
        value = self.models.get(key, getattr(self, key, ""))
        return value if isinstance(value, str) else ""

    def folders(self) -> dict[str, str]:
        """Folders and hub ids of the models that are served, by key."""
        return {key: value for key, value in self.models.items() if value and not is_url(value)}


class ValuesConfig(Table, frozen=True):
    """`[values]`: files through which a host's workers, node servers and router pass pictures and
    masks of workflows.
    """

    folder: str = ""
    """Folder in memory that they share, for kept results, too. Empty: values travel in messages."""
    max_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 2 * 2**30
    """Most bytes of all values; keys share the room."""
    least_bytes: Annotated[int, Meta(ge=1, le=2**40)] = 2**18
    """Smaller values travel in messages."""
    expires_s: Annotated[float, Meta(ge=1, le=31 * 86400)] = 3600.0
    """Seconds without a new value after which a run's values are deleted."""


class ProvenanceConfig(Table, frozen=True):
    """`[provenance]`: how responses declare a model's work (docs/operate.md)."""

    mark: bool = True
    """Declare it in each response's XMP, as IPTC digital source type."""
    certificate: str = ""
    """PEM file of the certificate chain for C2PA manifests, the signer's first."""
    private_key: str = ""
    """PEM file of the certificate's key."""
    algorithm: Literal["es256", "es384", "es512", "ps256", "ps384", "ps512", "ed25519"] = "es256"
    """Algorithm of the key."""
    timestamp_url: Annotated[str, Meta(pattern=r"\A(https?://\S+)?\Z")] = ""
    """Time-stamp authority (RFC 3161)."""
    timestamp_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    """Seconds that the authority has to answer; otherwise the edit fails."""


class SafetyConfig(Table, frozen=True):
    """`[safety]`: the operator's own check (docs/operate.md#a-check-of-your-own)."""

    check: Annotated[
        str, Meta(pattern=r"\A(\S+:\w+)?\Z", description="FILE.py:FUNCTION or MODULE:FUNCTION")
    ] = ""
    """Function that returns the reason for a refusal, or None."""
    model: Annotated[str, Meta(pattern=r"\A[\w.-]*\Z")] = ""
    """Model of the worker's Triton that decides instead of a function."""
    repository: str = ""
    """Model repository with that model, for `maskserve serve`; empty: Triton has it."""


class LogConfig(Table, frozen=True):
    """`[log]`: logs of the worker's processes (docs/operate.md#logs)."""

    level: LogLevel = "INFO"
    """Least level of lines."""
    format: Literal["json", "text"] = "json"
    """`json`: an object per line; `text`: for people."""
    file: str = ""
    """File to which all processes append; empty: standard error, or with `maskserve serve` one per
    worker."""


class TraceConfig(Table, frozen=True):
    """`[trace]`: OpenTelemetry spans (docs/operate.md#traces)."""

    otlp_url: Annotated[str, Meta(pattern=r"\A(https?://[^\s/]+/\S*)?\Z")] = ""
    """OTLP/HTTP address, such as http://collector:4318/v1/traces."""
    rate: Annotated[int, Meta(ge=1, le=10**9)] = 1
    """Trace one request in so many, and each that has a trace context."""
    timeout_s: Annotated[float, Meta(ge=0.1, le=60)] = 2.0
    """Seconds to send a batch of spans."""
    interval_s: Annotated[float, Meta(ge=0.05, le=60)] = 1.0
    """Seconds between two batches."""
    queue: Annotated[int, Meta(ge=1, le=10**6)] = 4096
    """Most spans of a process that wait to be sent."""


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key."""


class Config(Table, frozen=True):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()
    cache: CacheConfig = CacheConfig()
    stages: StagesConfig = StagesConfig()
    slo: SloConfig = SloConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    controls: ControlsConfig = ControlsConfig()
    ip_adapters: IpAdaptersConfig = IpAdaptersConfig()
    nodes: NodesConfig = NodesConfig()
    values: ValuesConfig = ValuesConfig()
    provenance: ProvenanceConfig = ProvenanceConfig()
    safety: SafetyConfig = SafetyConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()
    runtime_dir: str = ""
    """Folder of the status record, best in memory."""
    templates_dir: str = ""
    """Folder of registered images; empty: in the runtime folder."""
    worker: str = "worker-0"
    """Name of this worker in responses and metrics."""


def cores() -> int:
    """CPU cores that this process may use: a container or `taskset` may leave it a part."""
    return len(os.sched_getaffinity(0))


def templates_folder(config: Config) -> Path:
    """Where the images of registered templates are."""
    return Path(config.templates_dir or Path(config.runtime_dir) / "templates")


def model_name(config: Config) -> str:
    """The name clients use for the served model."""
    return config.model.name or Path(config.model.path).name or "model"


def outside_noise(config: Config) -> Literal["auto", "template", "edit"]:
    """`[model] outside_noise`: no edit of a worker without a cache stands beside one that reads."""
    noise = config.model.outside_noise
    return "edit" if noise == "auto" and not config.cache.enabled else noise


def sharing_the_device(config: Config, stage: Stage) -> Config:
    """The configuration of the encoder or decoder, which run beside the denoiser's steps.

    They take a thread or two, so that their work does not stop the batch.
    """
    model = config.model
    threads = max(1, min(2, (model.torch_threads or cores()) // 2))
    device = model.encoder_device if stage == "encoder" else model.decoder_device
    return replace(
        config, model=replace(model, torch_threads=threads, device=device or model.device)
    )


def gpus_required(config: Config) -> int:
    """GPUs that one worker of this configuration is to see: as many as its devices count up to."""
    model = config.model
    devices = [model.device]
    if not config.stages.service:
        devices += [model.encoder_device, model.decoder_device]
    counted = 1 + max(int(number) for number in (name.partition(":")[2] or 0 for name in devices))
    return max(counted, config.engine.devices)
