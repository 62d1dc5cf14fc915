"""The configuration of a worker: its tables (every key has a default, a range and a sentence), and
what follows from them.

config_file.py reads it from a file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, get_args

from msgspec import Meta
from msgspec.structs import replace

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


class ModelConfig(Table, frozen=True):
    """`[model]`: which model is served and the defaults of its edits."""

    path: str = ""
    """Folder in diffusers format, or a hub id."""
    name: str = ""
    """Name clients may ask for; empty: the last part of the path."""
    revision: str = ""
    """Hub revision; empty: the default branch."""
    variant: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]*\Z")] = ""
    """Variant of the folder's weights, such as `fp16` (`model.fp16.safetensors`). Empty, or for a
    part that lacks it: files without one, or the only variant that there is."""
    device: Device = "auto"
    """Device of the denoiser: `auto`, `cpu`, `cuda` or `cuda:N`, N counted over the worker's own
    GPUs."""
    encoder_device: Device = ""
    """Device of VAE and text encoders, as `device`; empty: the denoiser's."""
    decoder_device: Device = ""
    """Device of the VAE's decoder, as `device`; empty: the denoiser's."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` (float32 on CPU, bfloat16 on CUDA) or a dtype."""
    weights: WeightForm = "bf16"
    """Form of the weights of the denoiser's transformer blocks: `bf16` as the folder has them, in
    `dtype`; others are made at start and need the extra `quantised`: `fp8`, `int8`, `int8-dynamic`
    (which multiplies in int8, too), a byte per weight; `nf4`, half a byte and a bit."""
    gguf: str = ""
    """GGUF file whose weights take the place of a FLUX folder's transformer; products keep its
    form. It needs the extra `quantised`; not with another `weights` or `fuse_loras`."""
    t5_weights: Literal["bf16", "int8"] = "bf16"
    """Form of a T5's weights: `bf16` as the folder has them; `int8`, a byte per weight, needs the
    extra `quantised`."""
    t5_offload: bool = False
    """Whether a T5 lies in host memory and goes to its device layer by layer for each new
    prompt. Not with `t5_weights` = `int8`."""
    fuse_loras: tuple[str, ...] = ()
    """LoRAs that every edit has, FILE or FILE:SCALE, added to the weights at start."""
    native_resolution: Annotated[int, Meta(ge=0, le=8192)] = 0
    """Side of the square whose area bounds the model's input; 0: asked of the model."""
    max_sequence_length: Annotated[int, Meta(ge=1, le=4096)] = 512
    """Text tokens of the T5 prompt; UNets take as many as their tokenizer says."""
    num_inference_steps: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Default steps; 0: those of the model's pipeline in diffusers."""
    guidance_scale: Annotated[float, Meta(ge=0.0, le=1000.0)] = 0.0
    """Default guidance; 0: that of the model's pipeline in diffusers."""
    mask_ring: Annotated[int, Meta(ge=0, le=64)] = 1
    """Default tokens round the mask that a cached edit computes too; of FLUX Fill, beside a
    template, at least two, in the steps that compute the text (`[cache] own_text`)."""
    outside_noise: Literal["auto", "template", "edit"] = "auto"
    """Noise outside the mask where the model blends the source in: `template` (the same for every
    edit of a picture, so that cached and dense edits agree), `edit` (diffusers' own), or `auto`:
    `edit` for edits with `cache` = `off` and of workers without a cache, else `template`."""
    first_block_threshold: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0
    """Default change of what the first block adds below which a step leaves the other blocks out
    (FirstBlockCache; FLUX); 0 leaves out none."""
    torch_threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """CPU threads of the denoiser, at most; 0: all. Its steps take no more than their operations
    keep busy: those of a small model one."""


