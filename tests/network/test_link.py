"""The slow link: options by hand, a stand-in `tc` for what fails, and the real one in namespaces of the tests' own."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.command_runs import MODULE, STREAMING, Workplace
from levanter_diloco.errors import OptionError
from levanter_diloco.network.link import HANDLE, LinkConfig, shaped

NO_KERNEL = [os.geteuid() != 0, not shutil.which("ip"), not shutil.which("tc")]
real = pytest.mark.skipif(any(NO_KERNEL), reason="needs root, ip and tc")

HERE = f"lk{os.getpid()}"
DEFAULTS = ("noqueue", "pfifo_fast", "fq_codel", "mq", "noop")
_numbers = itertools.count()


@pytest.mark.parametrize(
    ("rate", "bits"), [("50mbit", 50_000_000), ("1gbit", 10**9), ("200kbit", 200_000), ("2.5 Gbit", 2_500_000_000)]
)
def test_rate_is_read_as_tc_writes_it(rate: str, bits: int):
    assert LinkConfig(rate).bits_per_second == bits


def test_burst_by_hand():
    # 50 Mbit/s for 5 ms are 31250 bytes, below the 72 KiB that lo needs; 1 Gbit/s for 5 ms are 625000.
    assert LinkConfig("50mbit").burst_bytes == 73728
    assert LinkConfig("1gbit").burst_bytes == 625_000
    assert LinkConfig("50mbit", burst="10mb").burst_bytes == 10 * 1024 * 1024
    assert LinkConfig("50mbit", burst="256kb").burst_bytes == 262_144
    assert LinkConfig("50mbit", burst="4000").burst_bytes == 4000


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "trainer.diloco.link.rate () must be at least 8kbit, in bit kbit mbit gbit tbit a second; 50mbit works."),
        ({"rate": "fast"}, "trainer.diloco.link.rate (fast) must be at least 8kbit"),
        ({"rate": "50mbps"}, "trainer.diloco.link.rate (50mbps) must be at least 8kbit"),
        ({"rate": "1kbit"}, "trainer.diloco.link.rate (1kbit) must be at least 8kbit"),
        ({"rate": "-1mbit"}, "trainer.diloco.link.rate (-1mbit) must be at least 8kbit"),
        ({"burst": "1mbit"}, "link.burst (1mbit) must be a size above 0, in b k kb m mb g gb; 72kb works."),
        ({"burst": "0"}, "trainer.diloco.link.burst (0) must be a size above 0"),
        ({"latency": "0ms"}, "trainer.diloco.link.latency (0ms) must be a time above 0, in us ms s; 50ms works."),
        ({"latency": "1h"}, "trainer.diloco.link.latency (1h) must be a time above 0"),
    ],
)
def test_options_are_refused(options: dict[str, str], sentence: str):
    with pytest.raises(OptionError, match=re.escape(sentence)):
        LinkConfig(**({"rate": "50mbit"} if options else {}) | options)


def test_no_link_touches_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    before = signal.getsignal(signal.SIGTERM)
    with shaped(None):
        assert signal.getsignal(signal.SIGTERM) is before


# A stand-in for tc: it shows what `shows` holds, and does nothing else, or fails with what `says` holds.

STAND_IN = """#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in
  *show*) cat "$0.shows" ;;
  *) cat "$0.says" >&2; test ! -s "$0.says" || exit 2 ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a `tc` on the path that shows one qdisc and, if it says something, fails; returns the file of its log."""

    def stand_in(qdisc: dict[str, Any], says: str = "") -> Path:
        tc = tmp_path / "tc"
        tc.write_text(STAND_IN)
        tc.chmod(0o755)
        Path(f"{tc}.shows").write_text(json.dumps([{"root": True, **qdisc}]))
        Path(f"{tc}.says").write_text(says)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return Path(f"{tc}.log")

    return stand_in


def refusal(link: LinkConfig) -> str:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OptionError) as refused, shaped(link):
        pytest.fail("the run started")
    assert signal.getsignal(signal.SIGTERM) is before
    (line,) = str(refused.value).splitlines()
    return line


def test_no_privilege_stops_the_run(stand_in: Any):
    stand_in({"kind": "noqueue", "handle": "0:"}, says="RTNETLINK answers: Operation not permitted\n")
    line = refusal(LinkConfig("50mbit", interface="lo"))
    assert line.startswith("trainer.diloco.link.rate (50mbit) is not in effect: `tc qdisc replace dev lo root")
    assert "(RTNETLINK answers: Operation not permitted); it needs root or CAP_NET_ADMIN" in line


def test_a_shaping_that_does_not_show_stops_the_run(stand_in: Any):
    log = stand_in({"kind": "noqueue", "handle": "0:"})
    line = refusal(LinkConfig("50mbit", interface="lo"))
    asked = "tbf rate 50000000bit burst 73728b latency 50000us"
    assert line.startswith(f"trainer.diloco.link.rate (50mbit) is not in effect: asked for {asked}, tc shows {{")
    assert f"qdisc replace dev lo root handle {HANDLE} {asked}\n" in log.read_text()
    assert f"qdisc del dev lo root handle {HANDLE}\n" in log.read_text()


@pytest.mark.parametrize("options", [{"rate": 6_000_000, "burst": 73728}, {"rate": 6_250_000, "burst": 9000}])
def test_another_rate_or_burst_stops_the_run(stand_in: Any, options: dict[str, int]):
    stand_in({"kind": "tbf", "handle": HANDLE, "options": options})
    assert "is not in effect: asked for tbf rate 50000000bit" in refusal(LinkConfig("50mbit", interface="lo"))


def test_output_that_is_not_json_stops_the_run(stand_in: Any):
    log = stand_in({})
    log.with_name("tc.shows").write_text("qdisc noqueue 0: dev lo root\n")
    assert "`tc -j qdisc show` cannot be read: qdisc noqueue" in refusal(LinkConfig("50mbit", interface="lo"))


def test_a_shaping_that_stays_is_said(stand_in: Any, caplog: pytest.LogCaptureFixture):
    # The stand-in shows it still after it was asked to take it away.
    stand_in({"kind": "tbf", "handle": HANDLE, "options": {"rate": 6_250_000, "burst": 73728}})
    with pytest.raises(KeyError), shaped(LinkConfig("50mbit", interface="lo")):
        raise KeyError("of the run")
    assert "lo is still shaped; `tc qdisc del dev lo root` takes that away." in caplog.text


def test_no_tc_stops_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = refusal(LinkConfig("50mbit", interface="lo"))
    assert "(50mbit) is not in effect: `tc` does not run (No such file or directory)" in line


def test_an_unknown_interface_is_refused_with_the_known_ones():
    line = refusal(LinkConfig("50mbit", interface="nope"))
    assert line.startswith("trainer.diloco.link.interface (nope) must be an interface of this host; ")
    assert "lo" in line


# The real thing, in namespaces that the tests make.

INSIDE = """
import os, signal, sys, time
from levanter_diloco.network.link import LinkConfig, shaped
how, options = sys.argv[1], dict(word.split("=") for word in sys.argv[2:])
def graceful(*_):
    print("graceful", flush=True)
    sys.exit(7)
