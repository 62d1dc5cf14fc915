"""The router's configuration: one TOML file and what the command line lays over it.

Every key has a default, a range and a sentence; an unknown key or a value out of range is a
ConfigError that names it. `[limits]`, `[values]`, `[log]` and
`[trace]` are the worker's own tables.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, structs

from maskserve_common.config import ConfigError, LimitsConfig, LogConfig, TraceConfig, ValuesConfig
from maskserve_common.config_file import laid_over, read_tables, read_toml
from maskserve_common.reading import Table
from maskserve_common.routing.policies import POLICIES
from maskserve_router.dns import is_address

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
    """`[listen]`: where clients and operators come in."""

    host: str = "127.0.0.1"
    """Address of the clients' ports."""
    http_port: Port = 8080
    """KServe v2 over HTTP; 0 takes a free one."""
    grpc_port: Port = 8081
    """KServe v2 over gRPC; 0 takes a free one."""
    admin_host: str = "127.0.0.1"
    """Address of the operators' port: metrics, drain, reload. Keep it from clients."""
    admin_port: Port = 8082
    """The operators' port; 0 takes a free one."""
    admin_names: tuple[str, ...] = ()
    """Names by which it is reached, beside addresses, names without a dot and the machine's own;
    `.example.com` stands for all below it. A request under another name gets 403."""
    tls_cert: str = ""
    """PEM file of the certificate chain; with `tls_key`, both clients' ports speak TLS. New
    contents of both are taken on within seconds."""
    tls_key: str = ""
    """PEM file of the certificate's key."""


class Workers(Table, frozen=True):
    """`[workers]`: which workers there are, and how they are watched."""

    addresses: tuple[str, ...] = ()
    """`host:port` of each worker's gRPC port; `dns:name:port` stands for every address of a
    name."""
    dns_interval_s: Seconds = 5.0
    """How often names are resolved anew."""
    poll_interval_s: Annotated[float, Meta(ge=0.01, le=5)] = 0.06
    """How often each worker is asked for its status."""
    polls_per_s: Annotated[int, Meta(ge=1, le=10**5)] = 500
    """How many such questions all workers together get at most: of more workers each is asked the
    less often. Five hundred take up to half a core."""
    poll_timeout_s: Seconds = 1.0
    """A status that takes longer is a miss."""
    misses: Count = 2
    """So many misses in a row, and the worker is down."""
    missed_bytes: Bytes = 256 * MIB
    """Images of templates registered while a worker was down, kept until it has them, too."""


class WorkflowFiles(Table, frozen=True):
    """`[workflows]`: plans that are served as models, and who runs their nodes."""

    folder: str = ""
    """Of plans, which `maskserve workflows compile` wrote; they are read at the start. Empty: none.
    """
    nodes: tuple[str, ...] = ()
    """`host:port` of each node server's gRPC port; `dns:name:port` stands for every address of a
    name."""
    kept_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 64 * MIB
    """Bytes of nodes' answers that are kept, so that equal calls of a key are not run again; keys
    share them. 0 keeps none."""
    kept_s: Seconds = 3600.0
    """After its last use an answer is kept no longer."""


class Routing(Table, frozen=True):
    """`[routing]`: which worker takes an edit."""

    policy: str = "mask_aware"
    """`mask_aware`, `least_requests`, `least_tokens` or `round_robin`."""
    order: Literal["slack", "fcfs"] = "slack"
    """Of what waits of a key: `slack`, first what has to begin first to be in time, and what is due
    at no time as if it were two minutes after it came; `fcfs`, by arrival."""
    default_model: str = ""
    """Served to edits that name no model; empty: what more than half of the workers serve."""
    remembered_images: Count = 65_536
    """Images whose template is remembered, so that the next edit finds the worker that has it."""
    decoding_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    """Threads that inflate and parse requests and decode masks; keys have them in turn."""