class LimitsConfig(Table, frozen=True):
    """`[limits]`: what one request may ask at most."""

    max_image_bytes: Annotated[int, Meta(ge=1024, le=2**31)] = 50 * 2**20
    """Encoded bytes of an image."""
    max_pixels: Annotated[int, Meta(ge=64, le=2**31)] = 50_000_000
    """Decoded pixels of an image."""
    max_side: Annotated[int, Meta(ge=8, le=65535)] = 16384
    """Longest side of an image."""
    max_prompt_chars: Annotated[int, Meta(ge=1, le=10**6)] = 32_000
    """Characters of a prompt."""
    max_template_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 2**30
    """Encoded bytes of all registered images."""
    max_result_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 2**29
    """Encoded bytes of kept results (`keep_result`), of a host's workers together where they share
    `[values] folder`; beyond, those that were not used for the longest time go."""
    result_expires_s: Annotated[float, Meta(ge=1, le=31 * 86400)] = 3600.0
    """Time after its last use when a kept result goes."""
    max_steps: Annotated[int, Meta(ge=1, le=1000)] = 200
    """Denoising steps of one edit."""


class EngineConfig(Table, frozen=True):
    """`[engine]`: the step loop."""

    max_rows: Annotated[int, Meta(ge=1, le=256)] = 8
    """Rows of the running batch."""
    batching: Literal["continuous", "static"] = "continuous"
    """`continuous`: an edit joins the running batch at any step. `static`: a batch is formed of
    those that wait, and none joins until its last one has ended; slower, and there to compare with.
    Not with the policies `deadline` and `rounds`."""
    devices: Literal[1, 2, 4, 8] = 1
    """Devices of this worker, each with the whole model and a process of its own."""
    policy: Literal["spread", "deadline", "rounds", "cfg"] = "spread"
    """How a worker shares several devices. `spread`: each has a batch of its own; `deadline`: each
    step of a FLUX edit gets as many as its due time needs, and small edits share one; `rounds`: the
    same at the starts of rounds alone, as TetriServe; `cfg`: of two devices, each computes one pass
    of an edit under classifier-free guidance."""
    round_steps: Annotated[int, Meta(ge=1, le=1000)] = 5
    """Length of a round under `rounds`: so many steps of the slowest edit, on as many devices as
    make it fastest."""
    costs: str = ""
    """JSON file of `scripts/bench profile_costs`: what steps take here, so that the worker prices
    by it from its first step on. Empty: by an estimate, until it has measured its own."""
    max_waiting: Annotated[int, Meta(ge=1, le=10**6)] = 256
    """Edits waiting for a row; one more is refused."""
    drain_grace_s: Annotated[float, Meta(ge=0, le=3600)] = 60.0
    """Time that accepted edits have to finish."""
    heartbeat_s: Annotated[float, Meta(ge=0.01, le=5)] = 0.1
    """How often an idle engine says it is alive."""
    heartbeat_timeout_s: Annotated[float, Meta(ge=0.2, le=600)] = 10.0
    """Silence after which the engine counts as hung."""
    stuck_timeout_s: Annotated[float, Meta(ge=1, le=86400)] = 120.0
    """Time after which a worker counts as stuck: edits are on their way and none comes through, or
    a front does not answer the supervisor. Longer than encoding or decoding one picture takes."""
    watch_interval_s: Annotated[float, Meta(ge=0.001, le=1)] = 0.02
    """How often fronts look for a cancel; less often when steps are longer."""
    warm_up: bool = True
    """Whether encoder, denoiser and decoder run once before the worker is ready: on a GPU at the
    model's native size."""
    cuda_graphs: bool = True
    """Whether steps of a UNet are recorded as CUDA graphs, on GPUs; what is recorded takes as much
    memory as a step."""
    flux_cuda_graphs: bool = True
    """Whether steps of FLUX are, too, of up to as many tokens as one dense row has: larger ones do
    not wait for the host. Cached rows then compute up to an eighth more tokens; edits that are
    `reproducible` or have LoRAs, ControlNets or a `first_block_threshold` are not recorded, nor
    are any where `placed_bytes` is set or a worker has several `devices`."""
    front_threads: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Edits one front serves at once."""


class CacheConfig(Table, frozen=True):
    """`[cache]`: template activations."""

    enabled: bool = True
    """Whether templates are primed and cached rows served."""
    budget_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Bytes on the device, of entries and of what rows have loaded; 0: of what weights, stages and
    the largest step leave free, 80 % on a GPU and a quarter on a CPU."""
    host_dir: str = ""
    """Folder of the host tier, on a tmpfs that the host's workers share; empty: no such tier."""
    host_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Bytes of the host tier; 0: half of what is free there."""
    register_host: bool = True
    """On GPUs, have the device read files of the host tier by itself (cudaHostRegister), where they
    lie on a tmpfs and that is faster than gathering on a core."""
    disk_dir: str = ""
    """Folder of the disk tier; empty: no such tier. `maskserve serve` takes `entries` in the user's
    cache folder where the file does not name one (`--entries DIR`: another; `''`: none)."""
    disk_bytes: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Bytes of the disk tier; 0: half of what is free there."""
    remote_url: str = ""
    """URL of the remote tier, as fsspec takes it (s3://bucket/folder); empty: no such tier."""
    remote_bytes: Annotated[int, Meta(ge=0, le=2**60)] = 2**40
    """Bytes of the remote tier."""
    remote_patience_s: Annotated[float, Meta(ge=0.01, le=3600.0)] = 10.0
    """Seconds after which an edit no longer waits for its template from the remote tier."""
    entry_kind: Literal["kv", "h", "both", "auto"] = "kv"
    """Content of entries, per block; `auto`: for each block the kind that the planner would read at
    a mask ratio of 0.2 from the host tier."""
    cfg_entries: Literal["shared", "own"] = "shared"
    """Under classifier-free guidance, `shared`: both passes read the same entries; `own`: the
    negative pass reads entries primed without a prompt, at twice the bytes."""
    plan: Literal["auto", "fixed"] = "auto"
    """`auto`: each step loads, projects or computes blocks as is fastest; `fixed`: every block
    takes its entry."""
    conv_halo: Annotated[int, Meta(ge=0, le=64)] = 0
    """UNets: positions round the mask's box, at each level, on which cached rows convolve; farther
    out they read the template's feature maps, which are kept besides. Goes with `entry_kind` `kv`,
    and `plan` is `fixed`. 0: the whole picture, and of rows with anchors of their own one
    position."""
    entry_format: EntryFormat = "int4"
    """Storage of entries."""
    placed_bytes: Annotated[int, Meta(ge=-1, le=2**50)] = -1
    """FLUX: bytes in which decoded keys and values of the running cached rows stay from step to
    step, if those of all blocks fit. -1: 64 MiB on a GPU, 256 MiB on a CPU."""
    stride: Annotated[int, Meta(ge=0, le=1000)] = 0
    """So many steps of the priming schedule share an anchor. 0: what the model needs: all steps for
    FLUX Fill, 7 for others."""
    dense_steps: Annotated[int, Meta(ge=-1, le=1000)] = -1
    """First steps of a cached edit that compute all tokens; of FLUX Fill the last of them lifts the
    entries that the others read. -1: what the model needs: one for FLUX base models where the edit
    has ten steps or more and a prompt, or covers a whole side of the picture, else none."""
    own_anchors: Annotated[float, Meta(ge=-1.0, le=1.0)] = -1.0
    """The share of an edit's steps from one of its own anchors to the next, which says how many
    there are. If its template is not at hand, and on base models of FLUX, FLUX.2 klein and
    UNets in any case, all its tokens are computed there, and the steps between read what
    that has left; its ControlNets compute all tokens of these, too. An edit of which these would
    be as much work as all its steps dense runs dense. -1: what the model needs; 0: an edit without
    a template runs dense."""
    own_format: Literal["auto", "model", "int8", "float8", "int4"] = "auto"
    """Storage format of what refresh steps leave. `auto`: int8 on a GPU; on a CPU, where decoding
    it takes up to a tenth of a step, the model's own precision."""
    own_text: Literal["frozen", "computed"] = "frozen"
    """How text, and in FLUX Fill and klein the ring round the mask, are read in the steps between
    refresh steps, also beside a template that has keys and values of all blocks: `frozen`: they are
    interpolated between refresh steps, and `plan` is `fixed`; `computed`."""
    dense_above_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.9
    """Mask ratio from which a row runs dense even on a hit, and with `cache: require`."""
    priming_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.25
    """Share of steps that priming may take from live rows."""
    audit_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of cached edits that are made again without the cache, when the engine is idle, and
    compared."""
    audit_limit: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.25
    """Difference of such an edit, relative, beyond which its template runs dense from then on."""

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
    """`[stages]`: what surrounds an edit's steps, the encoder and the decoder."""

    service: str = ""
    """Address (HOST:PORT, gRPC) of a stage service, which then encodes and decodes for all workers
    of the host (`maskserve serve --stages-device`); empty: each worker does. The other keys, and
    the devices of `[model]`, are then the service's."""
    service_timeout_s: Annotated[float, Meta(ge=0.1, le=50.0)] = 30.0
    """Time that edits wait for a service that does not answer, as while it starts again. Then they
    fail, and the worker takes none until it is back."""
    prompt_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**28
    """Bytes of prompts' embeddings that the encoder keeps; FLUX.1's takes 8 MB. 0: none."""
    template_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**29
    """Bytes of templates' encodings that the encoder keeps; FLUX.1 Fill's at 1024 x 1024 take 20
    MB. 0: none."""
    encode_halo: Annotated[int, Meta(ge=0, le=64)] = 2
    """Latents round the mask that are encoded with it where a Fill model's masked picture is the
    template's elsewhere. 0: all is encoded, as for `reproducible` edits and `cache` `off`."""
    decode_halo: Annotated[int, Meta(ge=0, le=64)] = 4
    """Positions round what a cached edit pastes that are decoded with it, at each level of the VAE.
    0: all is decoded, as for dense and reproducible edits."""
    decode_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 2**26
    """Bytes of templates' norms that the decoder keeps for this; FLUX.1's take 2 MB."""
    vae_batches: Literal["auto", "on", "off"] = "auto"
    """Whether pictures of one size go through the VAE in one call where several wait, as many as
    make one picture of 1024 x 1024; `reproducible` edits' go alone. `auto`: on a GPU."""
    vae_tiles: Literal["auto", "on", "off"] = "auto"
    """Whether the VAE takes pictures with a side above its own `sample_size` in tiles, as
    diffusers' `enable_tiling` does; nothing is then encoded or decoded in pieces. `auto`: where the
    model's native size is above 1536."""


