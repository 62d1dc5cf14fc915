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
    """Folder in diffusers format, or a hub id."""
    name: str = ""
    """Name that clients ask for; empty: the last part of the path."""
    revision: str = ""
    """Hub revision; empty: the default branch."""
    variant: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]*\Z")] = ""
    """Variant of the weight files, such as `fp16`; a part without it takes its plain files, or its
    only variant."""
    device: Device = "auto"
    """Device of the denoiser; N counts the worker's own GPUs."""
    encoder_device: Device = ""
    """Device of the VAE and text encoders; empty: the denoiser's."""
    decoder_device: Device = ""
    """Device of the VAE's decoder; empty: the denoiser's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: float32 on CPU, bfloat16 on CUDA."""
    weights: WeightForm = "bf16"
    """Form of the weights in the denoiser's transformer blocks. `bf16`: as the folder has them, in
    `dtype`. Others need the extra `quantised`: `nf4` takes half a byte per weight, the rest a byte;
    `int8-dynamic` also multiplies in int8."""
    gguf: str = ""
    """GGUF file whose weights replace the transformer of a FLUX folder. Needs the extra
    `quantised`; excludes other `weights` and `fuse_loras`."""
    t5_weights: Literal["bf16", "int8"] = "bf16"
    """Form of a T5's weights. `bf16`: as the folder has them; `int8`: a byte per weight, with the
    extra `quantised`."""
    t5_offload: bool = False
    """Keep a T5 in host memory and copy it layer by layer for each new prompt. Not with
    `t5_weights` = `int8`."""
    fuse_loras: tuple[str, ...] = ()
    """LoRAs that are added to the weights at start, for every edit: FILE or FILE:SCALE."""
    native_resolution: Annotated[int, Meta(ge=0, le=8192)] = 0
    """Side of the square whose area bounds the model's input; 0: the model's own."""
    max_sequence_length: Annotated[int, Meta(ge=1, le=4096)] = 512
    """Text tokens of a T5 prompt; for UNets the tokenizer decides."""
    num_inference_steps: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Default steps; 0: the default of the diffusers pipeline."""
    guidance_scale: Annotated[float, Meta(ge=0.0, le=1000.0)] = 0.0
    """Default guidance; 0: the default of the diffusers pipeline."""
    mask_ring: Annotated[int, Meta(ge=0, le=64)] = 1
    """Default width in tokens of the ring around the mask that a cached edit also computes; at
    least two for FLUX Fill with a template in steps that compute the text."""
    outside_noise: Literal["auto", "template", "edit"] = "auto"
    """Noise outside the mask, for models that blend the source in. `template`: the same for every
    edit of a picture, so cached and dense edits agree; `edit`: as in diffusers; `auto`: `edit` with
    `cache: off` or without a cache, else `template`."""
    first_block_threshold: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    """FLUX: default `first_block_threshold` of edits. A step skips its other blocks if its first
    block's change is below it (FirstBlockCache); 0 skips none."""
    torch_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Most CPU threads of the denoiser; 0: all. Steps use no more than they keep busy."""


class LimitsConfig(Table, frozen=True):
    """`[limits]`: bounds on one request."""

    max_image_bytes: Annotated[int, Meta(ge=1024, le=2**31)] = 50 * 2**20
    """Encoded bytes of an image; and of all elements of IMAGE together."""
    max_pixels: Annotated[int, Meta(ge=64, le=2**31)] = 50_000_000
    """Decoded pixels of an image; and of all elements of IMAGE together."""
    max_side: Annotated[int, Meta(ge=8, le=65535)] = 16384
    """Longest side of an image."""
    max_prompt_chars: Annotated[int, Meta(ge=1, le=10**6)] = 32_000
    """Characters of a prompt."""
    max_template_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 2**30
    """Encoded bytes of all registered images."""
    max_result_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 2**29
    """Encoded bytes of kept results (`keep_result`); workers that share `[values] folder` share
    them. Beyond, the least recently used go."""
    result_expires_s: Annotated[float, Meta(ge=1, le=31 * 86400)] = 3600.0
    """Seconds after its last use when a kept result goes."""
    max_steps: Annotated[int, Meta(ge=1, le=1000)] = 200
    """Denoising steps of one edit."""


class EngineConfig(Table, frozen=True):
    """`[engine]`: the step loop."""

    max_rows: Annotated[int, Meta(ge=1, le=256)] = 8
    """Rows of the running batch."""
    batching: Literal["continuous", "static"] = "continuous"
    """`continuous`: an edit joins the running batch at any step. `static`, for comparison: none
    joins until all have ended; excludes the policies `deadline` and `rounds`."""
    devices: Literal[1, 2, 4, 8] = 1
    """Devices of this worker; each has the whole model and its own process."""
    policy: Literal["spread", "deadline", "rounds", "cfg"] = "spread"
    """How a worker uses several devices. `spread`: each has its own batch. `deadline`: a step of a
    FLUX edit gets as many devices as its due time needs. `rounds`: the same, decided when a round
    starts, as in TetriServe. `cfg`: each of two devices computes one pass of classifier-free
    guidance."""
    round_steps: Annotated[int, Meta(ge=1, le=1000)] = 5
    """Steps of a round under `rounds`: of the slowest edit, on the number of devices that makes it
    fastest."""
    costs: str = ""
    """JSON file of `scripts/bench profile_costs` that prices steps from the start. Empty: an
    estimate, until the worker has measured."""
    max_waiting: Annotated[int, Meta(ge=1, le=10**6)] = 256
    """Edits that wait for a row; further edits are refused."""
    drain_grace_s: Annotated[float, Meta(ge=0, le=3600)] = 60.0
    """Seconds that accepted edits have to finish."""
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=5)] = 0.1
    """Seconds between signs of life of an idle engine."""
    heartbeat_timeout_s: Annotated[float, Meta(ge=0.2, le=600)] = 10.0
    """Seconds of silence after which the engine counts as hung."""
    stuck_timeout_s: Annotated[float, Meta(ge=1, le=86400)] = 120.0
    """Seconds without a finished edit, or a front's answer, after which a worker counts as stuck;
    more than a picture takes to encode or decode."""
    watch_interval_s: Annotated[float, Meta(ge=0.001, le=1)] = 0.02
    """Seconds between a front's checks for a cancel; longer if steps are longer."""
    warm_up: bool = True
    """Run encoder, denoiser and decoder once before the worker is ready; on a GPU at the model's
    native size."""
    cuda_graphs: bool = True
    """Record UNet steps as CUDA graphs on GPUs; a record takes as much memory as a step."""
    flux_cuda_graphs: bool = True
    """Record FLUX steps of up to one dense row's tokens as CUDA graphs; cached rows then compute up
    to an eighth more tokens. Not recorded: edits that are `reproducible` or have LoRAs, ControlNets
    or a `first_block_threshold`; none with `placed_bytes` or several `devices`."""
    front_threads: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Edits that one front serves at once."""


class CacheConfig(Table, frozen=True):
    """`[cache]`: cached activations of templates."""

    enabled: bool = True
    """Prime templates and serve cached rows."""
    budget_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Bytes on the device for entries and loads. 0: 80 % (GPU) or a quarter (CPU) of the memory
    beside weights, stages and the largest step."""
    host_dir: str = ""
    """Folder of the host tier, on a tmpfs that the host's workers share; empty: none."""
    host_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Bytes of the host tier; 0: half of the free space."""
    register_host: bool = True
    """Let a GPU read host tier files on a tmpfs itself (cudaHostRegister) where this is faster than
    a core that gathers them."""
    disk_dir: str = ""
    """Folder of the disk tier; empty: none. `maskserve serve` then takes `entries` in the user's
    cache folder (`--entries DIR`: another; `''`: none)."""
    disk_bytes: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Bytes of the disk tier; 0: half of the free space."""
    remote_url: str = ""
    """fsspec URL of the remote tier (s3://bucket/folder); empty: none."""
    remote_bytes: Annotated[int, Meta(ge=0, le=2**60)] = 2**40
    """Bytes of the remote tier."""
    remote_patience_s: Annotated[float, Meta(ge=0.01, le=3600.0)] = 10.0
    """Seconds that an edit waits for its template from the remote tier."""
    entry_kind: Literal["kv", "h", "both", "auto"] = "kv"
    """Content of entries, per block. `auto`: the kind that the planner would read from the host
    tier at a mask ratio of 0.2."""
    cfg_entries: Literal["shared", "own"] = "shared"
    """Entries under classifier-free guidance. `shared`: both passes read the same; `own`: the
    negative pass has its own, at twice the bytes."""
    plan: Literal["auto", "fixed"] = "auto"
    """`auto`: each step loads, projects or computes blocks, whichever is fastest; `fixed`: every
    block reads its entry."""
    conv_halo: Annotated[int, Meta(ge=0, le=64)] = 0
    """UNets: positions around the mask's box, at each level, on which cached rows convolve. Needs
    `entry_kind` `kv` and fixes the `plan`. 0: the whole picture; for rows with refresh steps, one
    position."""
    entry_format: EntryFormat = "int4"
    """Storage format of entries."""
    placed_bytes: Annotated[int, Meta(ge=-1, le=2**50)] = -1
    """FLUX: bytes of decoded keys and values of cached rows that stay from step to step, if all
    blocks fit. -1: 64 MiB on a GPU, 256 MiB on a CPU."""
    stride: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Steps of the priming schedule that share an anchor. 0: all steps for FLUX Fill, 7 for other
    models."""
    dense_steps: Annotated[int, Meta(ge=-1, le=1000)] = -1
    """First steps of a cached edit that compute all tokens. -1: none for FLUX Fill and UNets; for
    others one, if the edit has ten steps or more and a prompt or computed tokens along a whole
    side."""
    own_anchors: Annotated[float, Meta(ge=-1.0, le=1.0)] = -1.0
    """Distance between an edit's refresh steps, as a share of its steps. -1: the model's share; 0:
    an edit without a template runs dense. FLUX base models, FLUX.2 klein (not 9B-KV) and UNets
    refresh even with a template, except for `cache: require` and `reproducible`."""
    fidelity: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    """Fidelity of first edits, in dB against dense ones, if `own_anchors` is -1 and the model has
    no share: each edit places its refresh steps by the errors that it measures. 0: it runs dense.
    Several devices: only with the policy `spread`."""
    own_format: Literal["auto", "model", "int8", "float8", "int4"] = "auto"
    """Storage format of the step cache. `auto`: int8 on a GPU, the model's precision on a CPU."""
    own_text: Literal["frozen", "computed"] = "frozen"
    """Text, and for FLUX Fill and klein the ring, between refresh steps, also with a template of
    `kv` entries. `frozen`: interpolated, and `plan` is `fixed`; `computed`: computed at each
    step."""
    dense_above_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.9
    """Mask ratio from which a row runs dense, even on a hit and with `cache: require`."""
    priming_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.25
    """Share of steps that priming may take from live rows."""
    audit_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of cached edits that an idle engine repeats without the cache and compares."""
    audit_limit: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.25
    """Relative difference of such an edit beyond which its template's edits run dense from then
    on."""

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
    """Address (gRPC) of a stage service (`maskserve serve --stages-device`), or several that share
    the requests; the other keys then apply to them. Empty: each worker has its own stages."""
    service_timeout_s: Annotated[float, Meta(ge=0.1, le=50.0)] = 30.0
    """Seconds that edits wait if no service answers. Then they fail, and the worker takes none
    until one is back."""
    prompt_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**28
    """Bytes of prompt embeddings that the encoder keeps; FLUX.1's takes 8 MB. 0: none."""
    template_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**29
    """Bytes of template encodings that the encoder keeps; FLUX.1 Fill's at 1024 x 1024 takes 20 MB.
    0: none."""
    encode_halo: Annotated[int, Meta(ge=0, le=64)] = 2
    """Latents around the mask that are encoded with it, if a Fill model's masked picture equals the
    template elsewhere. 0: all, as for `reproducible` edits and `cache` `off`."""
    decode_halo: Annotated[int, Meta(ge=0, le=64)] = 4
    """Positions around a cached edit's pasted area that are decoded with it, at each level of the
    VAE. 0: all, as for dense and reproducible edits."""
    decode_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**26
    """Bytes of template norms that the decoder keeps for `decode_halo`; FLUX.1's take 2 MB."""
    vae_batches: Literal["auto", "on", "off"] = "auto"
    """Pass waiting pictures of one size through the VAE in one call, up to the area of 1024 x 1024,
    except `reproducible` edits. `auto`: on a GPU."""
    vae_tiles: Literal["auto", "on", "off"] = "auto"
    """Let the VAE take pictures with a side above its `sample_size` in tiles, as diffusers'
    `enable_tiling`; without halos. `auto`: if the model's native size is above 1536."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the stage services.

        Raises:
            ConfigError: one is listed twice.
        """
        return _address_list("[stages] service", self.service)