class AdmissionBounds(Table, frozen=True):
    """`[admission]`: how much the router takes on. One more is refused, with a time to retry."""

    max_edits: Count = 512
    """Edits taken and not answered, and as many operations of `control`; a key may have as many as
    it leaves free."""
    max_bytes: Bytes = 640 * MIB
    """Bytes of their requests and answers, shared likewise: an answer's place is taken before its
    edit is sent, by its pixels and format. With keys, four times `[http] max_body_bytes` at the
    least."""
    waiting_per_worker: Annotated[int, Meta(ge=0, le=10**6)] = 8
    """Edits that wait at a worker for a row; further ones wait here, the most urgent first. 0: an
    edit is sent once a row is free."""
    aging_s: Seconds = 5.0
    """A second of waiting counts as much as 1 / `aging_s` of priority."""
    deadline_slack: Annotated[float, Meta(ge=1, le=100)] = 1.5
    """An edit is refused at once if its predicted time is over `deadline_ms` times this."""


class Faults(Table, frozen=True):
    """`[faults]`: what is done about workers that fail."""

    retry_share: Share = 0.2
    """Retries under way, as a share of the edits under way."""
    retry_floor: Annotated[int, Meta(ge=0, le=10**6)] = 16
    """So many retries are allowed however few edits are under way."""
    retry_wait_s: Annotated[float, Meta(ge=0, le=600)] = 5.0
    """How long an edit that its worker failed waits for another one that takes edits."""
    failures_to_eject: Count = 5
    """Edits that a worker fails in a row until it is ejected."""
    eject_s: Seconds = 2.0
    """How long at first; twice as long each time, until `max_eject_s`. Then one edit tries it."""
    max_eject_s: Seconds = 60.0
    """The longest that a worker is ejected at a time."""
    max_ejected_share: Share = 0.5
    """Share of the workers that may be ejected at a time."""
    unlisted_s: Seconds = 120.0
    """An edit that its worker's records do not list for so long is tried on another."""
    drain_grace_s: Seconds = 60.0
    """Time that accepted edits have when the router stops."""


class Http(Table, frozen=True):
    """`[http]`: bounds on one HTTP connection."""

    max_body_bytes: Bytes = 160 * MIB
    """Bytes of one body."""
    max_header_bytes: Bytes = 64 * 1024
    """Bytes of a request's headers."""
    max_chunks: Count = 65_536
    """Chunks of one body."""
    header_timeout_s: Seconds = 10.0
    """Time to send a request's headers."""
    min_bytes_per_s: Annotated[int, Meta(ge=0, le=10**9)] = 1024
    """A body that is ten seconds behind this pace is given up; no pause may be longer."""
    keep_alive_s: Seconds = 620.0
    """How long a connection is kept between requests: longer than load balancers keep theirs."""
    max_connections: Count = 4096
    """Connections at a time, and half of the process's descriptors at most. Beyond, the one that is
    silent longest is closed, of the address with the most of them."""
    cors_origins: tuple[Annotated[str, Meta(pattern=ORIGIN, description=ORIGINS)], ...] = ()
    """Origins whose pages may call the clients' port from a browser, as `https://app.example.com`;
    `*` is every one. No cookie is taken."""


class ImageHosts(Table, frozen=True):
    """`[image_urls]`: pictures that requests of OpenAI's API give as https URLs."""

    hosts: tuple[Annotated[str, Meta(pattern=r"^[a-z0-9.-]+(:[0-9]+)?$")], ...] = ()
    """Hosts that the router may fetch them from, `name` or `name:port`; empty: data URLs alone."""
    timeout_s: Seconds = 10.0
    """Time that one picture may take."""