class SloConfig(Table, frozen=True):
    """`[slo]`: when answers are due."""

    enabled: bool = False
    """Whether edits without `deadline_ms` are due by their size. Such an edit goes on when it is
    late (`on_late: finish`)."""
    seconds_256: Annotated[float, Meta(gt=0.0, le=86400.0)] = 1.5
    """Seconds from acceptance to answer, for edits of up to 256 x 256 pixels of the model."""
    seconds_512: Annotated[float, Meta(gt=0.0, le=86400.0)] = 2.0
    """Up to 512 x 512."""
    seconds_1024: Annotated[float, Meta(gt=0.0, le=86400.0)] = 3.0
    """Up to 1024 x 1024."""
    seconds_2048: Annotated[float, Meta(gt=0.0, le=86400.0)] = 5.0
    """Larger than 1024 x 1024."""
    refuse_above: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.5
    """An edit that would be dropped at its `deadline_ms` is refused at once if its predicted time
    is over what is left, times this; 0: never."""

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
    """Folder, or URL as fsspec takes it (s3://bucket/folder). An adapter NAME is the file
    NAME.safetensors, or in a folder NAME pytorch_lora_weights.safetensors or PEFT's two files. A
    name has letters of A to Z, digits, '.', '_' and '-'. Empty: edits may name none."""
    rescan_s: Annotated[float, Meta(ge=0.05, le=86400.0)] = 10.0
    """How often the store is listed anew."""
    timeout_s: Annotated[float, Meta(ge=0.05, le=3600.0)] = 20.0
    """Time in which the store answers one call, or brings the next 8 MiB of a file."""
    host_dir: str = ""
    """Folder of files ready for use, on a tmpfs that the host's workers share; empty: in the
    runtime folder."""
    host_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**32
    """Bytes of that folder."""
    disk_dir: str = ""
    """Folder on a disk between the store and the host's memory; empty: no such tier."""
    disk_bytes: Annotated[int, Meta(ge=2**10, le=2**53)] = 2**36
    """Bytes of that folder."""
    device_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**31
    """Bytes of adapters that stay on the denoiser's device."""
    max_bytes: Annotated[int, Meta(ge=2**10, le=2**40)] = 2**30
    """Largest file of an adapter."""
    max_rank: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Largest rank of an adapter."""
    profiles: str = ""
    """JSON file: adapter to the sigma until which an edit with `adapters: fast` may go without it;
    others wait."""
    entries: Literal["own", "base"] = "own"
    """Cached activations for edits with adapters: `own`, primed with them; `base`, the model's."""