class SloConfig(Table, frozen=True):
    """`[slo]`: due times of responses."""

    enabled: bool = False
    """Give edits without `deadline_ms` a due time by their size; they go on when late."""
    seconds_256: Annotated[float, Meta(gt=0.0, le=86400.0)] = 1.5
    """Seconds from acceptance to response for edits of up to 256 x 256 model pixels."""
    seconds_512: Annotated[float, Meta(gt=0.0, le=86400.0)] = 2.0
    """Up to 512 x 512."""
    seconds_1024: Annotated[float, Meta(gt=0.0, le=86400.0)] = 3.0
    """Up to 1024 x 1024."""
    seconds_2048: Annotated[float, Meta(gt=0.0, le=86400.0)] = 5.0
    """Larger than 1024 x 1024."""
    refuse_above: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.5
    """An edit that would be dropped at its `deadline_ms` is refused at once if its predicted time
    exceeds the remaining time by this factor; 0: never."""

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
    """Folder or fsspec URL (s3://bucket/folder) of NAME.safetensors, or folders NAME of diffusers
    or PEFT. A name has letters A to Z, digits, '.', '_' and '-'. Empty: no adapters."""
    rescan_s: Annotated[float, Meta(ge=0.05, le=86400.0)] = 10.0
    """Seconds between two listings of the store."""
    timeout_s: Annotated[float, Meta(ge=0.05, le=3600.0)] = 20.0
    """Seconds for one call of the store, or for the next 8 MiB of a file."""
    host_dir: str = ""
    """Folder of files ready to use, on a tmpfs that the host's workers share; empty: in the runtime
    folder."""
    host_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**32
    """Bytes of that folder."""
    disk_dir: str = ""
    """Folder of a disk tier between store and host memory; empty: none."""
    disk_bytes: Annotated[int, Meta(ge=2**10, le=2**53)] = 2**36
    """Bytes of that folder."""
    device_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**31
    """Most bytes of adapters on the denoiser's device. A GPU reserves them at the start, before
    templates get room; a CPU reserves what the store's files take if it is a folder, and at most a
    quarter of the free memory."""
    max_bytes: Annotated[int, Meta(ge=2**10, le=2**40)] = 2**30
    """Largest file of an adapter."""
    max_rank: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Largest rank of an adapter."""
    profiles: str = ""
    """JSON file: for each adapter, the sigma down to which an edit with `adapters: fast` may run
    without it. Others are waited for."""
    entries: Literal["own", "base"] = "own"
    """Cached activations of edits with adapters: `own`, primed with the adapters; `base`, the
    model's."""


