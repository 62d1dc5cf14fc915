"""The router's configuration: one TOML file, and the command line's options over it.

Each key has a default, a range and a sentence. An unknown key or a value out of range is a
ConfigError that names it. `[limits]`, `[values]`, `[log]` and `[trace]` are the worker's own
tables.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from maskserve_common.addresses import is_address
from maskserve_common.config import ConfigError, LimitsConfig, LogConfig, TraceConfig, ValuesConfig
from maskserve_common.config_file import laid_over, read_tables, read_toml
from maskserve_common.reading import Table
from maskserve_common.routing.policies import POLICIES

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=10**9)]
Bytes = Annotated[int, Meta(ge=1, le=2**40)]
MIB = 2**20
ORIGIN = r"\A(\*|https?://[A-Za-z0-9.\[\]:-]+)\Z"
WEBHOOK_SECRET = "whsec_ and base64 of 24 to 64 bytes"
ORIGINS = "an origin such as https://app.example.com, or *"


class Listen(Table, frozen=True):
    """`[listen]`: addresses and ports for clients and operators."""

    host: str = "127.0.0.1"
    """Address of the clients' ports."""
    http_port: Port = 8080
    """Port of HTTP; 0 takes a free one."""
    grpc_port: Port = 8081
    """Port of gRPC; 0 takes a free one."""
    admin_host: str = "127.0.0.1"
    """Address of the operators' port. Keep it from clients."""
    admin_port: Port = 8082
    """The operators' port; 0 takes a free one."""
    admin_names: tuple[str, ...] = ()
    """Further host names of the operators' port; `.example.com`: all below it. Addresses, names
    without a dot and the machine's name always work."""
    tls_cert: str = ""
    """PEM file of the certificate chain. With it and `tls_key`, clients' ports use TLS; changed
    files are loaded within seconds."""
    tls_key: str = ""
    """PEM file of the certificate's key."""


class Workers(Table, frozen=True):
    """`[workers]`: addresses of the workers, and how the router polls them."""

    addresses: tuple[str, ...] = ()
    """`host:port` of each worker's gRPC port; `dns:name:port`: every address of a name."""
    dns_interval_s: Seconds = 5.0
    """Seconds between two resolutions of names."""
    poll_interval_s: Annotated[float, Meta(ge=0.01, le=5)] = 0.06
    """Seconds between two status requests to a worker."""
    polls_per_s: Annotated[int, Meta(ge=1, le=10**5)] = 500
    """Most status requests per second to all workers."""
    poll_timeout_s: Seconds = 1.0
    """Seconds after which a status request counts as a miss."""
    misses: Count = 2
    """Consecutive misses after which a worker counts as down."""
    missed_bytes: Bytes = 256 * MIB
    """Bytes of registered images kept for workers that are down."""


class WorkflowFiles(Table, frozen=True):
    """`[workflows]`: plans that the router serves as models, and the servers that run their
    nodes.
    """

    folder: str = ""
    """Folder of compiled plans, read at start."""
    node_path: tuple[str, ...] = ()
    """Folders of node files."""
    nodes: tuple[str, ...] = ()
    """`host:port` of each node server's gRPC port, or `dns:name:port`."""
    kept_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 64 * MIB
    """Bytes of kept node results, which answer equal calls of the same key. 0: none."""
    kept_s: Seconds = 3600.0
    """Seconds for which an unused result is kept."""


class Routing(Table, frozen=True):
    """`[routing]`: the choice of a worker for an edit."""

    policy: str = "mask_aware"
    """`mask_aware`, `least_requests`, `least_tokens` or `round_robin`."""
    order: Literal["slack", "fcfs"] = "slack"
    """Order of a key's waiting edits and runs. `slack`: by the latest time to begin; without a due
    time, two minutes after arrival count as one. `fcfs`: by arrival."""
    default_model: str = ""
    """Model of edits that name none. Empty: the one that over half of the workers serve."""
    remembered_images: Count = 65_536
    """Images whose template the router remembers."""
    decoding_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    """Threads that parse requests and decode masks."""


class AdmissionBounds(Table, frozen=True):
    """`[admission]`: limits on work in progress. Requests beyond them get a time to retry."""

    max_edits: Count = 512
    """Unanswered edits, and as many `control` operations. One key alone may have half
    (docs/adr/0042-shares.md)."""
    max_bytes: Bytes = 640 * MIB
    """Bytes of requests and answers in memory. One key alone may have half. With keys, at least
    four times `[http] max_body_bytes`."""
    waiting_per_worker: Annotated[int, Meta(ge=0, le=10**6)] = 8
    """Edits that wait at a worker for a row; others wait in the router. 0: an edit is sent when a
    row is free."""
    aging_s: Seconds = 5.0
    """Seconds of waiting that one step of priority is worth."""
    deadline_slack: Annotated[float, Meta(ge=1, le=100)] = 1.5
    """The router refuses an edit whose predicted time exceeds its `deadline_ms` by this factor."""


