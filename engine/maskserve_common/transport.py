"""Keepalive settings of gRPC connections, so that calls of minutes outlive load balancers.

An edit may take minutes in which no byte passes. Load balancers and address translators forget
silent connections (docs/deploy.md has their limits), so clients ping. By default, gRPC servers
treat pings as an attack: more than one in five minutes is too many, and the third ends the
connection with all its calls. The same pings detect a peer that has vanished.
"""

from __future__ import annotations

PING_MS = 30_000
"""Milliseconds between pings of clients: half of the shortest usual limit, 60 s."""
LISTENER_PING_MS = 60_000
"""Milliseconds between pings of listeners: a client that does not answer has vanished, and its
edits are withdrawn."""
PING_TIMEOUT_MS = 20_000
LEAST_PING_INTERVAL_MS = 250
"""Least milliseconds between a client's pings, with or without calls; a third ping that comes
sooner ends the connection."""

CHANNEL = (
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Arguments of a channel to one of our listeners."""

_ANY_BYTES = -1
SERVICE = (
    *CHANNEL,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", _ANY_BYTES),
    ("grpc.max_receive_message_length", _ANY_BYTES),
    # One that starts again is found again at once.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
"""Arguments of a worker's channel to a service on its host."""

LISTENER = (
    ("grpc.keepalive_time_ms", LISTENER_PING_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_INTERVAL_MS),
)
"""Arguments of a listener. No connection is too old: an age would end calls of minutes."""

TRITON = (
    f"--grpc-keepalive-time={LISTENER_PING_MS}",
    f"--grpc-keepalive-timeout={PING_TIMEOUT_MS}",
    "--grpc-keepalive-permit-without-calls=true",
    "--grpc-http2-max-pings-without-data=0",
    f"--grpc-http2-min-recv-ping-interval-without-data={LEAST_PING_INTERVAL_MS}",
)
"""The arguments of a Triton's listener, as its command line spells them."""