class ControlsConfig(Table, frozen=True):
    """`[controls]`: the ControlNets that edits may name."""

    folder: str = ""
    """Folder of ControlNets, each in a folder NAME as diffusers saves one. Empty: edits may name
    none."""
    device_bytes: Annotated[int, Meta(ge=2**10, le=2**50)] = 2**33
    """Bytes of ControlNets that stay on the denoiser's device."""
    unequal_depths: Literal["each", "shallowest"] = "each"
    """FLUX: where several of an edit have different numbers of blocks. `each`: each net's outputs
    are spread over the model as if it were alone; `shallowest`: as diffusers does, which drops what
    is deeper than the shallowest net."""
    service: str = ""
    """Address (HOST:PORT, gRPC) of a ControlNet service, which then runs them (`maskserve serve
    --controlnet-device`); empty: they run beside the base. At an address of loopback residuals come
    through memory, at any other over TCP."""
    service_timeout_s: Annotated[float, Meta(ge=0.1, le=600.0)] = 5.0
    """Silence of the service after which the edits that need it fail; below `[engine]
    heartbeat_timeout_s`. Over a network what a step adds has to come in this time."""
    listen: str = ""
    """HOST:PORT (TCP) at which a service accepts denoisers of other hosts for their steps;
    `maskserve serve --workers 0 --controlnet-device` sets it. Empty: only those of its own host."""
    ipc_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Bytes of its device through which a service on a GPU sends residuals to denoisers of its
    host's GPUs (CUDA's IPC). Residuals that find no room or cannot be read there pass host memory,
    as all do with 0. Tried between processes of one GPU, not of several."""


class NodesConfig(Table, frozen=True):
    """`[nodes]`: the models of a node server's workflows, in the file of `maskserve serve --nodes`;
    their device is that of `[model] device`.
    """

    find: str = ""
    """Folder, as transformers saves one, or hub id of a CLIPSeg or GroundingDINO model: masks by
    name. Empty: none is served."""
    segment: str = ""
    """Folder or hub id of a SAM or SAM 2 model: masks by clicks and boxes, and of the things that a
    GroundingDINO finds. Empty: none is served."""
    enlarge: str = ""
    """Folder or hub id of a Swin2SR model that doubles sides. Empty: none is served."""
    likeness: str = ""
    """Folder or hub id of a CLIP model: `resembles`. Empty: none is served."""
    verify_url: Annotated[str, Meta(pattern=r"\A(https?://\S+)?\Z")] = ""
    """URL of an OpenAI-compatible server with a model that sees pictures, up to `/v1`: `agrees`
    asks it. Redirects are not followed."""
    verify_model: str = ""
    """Name of that model on its server."""
    verify_key_file: str = ""
    """File with the API key for it; empty: it needs none."""
    verify_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 60.0
    """Time without a byte of it after which it does not answer."""
    load: Literal["start", "use"] = "start"
    """When a model is loaded: at the start, as far as `device_bytes` has room, or with the first
    call that needs it."""
    device_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 8 * 2**30
    """Bytes of weights that are loaded at a time; the least used make room for others once no call
    needs them."""

    def folders(self) -> dict[str, str]:
        """Folders of the models that are served, by key."""
        keys = ("find", "segment", "enlarge", "likeness")
        return {key: folder for key in keys if (folder := getattr(self, key))}


class ValuesConfig(Table, frozen=True):
    """`[values]`: pictures and masks that pass between the nodes of a workflow as files of the
    host, by name; of workers, node servers and the router.
    """

    folder: str = ""
    """In memory, and shared by all of them on this host, as are kept results then. Empty: values
    pass as bytes, results are each worker's; `maskserve serve --router` gives one."""
    max_bytes: Annotated[int, Meta(ge=0, le=2**50)] = 2 * 2**30
    """Most bytes of all values; keys share them. A value that finds no room passes as bytes."""
    least_bytes: Annotated[int, Meta(ge=1, le=2**40)] = 2**18
    """Smaller values pass as bytes, which takes no longer."""
    expires_s: Annotated[float, Meta(ge=1, le=31 * 86400)] = 3600.0
    """Values of a run that none was added to for so long are gone: its router died."""