class Faults(Table, frozen=True):
    """`[faults]`: retries, and the handling of workers that fail."""

    retry_share: Share = 0.2
    """Most retries in progress, as a share of the edits in progress."""
    retry_floor: Annotated[int, Meta(ge=0, le=10**6)] = 16
    """Retries that are always allowed."""
    retry_wait_s: Annotated[float, Meta(ge=0, le=600)] = 5.0
    """Seconds that a failed edit waits for another worker."""
    failures_to_eject: Count = 5
    """Failed edits in a row before a worker is ejected."""
    eject_s: Seconds = 2.0
    """Seconds of the first ejection; each further one is twice as long."""
    max_eject_s: Seconds = 60.0
    """Longest ejection."""
    max_ejected_share: Share = 0.5
    """Largest share of the workers that is ejected at a time."""
    unlisted_s: Seconds = 120.0
    """Seconds after which an edit goes to another worker, if its worker's status does not list
    it."""
    drain_grace_s: Seconds = 60.0
    """Seconds that accepted edits have to finish at a stop."""


class Http(Table, frozen=True):
    """`[http]`: limits on one HTTP connection."""

    max_body_bytes: Bytes = 160 * MIB
    """Bytes of one body."""
    max_header_bytes: Bytes = 64 * 1024
    """Bytes of a request's headers."""
    max_chunks: Count = 65_536
    """Chunks of one body."""
    header_timeout_s: Seconds = 10.0
    """Seconds to send a request's headers."""
    min_bytes_per_s: Annotated[int, Meta(ge=0, le=10**9)] = 1024
    """Least rate of a body; one that falls ten seconds behind is refused."""
    keep_alive_s: Seconds = 620.0
    """Seconds of an idle connection; load balancers must close theirs earlier."""
    max_connections: Count = 4096
    """Most connections, and at most half of the file descriptors. Beyond, the address with most
    loses the one that is silent for longest."""
    cors_origins: tuple[Annotated[str, Meta(pattern=ORIGIN, description=ORIGINS)], ...] = ()
    """Origins whose pages may call the clients' port, such as `https://app.example.com`; `*`: all.
    Cookies are not accepted."""


class ImageHosts(Table, frozen=True):
    """`[image_urls]`: https URLs of pictures in requests of OpenAI's API."""

    hosts: tuple[Annotated[str, Meta(pattern=r"^[a-z0-9.-]+(:[0-9]+)?$")], ...] = ()
    """Hosts, `name` or `name:port`; empty: only data URLs."""
    timeout_s: Seconds = 10.0
    """Seconds to fetch one picture."""


_URL = r"^(https?://[A-Za-z0-9.:\[\]/_-]+)?$"


class OpenAIConfig(Table, frozen=True):
    """`[openai]`: names and URLs of OpenAI's API."""

    aliases: dict[Annotated[str, Meta(min_length=1, max_length=256)], str] = msgspec.field(
        default_factory=dict
    )
    """Other names of served models and workflows: `gpt-image-1 = "demo"`, for clients that send a
    fixed name."""
    url_bytes: Bytes = 256 * MIB
    """Bytes of all pictures kept for `response_format: url`; keys share the room."""
    url_s: Seconds = 3600.0
    """Seconds for which an unused one is kept."""
    public_url: Annotated[str, Meta(pattern=_URL, description="an http or https URL")] = ""
    """Start of their URLs, such as `https://edits.example.com`. Empty: the address that the client
    called."""


