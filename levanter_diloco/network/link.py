"""Traffic shaping, to train over a slow link: `tc` holds back what this host sends, for as long as the run lasts."""

import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import PATH, OptionError, option_error

HANDLE = "d10c:"
"""Of our qdisc, so that one that a killed host has left behind is known as ours and replaced."""

RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
SIZE_UNITS = {"b": 1.0, "k": 2.0**10, "kb": 2.0**10, "m": 2.0**20, "mb": 2.0**20, "g": 2.0**30, "gb": 2.0**30}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

_BURST_SECONDS = 0.005
_LEAST_BURST = 72 * 1024
_ETHERNET_HEADER = 14

# It outlives the run, whatever ends that, and takes away our qdisc and no other. See `shaped`.
_GUARD = f'trap "" TERM INT HUP; read -r _; exec tc qdisc del dev "$1" root handle {HANDLE}'

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkConfig:
    """The link that each host of the run pretends to have: `trainer.diloco.link`. Linux, as root."""

    rate: str = ""
    """What the host may send a second, as `tc` writes it: 50mbit, 1gbit; at least 8kbit. Must be given."""

    burst: str | None = None
    """What may be sent at full speed after a pause: 72kb, 1mb (`kb` is 1024 bytes, as in `tc`). A burst of the size of
    a fragment would hide the link; one below a packet (64 KiB on `lo`) would let nothing through. Unset:
    max(rate x 5 ms, 72 KiB)."""

    latency: str = "50ms"
    """How long a packet may wait before packets are dropped: us, ms or s, above 0. The default is MaxText's."""

    interface: str | None = None
    """The interface that is shaped: all that leaves through it, data and checkpoints too. Unset: that of the default
    route."""

    def __post_init__(self) -> None:
        if not quantity(self.rate, RATE_UNITS) >= 8e3:  # slower, tbf's own clock overflows
            rule = f"be at least 8kbit, in {' '.join(RATE_UNITS)} a second"
            raise option_error("link.rate", self.rate, rule, "50mbit")
        if self.burst is not None and math.isnan(quantity(self.burst, SIZE_UNITS)):
            raise option_error("link.burst", self.burst, f"be a size above 0, in {' '.join(SIZE_UNITS)}", "72kb")
        if math.isnan(quantity(self.latency, TIME_UNITS)):
            raise option_error("link.latency", self.latency, f"be a time above 0, in {' '.join(TIME_UNITS)}", "50ms")

    @property
    def bits_per_second(self) -> int:
        return round(quantity(self.rate, RATE_UNITS))

    @property
    def burst_bytes(self) -> int:
        """`burst`, by default `max(rate * 5 ms, 72 KiB)`.

        A burst crosses at full speed, so one of the size of a fragment hides the link: 5 ms of traffic is enough
        for the kernel's timer to keep the rate. tbf drops what is larger than the burst: on `lo` that is a packet
        of 64 KiB, elsewhere 72 KiB are 49 packets of an MTU of 1500.
        """
        if self.burst is not None:
            return round(quantity(self.burst, SIZE_UNITS))
        return max(round(self.bits_per_second / 8 * _BURST_SECONDS), _LEAST_BURST)