class ProvenanceConfig(Table, frozen=True):
    """`[provenance]`: how answers say that a model has painted in them (docs/operate.md)."""

    mark: bool = True
    """Whether each answer says so in XMP, by IPTC's digital source type."""
    certificate: str = ""
    """PEM file of the chain, the signer's own first, for C2PA manifests; empty: none is written."""
    private_key: str = ""
    """PEM file of the certificate's key."""
    algorithm: Literal["es256", "es384", "es512", "ps256", "ps384", "ps512", "ed25519"] = "es256"
    """Algorithm of the key."""
    timestamp_url: Annotated[str, Meta(pattern=r"\A(https?://\S+)?\Z")] = ""
    """Time-stamp authority (RFC 3161), asked for each answer; empty: none."""
    timestamp_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    """Time that it has; without its stamp an answer is not sent."""


class SafetyConfig(Table, frozen=True):
    """`[safety]`: the operator's own check (docs/operate.md#a-check-of-your-own)."""

    check: Annotated[
        str, Meta(pattern=r"\A(\S+:\w+)?\Z", description="FILE.py:FUNCTION or MODULE:FUNCTION")
    ] = ""
    """Function that sees source, prompt and every picture that is made, and says why one is
    refused, or None; empty: none."""
    model: Annotated[str, Meta(pattern=r"\A[\w.-]*\Z")] = ""
    """Model of the worker's own Triton that is asked the same; empty: none."""
    repository: str = ""
    """Folder in which that model's folder lies, for `maskserve serve` to give to Triton; empty: it
    is in one of Triton's already."""