class JobsConfig(Table, frozen=True):
    """`[jobs]`: edits and workflows that are kept until somebody fetches what came of them."""

    enabled: bool = True
    """False: none are taken, and whoever gives one is told so."""
    database: str = ""
    """Where they are kept: the path of an SQLite file, or a URL as
    `postgresql+psycopg://user:password@host/name`, which several routers may share. Empty: a file
    of the port's number in the user's folder for state (`$XDG_STATE_HOME/maskserve`)."""
    database_file: str = ""
    """A file in which the same stands, such as a mounted secret, in place of `database`."""
    running: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Jobs that this router runs at a time; keys have these places in turn."""
    keep_s: Seconds = 86_400.0
    """How long a job that has ended, and its result, is kept."""
    max_wait_s: Seconds = 86_400.0
    """A job that has not begun by then has failed."""
    keep_jobs: Count = 10_000
    """Ended jobs of a key that are kept; beyond, the oldest goes. A key may have as many that have
    no end yet."""
    max_bytes: Bytes = 4096 * MIB
    """Bytes of all jobs: half for what they are to do, half for results. Of each half a key may
    have as much as it leaves free; a job whose result would find no room waits."""
    lease_s: Annotated[float, Meta(ge=0.5, le=3600)] = 15.0
    """A router that has not said for so long that it lives has lost its jobs, and they run again at
    another."""
    retries: Annotated[int, Meta(ge=0, le=100)] = 5
    """Times that a job is begun anew after a fault that is the server's, as a worker that died; the
    pauses double, from two seconds."""
    webhook_hosts: tuple[Annotated[str, Meta(pattern=r"^[a-z0-9.-]+(:[0-9]+)?$")], ...] = ()
    """Hosts that webhooks may name, `name` or `name:port`; empty: no webhooks."""
    webhook_secret: str = ""
    """Signs webhooks where there are no keys: `whsec_` and base64 of 24 to 64 bytes."""
    webhook_timeout_s: Seconds = 10.0
    """Time that one call of a webhook may take."""
    webhook_tries: Annotated[int, Meta(ge=1, le=100)] = 10
    """Calls of a webhook until one is answered with 2xx; the pauses between them double, to five
    minutes at most."""


OUTPUT = r"^[a-z][a-z0-9+]*://[A-Za-z0-9._@+=,/ -]*/$"
Prefix = Annotated[str, Meta(pattern=OUTPUT, description="a URL that ends with a slash")]


class OutputUrls(Table, frozen=True):
    """`[outputs]`: where `output_url` may have pictures put in place of the answer."""

    urls: tuple[Prefix, ...] = ()
    """Prefixes as `s3://bucket/edits/` or `file:///srv/edits/`, where there are no keys; each ends
    with a slash. Empty: nowhere."""
    timeout_s: Seconds = 60.0
    """Time that one picture may take."""


class Grpc(Table, frozen=True):
    """`[grpc]`: bounds on calls and connections of the clients' gRPC port."""

    max_connections: Count = 4096
    """Connections at a time, as far as descriptors bear them; one more is closed."""
    idle_s: Seconds = 60.0
    """A connection without a call for so long is closed; clients open it anew when they need it."""
    max_calls: Count = 1280
    """Calls open at a time; a client (a key's holder, or an address) may have as many as it leaves
    free. Beyond, the longest silent one gives way to another client's."""
    silence_s: Seconds = 300.0
    """A call that sends nothing for so long, with nothing under way for it, is ended."""
    max_age_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """Age from which a connection takes no further calls, so that clients spread over several
    routers. 0: none is too old."""


class Key(Table, frozen=True):
    """`[[keys]]`: an API key. Without any, every client is let in."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    """Whose it is, for logs and metrics."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Digest of the key, so that this file gives none away: `printf KEY | sha256sum`."""
    max_edits: Count = 64
    """Edits under way with it at a time."""
    admin: bool = False
    """Sees and ends every client's edits, templates and statistics, not only its own."""
    shares: bool = False
    """What it registers is for every client, as with `"shared": true` in a registration."""
    private_prompts: bool = False
    """Embeddings of its prompts are kept for itself alone, as with `private_prompt` in SETTINGS."""
    adapters: tuple[str, ...] = ()
    """LoRAs that are this key's (`*` stands for any characters): to keys that do not name them they
    are not there."""
    output_urls: tuple[Prefix, ...] = ()
    """Prefixes that its `output_url` may begin with; each ends with a slash."""
    jobs_per_day: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """Jobs that it may give from 0 to 24 o'clock UTC; 0: any number."""
    job_bytes_per_day: Annotated[int, Meta(ge=0, le=2**50)] = 0
    """Bytes of these jobs' pictures; 0: any number."""
    job_megapixel_steps_per_day: Annotated[int, Meta(ge=0, le=10**12)] = 0
    """Megapixels of these jobs' pictures, each times its steps; 0: any number."""
    webhook_secret: str = ""
    """Signs its webhooks: `whsec_` and base64 of 24 to 64 bytes. Without, it has none."""