class ControlsConfig(Table, frozen=True):
    """`[controls]`: the ControlNets that edits may name."""

    folder: str = ""
    """Folder with a diffusers folder NAME for each ControlNet. Empty: no ControlNets."""
    device_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**33
    """Most bytes of ControlNets on the denoiser's device. A GPU reserves them at the start, before
    templates get room; a CPU reserves what the folder's ControlNets take, at most a quarter of the
    free memory."""
    unequal_depths: Literal["each", "shallowest"] = "each"
    """FLUX ControlNets with different numbers of blocks. `each`: each net's outputs go where they
    would go alone; `shallowest`: as in diffusers, which drops deeper outputs."""
    service: Addresses = ""
    """Address (gRPC) of a ControlNet service (`maskserve serve --controlnet-device`), or several
    that run the ControlNets of an edit beside each other; empty: ControlNets run beside the base.
    Residuals come through memory from a loopback address, else over TCP."""
    service_timeout_s: Annotated[float, Meta(ge=0.1, le=600.0)] = 5.0
    """Seconds of silence of a service after which its edits fail; less than `[engine]
    heartbeat_timeout_s`."""
    listen: str = ""
    """HOST:PORT (TCP) at which a service accepts denoisers of other hosts (`maskserve serve
    --workers 0 --controlnet-device` sets it). Empty: only its own host's."""
    ipc_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Device bytes through which a service on a GPU sends residuals to its host's GPUs (CUDA IPC;
    tested on one GPU only); those without room pass through host memory."""

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


class NodesConfig(Table, frozen=True):
    """`[nodes]`: the models of workflow nodes, in the file of `maskserve serve --nodes`; `[model]
    device` is their device. The name of each further model is a key, too, and its value a folder,
    hub id or URL.
    """

    path: tuple[str, ...] = ()
    """Folders of node files, after those of `--node-path`."""
    models: dict[str, str] = msgspec.field(default_factory=dict)
    """Folder, hub id or URL of each model by its name; the names may stand in `[nodes]`, too."""
    verify_url: Annotated[str, Meta(pattern=r"\A(https?://\S+)?\Z")] = ""
    """URL, up to `/v1`, of an OpenAI-compatible server with a vision model, for `agrees`. Redirects
    are not followed."""
    verify_model: str = ""
    """Name of that model on its server."""
    verify_key_file: str = ""
    """File with the API key of that server; empty: none."""
    verify_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 60.0
    """Seconds of silence after which that server counts as failed."""
    load: Literal["start", "use"] = "start"
    """When a model is loaded. `start`: at the start, if `device_bytes` has room; `use`: at the
    first call that needs it."""
    device_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 8 * 2**30
    """Bytes of loaded weights; the least used model without a call makes room for others."""

    def source(self, key: str) -> str:
        """Folder, hub id or URL under a key; empty: none."""
        value = self.models.get(key, getattr(self, key, ""))
        return value if isinstance(value, str) else ""

    def folders(self) -> dict[str, str]:
        """Folders and hub ids of the models that are served, by key."""
        return {key: value for key, value in self.models.items() if value and not is_url(value)}


class ValuesConfig(Table, frozen=True):
    """`[values]`: files of the host that pass pictures and masks between the nodes of a workflow;
    for workers, node servers and the router.
    """

    folder: str = ""
    """Folder in memory that all of them on this host share, also for kept results (`maskserve serve
    --router` sets one). Empty: values pass as bytes."""
    max_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 2 * 2**30
    """Most bytes of all values; keys share them. A value without room passes as bytes."""
    least_bytes: Annotated[int, Meta(ge=1, le=2**40)] = 2**18
    """Smaller values pass as bytes, which is as fast."""
    expires_s: Annotated[float, Meta(ge=1, le=31 * 86400)] = 3600.0
    """Seconds without a new value after which a run's values go: its router has died."""