def quantity(text: str, units: Mapping[str, float]) -> float:
    """Reads a number and its unit (the first of `units` may be left out); NaN where it is none above 0."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    try:
        value = float(found[1]) * units[found[2] or next(iter(units))] if found else math.nan
    except (KeyError, ValueError):
        return math.nan
    return value if 0 < value < math.inf else math.nan


@contextmanager
def shaped(link: LinkConfig | None) -> Generator[None]:
    """Shapes what this host sends for as long as the context lasts; with None it does nothing.

    A guard, a process of its own, waits for a line or for the end of this process, then takes the shaping away:
    a run that is killed or aborts leaves nothing behind. On SIGTERM this process waits for the guard, then lets
    the signal do what it did before.

    Raises:
        OptionError: If the host cannot be shaped, or `tc` does not show what it was asked for.
    """
    if link is None:
        yield
        return
    interface = _interface(link)
    _refuse_foreign(link, interface)
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, "link", interface],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is not for the guard
    )
    previous = signal.getsignal(signal.SIGTERM)

    def free() -> None:
        if guard.returncode is None:
            guard.communicate(b"\n")

    def on_sigterm(number: int, _: object) -> None:
        signal.signal(number, previous)
        free()
        os.kill(os.getpid(), number)

    # None is a handler that Python cannot put back.
    handled = previous not in (signal.SIG_IGN, None)
    if handled:
        signal.signal(signal.SIGTERM, on_sigterm)
    try:
        _shape(link, interface)
        yield
    finally:
        if handled:
            signal.signal(signal.SIGTERM, previous)
        free()
        _warn_if_shaped(link, interface)


def _interface(link: LinkConfig) -> str:
    names = [name for _, name in socket.if_nameindex()]
    name = link.interface
    if name is None:
        routes = json.loads(_output(link, "ip", "-j", "route", "show", "default") or "[]")
        routes += json.loads(_output(link, "ip", "-j", "-6", "route", "show", "default") or "[]")
        name = next((route["dev"] for route in routes if "dev" in route), None)
        if name is None:
            raise option_error("link.interface", None, "be given where there is no default route", " or ".join(names))
    if name not in names:
        raise option_error("link.interface", name, "be an interface of this host", " or ".join(names))
    return name


def _refuse_foreign(link: LinkConfig, interface: str) -> None:
    qdisc = _root_qdisc(link, interface)
    # Handle 0 is the kernel's own default, of whatever kind: it comes back when ours goes.
    if qdisc.get("handle", "0:") != "0:" and not _is_ours(qdisc):
        raise OptionError(
            f"{PATH}.link.interface ({interface}) has the qdisc {qdisc['kind']} {qdisc['handle']} at its root, "
            f"which is not ours to replace; name another interface or leave {PATH}.link out."
        )


def _shape(link: LinkConfig, interface: str) -> None:
    """Sets the qdisc and reads it back."""
    rate, burst = link.bits_per_second, link.burst_bytes
    latency = max(round(quantity(link.latency, TIME_UNITS) * 1e6), 1)
    limits = ["rate", f"{rate}bit", "burst", f"{burst}b", "latency", f"{latency}us"]
    _output(link, "tc", "qdisc", "replace", "dev", interface, "root", "handle", HANDLE, "tbf", *limits)
    qdisc = _root_qdisc(link, interface)
    found = qdisc.get("options", {})
    # The kernel counts bytes, and bursts in ticks of its clock.
    same_burst = math.isclose(found.get("burst", 0), burst, rel_tol=0.05)
    if not _is_ours(qdisc) or abs(found.get("rate", 0) - rate / 8) > 1 or not same_burst:
        raise _failure(link, f"asked for tbf {' '.join(limits)}, tc shows {json.dumps(qdisc)}")
    # tbf drops what is larger than its burst: with too small a one nothing would pass, and the run would hang.
    (device,) = json.loads(_output(link, "ip", "-j", "link", "show", "dev", interface))
    packet = device["mtu"] + _ETHERNET_HEADER
    if found["burst"] < packet:
        rule = f"let a whole packet through, {packet} bytes on {interface}"
        raise option_error("link.burst", link.burst, rule, "72kb")


def _warn_if_shaped(link: LinkConfig, interface: str) -> None:
    """Only warns: the run is over, and may be ending with an exception of its own."""
    try:
        still = _is_ours(_root_qdisc(link, interface))
    except OptionError:
        return
    if still:
        _logger.warning("%s is still shaped; `tc qdisc del dev %s root` takes that away.", interface, interface)


def _root_qdisc(link: LinkConfig, interface: str) -> dict[str, Any]:  # Any: as tc prints it
    shown = _output(link, "tc", "-j", "qdisc", "show", "dev", interface)
    try:
        return next((qdisc for qdisc in json.loads(shown or "[]") if qdisc.get("root")), {})
    except ValueError:
        raise _failure(link, f"`tc -j qdisc show` cannot be read: {shown.strip()}") from None


def _is_ours(qdisc: Mapping[str, Any]) -> bool:  # Any: as tc prints it
    return (qdisc.get("kind"), qdisc.get("handle")) == ("tbf", HANDLE)


def _output(link: LinkConfig, *command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise _failure(link, f"`{command[0]}` does not run ({error.strerror}); it comes with iproute2") from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.split()) or f"it exits with {done.returncode}"
        raise _failure(
            link, f"`{' '.join(command)}` fails ({reason}); it needs root or CAP_NET_ADMIN, and tbf in the kernel"
        )
    return done.stdout


def _failure(link: LinkConfig, reason: str) -> OptionError:
    return OptionError(
        f"{PATH}.link.rate ({link.rate}) is not in effect: {reason}. Without {PATH}.link the run works."
    )