class JobsConfig(Table, frozen=True):
    """`[jobs]`: edits and workflows that run without a waiting client."""

    enabled: bool = True
    """Accept jobs."""
    database: str = ""
    """SQLite file, or a URL such as `postgresql+psycopg://user:password@host/name` that routers may
    share. Empty: a file in `$XDG_STATE_HOME/maskserve`."""
    database_file: str = ""
    """File with the value of `database`, such as a mounted secret."""
    running: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Jobs that this router runs at a time."""
    keep_s: Seconds = 86_400.0
    """Seconds for which an ended job is kept."""
    max_wait_s: Seconds = 86_400.0
    """Seconds in which a job must begin."""
    keep_jobs: Count = 10_000
    """Finished jobs kept for each key, and most unfinished jobs of a key."""
    max_bytes: Bytes = 4096 * MIB
    """Bytes of all jobs: half for requests, half for results. One key alone may have half."""
    lease_s: Annotated[float, Meta(ge=0.5, le=3600)] = 15.0
    """Seconds of a router's silence after which other routers take over its jobs."""
    retries: Annotated[int, Meta(ge=0, le=100)] = 5
    """Restarts of a job after a server fault; pauses double, from two seconds."""
    webhook_hosts: tuple[Annotated[str, Meta(pattern=r"^[a-z0-9.-]+(:[0-9]+)?$")], ...] = ()
    """Hosts that webhooks may name, `name` or `name:port`."""
    webhook_secret: str = ""
    """Secret that signs webhooks if there are no keys: `whsec_` and base64 of 24 to 64 bytes."""
    webhook_timeout_s: Seconds = 10.0
    """Seconds for one call of a webhook."""
    webhook_tries: Annotated[int, Meta(ge=1, le=100)] = 10
    """Most calls of a webhook without a 2xx answer; pauses double, up to five minutes."""

    @property
    def byte_limit(self) -> int:
        """Limit on the bytes of all unfinished requests, and also on those of all results."""
        return self.max_bytes // 2

    @property
    def retention(self) -> tuple[float, int]:
        """Seconds that finished jobs are kept, and the number kept for each key."""
        return self.keep_s, self.keep_jobs


OUTPUT = r"^[a-z][a-z0-9+]*://[A-Za-z0-9._@+=,/ -]*/$"
Prefix = Annotated[str, Meta(pattern=OUTPUT, description="a URL that ends with a slash")]


class OutputUrls(Table, frozen=True):
    """`[outputs]`: places to which `output_url` may write pictures."""

    urls: tuple[Prefix, ...] = ()
    """Beginnings of allowed URLs, such as `s3://bucket/edits/` or `file:///srv/edits/`, if there
    are no keys."""
    timeout_s: Seconds = 60.0
    """Seconds to write one picture."""


class Grpc(Table, frozen=True):
    """`[grpc]`: limits on calls and connections of the clients' gRPC port."""

    max_connections: Count = 4096
    """Most connections, as far as file descriptors allow; further ones are closed."""
    idle_s: Seconds = 60.0
    """Seconds after which a connection without a call is closed."""
    max_calls: Count = 1280
    """Most open calls. One client alone may have half. Beyond, the one that is silent for longest
    ends."""
    silence_s: Seconds = 300.0
    """Seconds of silence after which a call ends, if none of its edits is in progress."""
    max_age_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """Seconds after which a connection takes no further calls, so that clients spread over routers.
    0: no limit."""


class Key(Table, frozen=True):
    """`[[keys]]`: an API key. Without keys, everybody is a client."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    """Name of its holder, for logs and metrics."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key: `printf KEY | sha256sum`."""
    max_edits: Count = 64
    """Most unanswered edits."""
    admin: bool = False
    """Its holder sees all edits, templates and statistics, and may end or evict them
    (docs/operate.md#keys)."""
    shares: bool = False
    """All keys may use its templates."""
    private_prompts: bool = False
    """No other key reuses the embeddings of its prompts."""
    adapters: tuple[str, ...] = ()
    """LoRAs that only this key and others that list them may use (`*` matches any characters)."""
    output_urls: tuple[Prefix, ...] = ()
    """Allowed beginnings of its `output_url`."""
    jobs_per_day: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """Most jobs in a UTC day; 0: any number."""
    job_bytes_per_day: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Most bytes of these jobs' pictures; 0: any number."""
    job_megapixel_steps_per_day: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """Most megapixels of these jobs, times their steps; 0: any number."""
    webhook_secret: str = ""
    """Secret that signs its webhooks, in the form of `[jobs] webhook_secret`; empty: no
    webhooks."""


class RouterConfig(Table, frozen=True):
    """The whole configuration file."""

    listen: Listen = Listen()
    workers: Workers = Workers()
    workflows: WorkflowFiles = WorkflowFiles()
    values: ValuesConfig = ValuesConfig()
    routing: Routing = Routing()
    admission: AdmissionBounds = AdmissionBounds()
    faults: Faults = Faults()
    http: Http = Http()
    grpc: Grpc = Grpc()
    image_urls: ImageHosts = ImageHosts()
    openai: OpenAIConfig = OpenAIConfig()
    jobs: JobsConfig = JobsConfig()
    outputs: OutputUrls = OutputUrls()
    keys: tuple[Key, ...] = ()
    keys_file: str = ""
    """TOML file with further `[[keys]]` only, such as a mounted secret; changes are loaded within
    seconds."""
    limits: LimitsConfig = LimitsConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()
    name: str = "router"
    """Name of this router in answers, logs and traces."""