class ProvenanceConfig(Table, frozen=True):
    """`[provenance]`: how responses declare a model's work (docs/operate.md)."""

    mark: bool = True
    """Declare it in each response's XMP, as IPTC digital source type."""
    certificate: str = ""
    """PEM file of the certificate chain for C2PA manifests, the signer's first; empty: no
    manifests."""
    private_key: str = ""
    """PEM file of the certificate's key."""
    algorithm: Literal["es256", "es384", "es512", "ps256", "ps384", "ps512", "ed25519"] = "es256"
    """Algorithm of the key."""
    timestamp_url: Annotated[str, Meta(pattern=r"\A(https?://\S+)?\Z")] = ""
    """Time-stamp authority (RFC 3161) for each response; empty: none."""
    timestamp_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    """Seconds that it has to answer; without its stamp the response is not sent."""


class SafetyConfig(Table, frozen=True):
    """`[safety]`: the operator's own check (docs/operate.md#a-check-of-your-own)."""

    check: Annotated[
        str, Meta(pattern=r"\A(\S+:\w+)?\Z", description="FILE.py:FUNCTION or MODULE:FUNCTION")
    ] = ""
    """Function that sees source, prompt and every picture made, and returns the reason for a
    refusal, or None; empty: none."""
    model: Annotated[str, Meta(pattern=r"\A[\w.-]*\Z")] = ""
    """Model of the worker's Triton that decides the same; empty: none."""
    repository: str = ""
    """Model repository with that model's folder, which `maskserve serve` gives to Triton; empty:
    Triton has it already."""