if how == "graceful":
    signal.signal(signal.SIGTERM, graceful)
with shaped(LinkConfig(**options)):
    print("shaped", flush=True)
    if how == "raise":
        raise RuntimeError("as asked")
    if how == "leave":
        sys.stdin.readline()
    if how in ("wait", "graceful"):
        time.sleep(60)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
print("done", flush=True)
"""


def sh(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


class Namespace(SimpleNamespace):
    """A network namespace with an interface `v` that leads to another one."""

    name: str

    def run(self, command: str) -> str:
        return sh(f"ip netns exec {self.name} {command}")

    def root(self, interface: str = "v") -> dict[str, Any]:
        shown = json.loads(self.run(f"tc -j qdisc show dev {interface}"))
        return next(qdisc for qdisc in shown if qdisc.get("root"))

    def start(self, how: str, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, "-c", INSIDE, how, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def started(self, how: str, *options: str) -> subprocess.Popen[str]:
        process = self.start(how, *options)
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "shaped\n", process.stderr.read()
        return process


@pytest.fixture
def namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces joined by a veth pair, `v` at both ends; the default route of each leads to the other."""
    number = next(_numbers)
    pair = Namespace(name=f"{HERE}-{number}a"), Namespace(name=f"{HERE}-{number}b")
    try:
        for namespace in pair:
            sh(f"ip netns add {namespace.name}")
        pair[0].run(f"ip link add v type veth peer name v netns {pair[1].name}")
        for end, namespace in enumerate(pair):
            namespace.run(f"ip addr add 10.77.0.{end + 1}/24 dev v")
            namespace.run("ip link set lo up")
            namespace.run("ip link set v up")
            namespace.run(f"ip route add default via 10.77.0.{2 - end}")
        yield pair
    finally:
        for namespace in pair:
            subprocess.run(["ip", "netns", "del", namespace.name], capture_output=True)