def load_router_config(path: str | None, **over: Any) -> RouterConfig:
    """Read the file, if any, and lay the tables of `over` over it.

    Raises:
        ConfigError: naming the file and key.
    """
    tables = laid_over(read_toml(Path(path)) if path else {}, over)
    if tables.get("keys") == []:
        raise ConfigError("[[keys]]: is empty; without the table [[keys]] every client is let in")
    if file := tables.get("keys_file"):
        more = read_toml(Path(str(file)))
        if unknown_keys := sorted(more.keys() - {"keys"}):
            raise ConfigError(f"{file}: {unknown_keys[0]}: is not a key of it; accepted: [[keys]]")
        if not more.get("keys"):
            raise ConfigError(f"{file}: has no [[keys]]; without keys_file every client is let in")
        tables["keys"] = [*tables.get("keys", ()), *more["keys"]]
    return router_config_of(tables)


def router_config_of(tables: dict[str, Any]) -> RouterConfig:
    """Make and check the configuration from tables.

    Raises:
        ConfigError: naming the key.
    """
    config = read_tables(tables, RouterConfig)
    _check(config)
    return config


def _check(config: RouterConfig) -> None:
    if config.routing.policy not in POLICIES:
        raise ConfigError(
            f"[routing] policy: {config.routing.policy!r} is not one of {', '.join(POLICIES)}"
        )
    if bool(config.listen.tls_cert) != bool(config.listen.tls_key):
        raise ConfigError("[listen] tls_cert and tls_key: one is given without the other")
    for key, addresses in (
        ("[workers] addresses", config.workers.addresses),
        ("[workflows] nodes", config.workflows.nodes),
    ):
        for address in addresses:
            if not is_address(address):
                raise ConfigError(f"{key}: {address!r} is not host:port or dns:name:port")
    least = 4 * config.http.max_body_bytes
    if config.keys and config.admission.max_bytes < least:
        raise ConfigError(
            f"[admission] max_bytes: {config.admission.max_bytes} has no room for a key's largest "
            f"body; with [[keys]], accepted: from {least}, four times [http] max_body_bytes"
        )
    for where, secret in (
        ("[jobs]", config.jobs.webhook_secret),
        *(("[[keys]]", key.webhook_secret) for key in config.keys),
    ):
        try:
            webhook_key(secret)
        except ValueError:
            raise ConfigError(f"{where} webhook_secret: is not {WEBHOOK_SECRET}") from None
    if config.jobs.database and config.jobs.database_file:
        raise ConfigError("[jobs] database and database_file: both are set; accepted: one of them")
    names = [key.name for key in config.keys]
    if len(set(names)) < len(names):
        raise ConfigError("[[keys]] name: two keys have the same")


def webhook_key(secret: str) -> bytes:
    """Return the bytes of a secret that signs webhooks; none if it is empty.

    Raises:
        ValueError: it is malformed.
    """
    if not secret:
        return b""
    key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    if not secret.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError
    return key


def check_change(old: RouterConfig, new: RouterConfig) -> None:
    """Check that a reload changes only what a running router can change.

    Raises:
        ConfigError: naming the first key that needs a restart.
    """
    if old.keys and not new.keys:
        raise ConfigError(
            "[[keys]]: a reload cannot remove the last key, because without keys every client is "
            "let in"
        )
    compared_config = structs.replace(new, keys=old.keys, workers=old.workers)
    addresses = structs.replace(new.workers, addresses=old.workers.addresses)
    for table, field, old_value, new_value in (
        *_differences("", old, compared_config),
        *_differences("workers", old.workers, addresses),
    ):
        where = f"[{table}] {field}" if table else field
        raise ConfigError(
            f"{where}: is changed by a restart only, from {old_value!r} to {new_value!r}; a reload "
            "changes [workers] addresses, [[keys]] and the files of tls_cert and tls_key"
        )


def _differences(name: str, old: Table, new: Table) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield table, key, old value and new value of all keys that differ."""
    for field in old.__struct_fields__:
        old_value, new_value = getattr(old, field), getattr(new, field)
        if isinstance(old_value, Table):
            yield from _differences(field, old_value, new_value)
        elif old_value != new_value:
            yield name, field, old_value, new_value