class LogConfig(Table, frozen=True):
    """`[log]`: what a worker's own processes write down (docs/operate.md#logs)."""

    level: LogLevel = "INFO"
    """Lines below this level are left out."""
    format: Literal["json", "text"] = "json"
    """`json`: an object per line; `text`: for people."""
    file: str = ""
    """Lines are appended to this file, which all processes share; empty: standard error, Triton's
    log; `maskserve serve` then names one per worker."""


class TraceConfig(Table, frozen=True):
    """`[trace]`: OpenTelemetry spans (docs/operate.md#traces)."""

    otlp_url: Annotated[str, Meta(pattern=r"\A(https?://[^\s/]+/\S*)?\Z")] = ""
    """Where spans go (OTLP over HTTP), as http://collector:4318/v1/traces; empty: nowhere."""
    rate: Annotated[int, Meta(ge=1, le=10**9)] = 1
    """One request in so many is traced, beside those whose client sends a trace context."""
    timeout_s: Annotated[float, Meta(ge=0.1, le=60)] = 2.0
    """Time to send a batch of spans; then it is lost."""
    interval_s: Annotated[float, Meta(ge=0.05, le=60)] = 1.0
    """How often spans are sent."""
    queue: Annotated[int, Meta(ge=1, le=10**6)] = 4096
    """Spans of one process waiting to be sent; more are lost."""


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
    """Folder of the worker's status record; best in memory."""
    templates_dir: str = ""
    """Folder of registered images; empty: in the runtime folder."""
    worker: str = "worker-0"
    """Name of this worker in answers and metrics."""


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