@pytest.fixture
def here(namespaces: tuple[Namespace, Namespace]) -> Namespace:
    return namespaces[0]


@real
def test_real_link_is_shaped_and_freed(here: Namespace):
    before = here.root()
    assert before["kind"] in DEFAULTS
    run = here.started("leave", "rate=50mbit")
    shown = here.root()
    assert (shown["kind"], shown["handle"]) == ("tbf", HANDLE)
    assert shown["options"]["rate"] == 6_250_000  # bytes
    assert shown["options"]["burst"] == pytest.approx(73728, rel=0.01)
    assert shown["options"]["lat"] == pytest.approx(50_000, rel=0.01)
    out, errors = run.communicate("\n", timeout=30)
    assert (run.returncode, out, errors) == (0, "done\n", "")
    after = here.root()
    assert (after["kind"], after["handle"]) == (before["kind"], "0:")


@real
def test_real_link_is_freed_after_an_exception(here: Namespace):
    run = here.start("raise", "rate=50mbit")
    _, errors = run.communicate(timeout=30)
    assert run.returncode == 1 and "RuntimeError: as asked" in errors
    assert here.root()["kind"] in DEFAULTS


@real
def test_real_link_is_freed_on_sigterm_which_still_kills(here: Namespace):
    run = here.started("wait", "rate=50mbit")
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == -signal.SIGTERM
    assert here.root()["kind"] in DEFAULTS


@real
def test_real_link_is_freed_before_the_handler_that_was_there(here: Namespace):
    run = here.started("graceful", "rate=50mbit")
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=30)
    assert (run.returncode, out) == (7, "graceful\n")
    assert here.root()["kind"] in DEFAULTS


@real
def test_real_link_is_freed_after_a_kill(here: Namespace):
    run = here.started("wait", "rate=50mbit")
    run.kill()
    assert run.wait(30) == -signal.SIGKILL
    until = time.monotonic() + 20  # by the guard, which outlives the run
    while here.root()["kind"] == "tbf" and time.monotonic() < until:
        time.sleep(0.05)
    assert here.root()["kind"] in DEFAULTS


@real
@pytest.mark.parametrize(
    "foreign", ["htb", "handle 7: tbf rate 1mbit burst 64kb latency 50ms", f"handle {HANDLE} pfifo"]
)
def test_real_qdisc_that_is_not_ours_is_refused_and_left_alone(here: Namespace, foreign: str):
    here.run(f"tc qdisc add dev v root {foreign}")
    before = here.root()
    run = here.start("leave", "rate=50mbit")
    _, errors = run.communicate("\n", timeout=30)
    kind = before["kind"]
    assert run.returncode == 1
    assert f"trainer.diloco.link.interface (v) has the qdisc {kind} {before['handle']} at its root" in errors
    after = here.root()
    assert (after["kind"], after["handle"]) == (kind, before["handle"])  # its options count packets
    assert after["options"].get("rate") == before["options"].get("rate")


@real
def test_real_qdisc_that_took_the_place_of_ours_is_left_alone(here: Namespace):
    run = here.started("leave", "rate=50mbit")
    here.run("tc qdisc replace dev v root handle 9: pfifo")
    out, errors = run.communicate("\n", timeout=30)
    assert (run.returncode, out, errors) == (0, "done\n", "")
    assert (here.root()["kind"], here.root()["handle"]) == ("pfifo", "9:")


@real
def test_real_leftover_of_ours_is_replaced(here: Namespace):
    here.run(f"tc qdisc add dev v root handle {HANDLE} tbf rate 1mbit burst 64kb latency 50ms")
    run = here.started("leave", "rate=200kbit", "interface=v")
    assert here.root()["options"]["rate"] == 25_000
    run.communicate("\n", timeout=30)
    assert run.returncode == 0
    assert here.root()["kind"] in DEFAULTS


@real
@pytest.mark.parametrize("rate", ["8kbit", "10gbit", "400gbit"])
def test_real_tc_takes_rates_far_apart(here: Namespace, rate: str):
    run = here.start("pass", f"rate={rate}")
    out, errors = run.communicate(timeout=30)
    assert (out, errors) == ("shaped\ndone\n", "")


