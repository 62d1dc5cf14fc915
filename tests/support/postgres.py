"""The machine's own PostgreSQL server, if it is installed (Debian: `apt install postgresql`)."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = "postgres"
"""The user that runs it if this process is root, which PostgreSQL refuses."""


def find_postgres() -> Path | None:
    """The folder of its programs; None: it is not installed."""
    glob = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    return glob[-1].parent if glob else Path(on_path).parent if on_path else None


@contextmanager
def postgres(programs: Path) -> Iterator[str]:
    """Run a server with an empty database and give its URL. It listens at a socket in its own
    folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="maskserve-postgres-", dir="/tmp"))
    user = _NOBODY if os.geteuid() == 0 else None
    if user is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    data = folder / "data"
    quiet = {"stdout": subprocess.DEVNULL, "user": user, "cwd": folder}
    initdb = [programs / "initdb", "-D", data, "-U", "jobs", "-A", "trust", "--no-sync"]
    control = [programs / "pg_ctl", "-D", data, "-w"]
    settings = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    try:
        subprocess.run(initdb, check=True, **quiet)
        log = folder / "log"
        subprocess.run([*control, "-l", log, "-o", settings, "start"], check=True, **quiet)
        try:
            yield f"postgresql+psycopg://jobs@/postgres?host={folder}"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=True, **quiet)
    finally:
        shutil.rmtree(folder)


def stop(programs: Path, url: str) -> None:
    """Stop a server as abruptly as a lost host would."""
    _control(programs, url, "-m", "immediate", "stop")


def start(programs: Path, url: str) -> None:
    """Start a stopped server again with its data."""
    folder = url.rpartition("=")[2]
    settings = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
    _control(programs, url, "-l", f"{folder}/log", "-o", settings, "start")


def _control(programs: Path, url: str, *words: str) -> None:
    folder = Path(url.rpartition("=")[2])
    command = [programs / "pg_ctl", "-D", folder / "data", "-w", *words]
    user = _NOBODY if os.geteuid() == 0 else None
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, user=user, cwd=folder)