class RouterConfig(Table, frozen=True):
    """The whole file."""

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
    jobs: JobsConfig = JobsConfig()
    outputs: OutputUrls = OutputUrls()
    keys: tuple[Key, ...] = ()
    keys_file: str = ""
    """TOML file with `[[keys]]` and nothing else, such as a mounted secret, added to those that
    stand here; a change of it is taken on within seconds."""
    limits: LimitsConfig = LimitsConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()
    name: str = "router"
    """Of this router, in answers, logs and traces."""


def load_router_config(path: str | None, **over: Any) -> RouterConfig:
    """Read the file, if any, and lay the tables of `over` over it.

    Raises:
        ConfigError: naming the file and key.
    """
    tables = laid_over(read_toml(Path(path)) if path else {}, over)
    if tables.get("keys") == []:
        raise ConfigError("[[keys]]: there are none; without the key every client is let in")
    if file := tables.get("keys_file"):
        more = read_toml(Path(str(file)))
        if unknown_keys := sorted(more.keys() - {"keys"}):
            raise ConfigError(f"{file}: {unknown_keys[0]}: is not a key of it; accepted: [[keys]]")
        if not more.get("keys"):
            raise ConfigError(f"{file}: has no [[keys]]; without keys_file every client is let in")
        tables["keys"] = [*tables.get("keys", ()), *more["keys"]]
    return router_config_of(tables)


def router_config_of(tables: dict[str, Any]) -> RouterConfig:
    """The configuration that these tables make.

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
        raise ConfigError("[jobs] database and database_file: one is given beside the other")
    names = [key.name for key in config.keys]
    if len(set(names)) < len(names):
        raise ConfigError("[[keys]] name: two keys have the same")


def webhook_key(secret: str) -> bytes:
    """The bytes of a secret that signs webhooks; none of an empty one.

    Raises:
        ValueError: it has another form.
    """
    if not secret:
        return b""
    key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    if not secret.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError
    return key


def check_change(old: RouterConfig, new: RouterConfig) -> None:
    """Refuse what a running router cannot take on, so that a reload is whole or not at all.

    Raises:
        ConfigError: naming the first key that differs and is none of those that a reload changes.
    """
    if old.keys and not new.keys:
        raise ConfigError("[[keys]]: the last one goes by a restart alone: it would open the door")
    compared_config = structs.replace(new, keys=old.keys, workers=old.workers)
    addresses = structs.replace(new.workers, addresses=old.workers.addresses)
    for table, field, old_value, new_value in (
        *_differences("", old, compared_config),
        *_differences("workers", old.workers, addresses),
    ):
        where = f"[{table}] {field}" if table else field
        raise ConfigError(
            f"{where}: is changed by a restart alone, from {old_value!r} to {new_value!r}; a "
            "reload takes "
            "on [workers] addresses, [[keys]] and the files of tls_cert and tls_key"
        )


def _differences(name: str, old: Table, new: Table) -> Iterator[tuple[str, str, Any, Any]]:
    """Table, key, value before and after, of all that differ."""
    for field in old.__struct_fields__:
        old_value, new_value = getattr(old, field), getattr(new, field)
        if isinstance(old_value, Table):
            yield from _differences(field, old_value, new_value)
        elif old_value != new_value:
            yield name, field, old_value, new_value