@real
def test_real_default_interface_is_that_of_the_default_route(here: Namespace):
    here.run("ip route del default")
    run = here.start("leave", "rate=50mbit")
    _, errors = run.communicate("\n", timeout=30)
    assert "trainer.diloco.link.interface (None) must be given where there is no default route; lo or v " in errors


@real
def test_real_burst_below_a_packet_is_refused(here: Namespace):
    # An MTU of 65536 and 14 bytes of header: what is larger than the burst never passes.
    run = here.start("leave", "rate=50mbit", "burst=32kb", "interface=lo")
    _, errors = run.communicate("\n", timeout=30)
    assert "link.burst (32kb) must let a whole packet through, 65550 bytes on lo; 72kb works." in errors
    assert here.root("lo")["kind"] == "noqueue"


@real
def test_real_lack_of_privilege_stops_the_run(here: Namespace):
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv")
    unprivileged = "setpriv --bounding-set -net_admin --inh-caps -net_admin"
    done = subprocess.run(
        [*f"ip netns exec {here.name} {unprivileged} {sys.executable} -c".split(), INSIDE, "leave", "rate=50mbit"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "Operation not permitted); it needs root or CAP_NET_ADMIN" in done.stderr
    assert here.root()["kind"] in DEFAULTS


RECEIVE = """
import socket, sys
server = socket.create_server(("10.77.0.2", 7000))
print("listening", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
connection.sendall(b"!")
"""

SEND = """
import socket, subprocess
from levanter_diloco.network.link import LinkConfig, shaped
with shaped(LinkConfig("10mbit")), socket.create_connection(("10.77.0.2", 7000)) as connection:
    connection.sendall(bytes(2_000_000))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b"!"
    print(subprocess.check_output(["tc", "-s", "-j", "qdisc", "show", "dev", "v"], text=True))
"""


@real
def test_real_traffic_waits_for_the_rate(namespaces: tuple[Namespace, Namespace]):
    # The kernel's own counts, as a busy machine's clock proves nothing: all 2 MB went through the bucket of
    # 10 Mbit/s (1.25 MB/s), and packets had to wait there for tokens ("overlimits"); without a shape none would.
    here, there = namespaces
    receiver = subprocess.Popen(
        ["ip", "netns", "exec", there.name, sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout and receiver.stdout.readline() == "listening\n"
    done = subprocess.run(
        ["ip", "netns", "exec", here.name, sys.executable, "-c", SEND], capture_output=True, text=True, timeout=60
    )
    receiver.wait(30)
    assert done.returncode == 0, done.stderr
    (bucket,) = (qdisc for qdisc in json.loads(done.stdout) if qdisc["kind"] == "tbf")
    assert bucket["options"]["rate"] == 1_250_000
    assert bucket["bytes"] > 2_000_000
    assert bucket["overlimits"] > 0


# Through the command, as a user does.


@pytest.mark.entry
@pytest.mark.slow
def test_command_refuses_a_link_before_anything_else(workplace: Workplace):
    config = workplace.config("link_refused", {"link": {"rate": "50mbit", "interface": "nope"}})
    done = workplace.run(MODULE, config)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("levanter-diloco: ")]
    assert done.returncode == 2
    assert line.startswith("levanter-diloco: trainer.diloco.link.interface (nope) must be an interface of this host; ")
    assert "Traceback" not in done.stderr and not (config.parent / "metrics.jsonl").exists()


@real
@pytest.mark.entry
@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_command_trains_on_a_real_link_and_frees_it(workplace: Workplace, here: Namespace, enabled: bool):
    diloco = {**STREAMING, "enabled": enabled, "link": {"rate": "50mbit"}}
    changes = {"trainer__num_train_steps": 2, "trainer__steps_per_eval": 2, "trainer__max_eval_batches": 1}
    config = workplace.config(f"link_{enabled}", diloco, **changes)
    run = workplace.start(config, program=("ip", "netns", "exec", here.name, *MODULE))
    shapes = []
    while run.poll() is None:
        shapes.append(here.root()["kind"])
        time.sleep(0.2)
    assert run.returncode == 0, (config.parent / "stderr.txt").read_text()[-3000:]
    assert "tbf" in shapes
    assert here.root()["kind"] in DEFAULTS
