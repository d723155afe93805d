"""Processes with networks of their own: what each one sees, and that nothing of them stays."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.namespaces import host_network, needs_namespaces
from levanter_diloco.network import namespaces
from levanter_diloco.network.namespaces import address, obstacle, run_apart, run_together

LOOK = """
import json, socket, subprocess
addresses = json.loads(subprocess.check_output(["ip", "-j", "addr", "show", "dev", "eth0"]))[0]["addr_info"]
own = [found["local"] for found in addresses if found["family"] == "inet"]
names = [name for _, name in socket.if_nameindex()]
print(json.dumps([own, socket.gethostbyname(socket.gethostname()), names]), flush=True)
"""

MEET = """
import socket, sys
if sys.argv[1] == "listen":
    with socket.create_server(("", 5000)) as server, server.accept()[0] as peer:
        sys.exit(peer.recv(1)[0])
while True:
    try:
        socket.create_connection(("10.213.77.1", 5000)).send(bytes([7]))
        sys.exit(0)
    except OSError:
        pass
"""

RUN = """
import json, os, sys
from levanter_diloco.network.namespaces import run_apart
sys.exit(run_apart({}, os.environ))
"""


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


@needs_namespaces
def test_each_process_has_an_address_to_which_its_name_leads(tmp_path: Path):
    with (tmp_path / "out").open("a+") as out:
        assert run_apart([python(LOOK)] * 3, os.environ, out) == 0
        out.seek(0)
        seen = sorted(json.loads(line) for line in out)
    assert seen == [[[address(i)], address(i), ["lo", "eth0"]] for i in range(3)]


@needs_namespaces
def test_processes_reach_each_other():
    assert run_apart([python(MEET, "listen"), python(MEET, "call")], os.environ) == 7


@pytest.mark.parametrize("run", [run_together, pytest.param(run_apart, marks=needs_namespaces)])
def test_first_failure_ends_the_others(run):
    assert run([["sleep", "600"], ["sh", "-c", "exit 5"]], os.environ) == 5
    assert run([["true"], ["true"]], os.environ) == 0


@needs_namespaces
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_when_the_caller_dies(how: signal.Signals):
    before = host_network()
    shape = "tc qdisc replace dev eth0 root tbf rate 1mbit burst 72kb latency 50ms; echo up; sleep 600"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    caller = subprocess.Popen(python(RUN.format([["sh", "-c", shape]] * 2)), start_new_session=True, **pipes)
    assert caller.stdout is not None
    assert [caller.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    assert host_network() == before  # all of it is out of the host's sight
    if how == signal.SIGINT:
        os.killpg(caller.pid, how)  # as a terminal does
    else:
        caller.send_signal(how)
    caller.stdout.read()  # ends when the last process that holds the pipe has ended
    assert caller.wait(30) != 0
    assert host_network() == before


def test_obstacles_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert obstacle() == "network namespaces need root; sudo gives that"
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert obstacle() == "`ip` is not on PATH; the packages iproute2 and util-linux bring it"
    for name in ("ip", "unshare", "mount"):
        (tmp_path / name).symlink_to("/bin/true")
    (tmp_path / "setpriv").write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n")
    (tmp_path / "setpriv").chmod(0o755)
    assert obstacle("tc") == "`tc` is not on PATH; the packages iproute2 and util-linux bring it"
    assert obstacle() == "no namespaces on this machine: unshare failed: Operation not permitted"
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert obstacle() == "network namespaces are Linux's, and this is darwin"
