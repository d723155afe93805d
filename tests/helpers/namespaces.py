"""Whether this machine has network namespaces, and what its own network looks like."""

import subprocess
from pathlib import Path

import pytest

from levanter_diloco.network.namespaces import obstacle

needs_namespaces = pytest.mark.skipif(obstacle("tc") is not None, reason=f"no namespaces here: {obstacle('tc')}")


def host_network() -> list[str]:
    """What the host's network and mounts look like."""
    commands = ("ip -o link", "ip netns", "tc qdisc", "findmnt -rn -o TARGET")
    shown = [subprocess.run(command.split(), capture_output=True, text=True).stdout for command in commands]
    return [*shown, str(Path("/etc/netns").exists()), Path("/etc/hosts").read_text()]
