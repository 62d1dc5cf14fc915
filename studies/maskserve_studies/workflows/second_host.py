"""A second host on this machine: a network namespace at the other end of a veth pair, with a
/dev/shm of its own. It needs root and Debian's iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_NETWORKS: Final = 256
"""Number of /24 networks in 198.18.0.0/16, which RFC 2544 reserves for tests."""
_NOBODY: Final = "02:00:00:00:00:01"
_READY: Final = "ready;"
_READY_S: Final = 600.0
_END_S: Final = 60.0


def can_make_second_host() -> bool:
    """Return whether this process may make network namespaces."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "nsenter")))


class SecondHost:
    """A second host: a network namespace with its link and its processes.

    Args:
        number: number of its network, 0 to 255; it is also part of names.
    """

    def __init__(self, number: int) -> None:
        self.name = f"ms{number}"
        """Name of its namespace."""
        self.local_address, self.remote_address = (f"198.18.{number}.{host}" for host in (1, 2))
        """Addresses of this host and of the other."""
        self._local_device, self._remote_device = f"{self.name}-0", f"{self.name}-1"
        self._holder: subprocess.Popen[bytes] | None = None
        self._served: list[_ServeProcess] = []

    def claim(self) -> bool:
        """Make its link, and return whether that succeeded: a number can be used only once."""
        link = [
            "link",
            "add",
            self._local_device,
            "type",
            "veth",
            "peer",
            "name",
            self._remote_device,
        ]
        process = subprocess.run(["ip", *link], check=False, capture_output=True, text=True)
        if process.returncode and "exists" not in process.stderr:
            raise RuntimeError(f"ip {' '.join(link)}: {process.stderr.strip()}")
        return not process.returncode

    def make(self) -> None:
        """Set up the namespace and its link, after `claim`."""
        _ip("netns", "add", self.name)
        _ip("link", "set", self._remote_device, "netns", self.name)
        _ip("addr", "add", f"{self.local_address}/24", "dev", self._local_device)
        self._ip("addr", "add", f"{self.remote_address}/24", "dev", self._remote_device)
        self._ip("link", "set", "lo", "up")
        _ip("link", "set", self._local_device, "up")
        self._ip("link", "set", self._remote_device, "up")
        hold = "mount -t tmpfs tmpfs /dev/shm && echo held && exec sleep infinity"
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self.name, "sh", "-c", hold], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise RuntimeError("no memory of its own can be mounted there")

    def remove(self) -> None:
        self.end()
        if self._holder is not None:
            self._holder.kill()
            self._holder.communicate()
        for command in (["link", "del", self._local_device], ["netns", "del", self.name]):
            subprocess.run(["ip", *command], check=False, capture_output=True)

    # Processes

    def serve(self, *commands: Sequence[str], folder: Path) -> None:
        """Run `maskserve serve` on the second host, once for each list of arguments, and wait until
        all are ready. This method adds the address to the arguments.

        Args:
            commands: the lists of arguments.
            folder: folder for the files of the servers.

        Raises:
            RuntimeError: a server ended, or was not ready in time.
        """
        assert self._holder is not None
        enter = ["nsenter", "-t", str(self._holder.pid), "-m", "-n", f"--wd={Path.cwd()}"]
        serve = [
            sys.executable,
            "-m",
            "maskserve_client.cli",
            "serve",
            "--host",
            self.remote_address,
        ]
        environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
        environment.pop("XDG_RUNTIME_DIR", None)
        started = [
            _ServeProcess([*enter, *serve, *arguments], environment) for arguments in commands
        ]
        self._served += started
        for server in started:
            server.wait_ready()

    def end(self) -> None:
        """Stop its servers."""
        self._stop(signal.SIGTERM)

    def kill(self) -> None:
        """Kill its servers, as a power failure does."""
        self._stop(signal.SIGKILL)

    @property
    def memory(self) -> Path:
        """Return its /dev/shm."""
        assert self._holder is not None
        return Path(f"/proc/{self._holder.pid}/root/dev/shm")

    # Storage

    def mount(self, folder: Path, mib: int) -> Path:
        """Mount a medium of `mib` MiB over a folder of the second host. Return the path at which
        this host sees it.
        """
        assert self._holder is not None
        pid = str(self._holder.pid)
        medium = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
        _run("nsenter", "-t", pid, "-m", *medium)
        return Path(f"/proc/{pid}/root{folder}")

    # Link

    def slow(self, mbit: int) -> None:
        """Limit the link to `mbit` megabits per second in each direction."""
        rate = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "100ms"]
        _run("tc", "qdisc", "replace", "dev", self._local_device, *rate)
        _run("tc", "-n", self.name, "qdisc", "replace", "dev", self._remote_device, *rate)

    def cut(self) -> None:
        """Cut the link, as a pulled cable does."""
        self._ip("link", "set", self._remote_device, "down")

    def deaf(self) -> None:
        """Drop all packets to the second host silently; its own packets still arrive."""
        to = ["lladdr", _NOBODY, "dev", self._local_device, "nud", "permanent"]
        _ip("neigh", "replace", self.remote_address, *to)

    def mute(self) -> None:
        """Drop all packets from the second host silently; packets to it still arrive."""
        to = ["lladdr", _NOBODY, "dev", self._remote_device, "nud", "permanent"]
        self._ip("neigh", "replace", self.local_address, *to)

    def whole(self) -> None:
        """Restore the link."""
        self._ip("link", "set", self._remote_device, "up")
        for prefix, device, address in (
            ([], self._local_device, self.remote_address),
            (["-n", self.name], self._remote_device, self.local_address),
        ):
            for command in (
                ["tc", *prefix, "qdisc", "del", "dev", device, "root"],
                ["ip", *prefix, "neigh", "del", address, "dev", device],
            ):
                subprocess.run(command, check=False, capture_output=True)

    def _stop(self, signal_number: signal.Signals) -> None:
        served, self._served = self._served, []
        for server in served:
            server.process.send_signal(signal_number)
        for server in served:
            server.wait()

    def _ip(self, *command: str) -> None:
        _ip("-n", self.name, *command)


class _ServeProcess:
    """One `maskserve serve` process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._lines = list[str]()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_ready(self) -> None:
        if not self._ready.wait(_READY_S) or self.process.poll() is not None:
            raise RuntimeError("\n".join(self._lines[-20:]))

    def wait(self) -> None:
        """Wait until it has ended."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.rstrip())
            if line.startswith(_READY):
                self._ready.set()
        self._ready.set()  # the process has ended


@contextmanager
def second_host() -> Iterator[SecondHost]:
    """Make a second host with a working link and no servers; others on this machine have other
    addresses.

    Raises:
        RuntimeError: this process may not make one, or there are too many.
    """
    host = _claim_host()
    try:
        host.make()
        yield host
    finally:
        host.remove()


def _claim_host() -> SecondHost:
    for number in range(os.getpid(), os.getpid() + _NETWORKS):
        host = SecondHost(number % _NETWORKS)
        if host.claim():
            return host
    raise RuntimeError(f"there are {_NETWORKS} second hosts already")


def _ip(*command: str) -> None:
    _run("ip", *command)


def _run(*command: str) -> None:
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {process.stderr.strip()}")
