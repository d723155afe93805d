"""Network namespaces: processes that each have a network of their own, joined by a bridge.

Linux, as root; needs nothing installed.

The network, mounts and process ids of all of them lie in namespaces of one enclosure, apart from the host's: nothing
of the host is touched, and when the caller ends, however it ends, the kernel ends all that is inside.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

INTERFACE = "eth0"
"""Of each process, the only one besides `lo`."""

_SUBNET = "10.213.77"

# `ip netns` keeps its names in /run: on a file system of the enclosure's own they go with it.
_ENCLOSE = (
    *("setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child", "--fork", "--pid", "--mount-proc", "--net"),
    *("sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh"),
)
_WITH_HOSTS = ("sh", "-c", 'mount --bind "$1" /etc/hosts && shift && exec "$@"', "sh")


def address(process: int) -> str:
    """The IPv4 address of process number `process`, from 0."""
    return f"{_SUBNET}.{process + 1}"


def obstacle(*tools: str) -> str | None:
    """What stands in the way of `run_apart` on this machine, in words; None if nothing does.

    Args:
        tools: Programs that the caller needs besides.
    """
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root; sudo gives that"
    for tool in ("ip", "setpriv", "unshare", "mount", *tools):
        if shutil.which(tool) is None:
            return f"`{tool}` is not on PATH; the packages iproute2 and util-linux bring it"
    done = subprocess.run([*_ENCLOSE, "ip", "netns", "add", "probe"], capture_output=True, text=True)
    return f"no namespaces on this machine: {' '.join(done.stderr.split())}" if done.returncode != 0 else None


def run_apart(commands: Sequence[Sequence[str]], environment: Mapping[str, str], output: IO | None = None) -> int:
    """Runs all commands at once, each in a namespace of its own, and returns like `run_together`.

    Process i has the address `address(i)` on `INTERFACE`, and its host's name leads there: gloo binds to that.

    Args:
        commands: The command line of each process.
        environment: Of all of them.
        output: Takes what they print; by default it goes where the caller's does.
    """
    inside = [*_ENCLOSE, sys.executable, "-P", __file__, json.dumps(list(map(list, commands)))]
    running = subprocess.Popen(inside, env=dict(environment), stdout=output, stderr=output)
    try:
        return running.wait()
    except KeyboardInterrupt:  # the processes have had it too
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(10)
        raise
    finally:
        running.kill()
        running.wait()


def run_together(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> int:
    """Runs all commands at once; the first failure ends the others. Returns the first status that is not 0."""
    running = [subprocess.Popen(command, env=dict(environment)) for command in commands]
    try:
        while True:
            codes = [process.poll() for process in running]
            if None not in codes or any(codes):
                return next((code for code in codes if code), 0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running[codes.index(None)].wait(0.5)
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _join(count: int) -> None:
    """Makes the namespaces `0`, `1` and so on, joined by a bridge."""
    _ip("link", "add", "bridge", "type", "bridge")
    _ip("link", "set", "bridge", "up")
    for i in range(count):
        name, port = str(i), f"port{i}"
        _ip("netns", "add", name)
        _ip("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _ip("link", "set", port, "master", "bridge", "up")
        _ip("-n", name, "addr", "add", f"{address(i)}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _ip("-n", name, "link", "set", device, "up")
        _hosts(i).write_text(f"127.0.0.1 localhost\n{address(i)} {socket.gethostname()}\n")


def _enter(process: int) -> list[str]:
    # `ip netns exec` has mounts of its own too, so each process sees its own hosts file.
    return ["ip", "netns", "exec", str(process), *_WITH_HOSTS, str(_hosts(process))]


def _hosts(process: int) -> Path:
    return Path(f"/run/hosts{process}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _main() -> int:
    """Runs inside the enclosure, as its first process."""
    commands = json.loads(sys.argv[1])
    try:
        _join(len(commands))
        return run_together([[*_enter(i), *words] for i, words in enumerate(commands)], os.environ)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(_main())