class LogConfig(Table, frozen=True):
    """`[log]`: logs of the worker's processes (docs/operate.md#logs)."""

    level: LogLevel = "INFO"
    """Lines below this level are left out."""
    format: Literal["json", "text"] = "json"
    """`json`: an object per line; `text`: for people."""
    file: str = ""
    """File to which all processes append; empty: standard error, which is Triton's log. `maskserve
    serve` then names one per worker."""


class TraceConfig(Table, frozen=True):
    """`[trace]`: OpenTelemetry spans (docs/operate.md#traces)."""

    otlp_url: Annotated[str, Meta(pattern=r"\A(https?://[^\s/]+/\S*)?\Z")] = ""
    """OTLP/HTTP address for spans, such as http://collector:4318/v1/traces; empty: no spans."""
    rate: Annotated[int, Meta(ge=1, le=10**9)] = 1
    """Trace one request in so many, and every request with a trace context."""
    timeout_s: Annotated[float, Meta(ge=0.1, le=60)] = 2.0
    """Seconds to send a batch of spans before it is lost."""
    interval_s: Annotated[float, Meta(ge=0.05, le=60)] = 1.0
    """Seconds between two batches."""
    queue: Annotated[int, Meta(ge=1, le=10**6)] = 4096
    """Spans of a process that wait to be sent; more are lost."""


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
    nodes: NodesConfig = NodesConfig()
    values: ValuesConfig = ValuesConfig()
    provenance: ProvenanceConfig = ProvenanceConfig()
    safety: SafetyConfig = SafetyConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()
    runtime_dir: str = ""
    """Folder of the worker's status record, best in memory."""
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
    named = [model.device]
    if not config.stages.service:
        named += [model.encoder_device, model.decoder_device]
    counted = 1 + max(int(number) for number in (name.partition(":")[2] or 0 for name in named))
    return max(counted, config.engine.devices)
