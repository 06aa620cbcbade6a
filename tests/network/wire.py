"""The switch and the links of a `Network`, and what can be wrong with them.

Machine n is plugged into port `p<n>` of a bridge, which is in a network of its own. What machine a sends to machine b
crosses that bridge, and there rules of nftables (family bridge) drop all of it, ARP included, or a part. Rates: htb at
the port of the receiver, tbf at the interface of the sender. Delays are not the kernel's to make here; see `relay.py`.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from namespaces import inside_network

if TYPE_CHECKING:
    from cluster import Host

BURST = 64 * 1024
QUEUE_S = 0.1
"""How much a limited link holds back before it drops, in seconds at its rate."""
UNLIMITED = 100_000_000_000
WHOLE = 1_000_000


class Wire:
    """The links of a network; faults stay until `heal()`, also beyond a reboot of a machine."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts
        self._switch = 0
        self._machines: dict[int, int] = {}
        self._unplugged: set[int] = set()
        self._losses: dict[tuple[int, int], float] = {}
        self._up: dict[int, int] = {}
        self._down: dict[int, int] = {}
        self._slow: dict[tuple[int, int], int] = {}

    # FailureLedger.

    def unplug(self, *hosts: Host) -> None:
        """Take the cable out: neither side is told more than that the carrier is gone."""
        for host in hosts:
            self._unplugged.add(host.number)
            self._set_port(host.number)

    def plug(self, *hosts: Host) -> None:
        """Put the cable back."""
        for host in hosts:
            self._unplugged.discard(host.number)
            self._set_port(host.number)

    def interface_down(self, host: Host) -> None:
        """Take the machine's own interface down: its programs are told that the network is unreachable."""
        self._run(self._machines[host.number], ["ip", "link", "set", "eth0", "down"])

    def interface_up(self, host: Host) -> None:
        """Take the machine's own interface up again."""
        self._run(self._machines[host.number], ["ip", "link", "set", "eth0", "up"])

    def cut(self, sources: Iterable[Host], targets: Iterable[Host]) -> None:
        """Drop all that sources send to targets; what comes the other way still arrives."""
        self.lose(sources, targets, 1.0)

    def partition(self, one: Iterable[Host], other: Iterable[Host]) -> None:
        """Drop everything between two groups of machines."""
        one, other = list(one), list(other)
        self.cut(one, other)
        self.cut(other, one)

    def lose(self, sources: Iterable[Host], targets: Iterable[Host], fraction: float) -> None:
        """Drop a fraction of the packets that sources send to targets, at random; 0 takes that fault away.

        The kernel's dice have no seed.
        """
        targets = list(targets)
        for source in sources:
            for target in targets:
                self._losses.pop((source.number, target.number), None)
                if fraction > 0 and source is not target:
                    self._losses[source.number, target.number] = fraction
        self._set_rules()

    def limit(self, host: Host, *, up: int | None = None, down: int | None = None) -> None:
        """Limit what a machine sends (up) and receives (down), in bits per second; None is without a limit."""
        self._up.pop(host.number, None)
        self._down.pop(host.number, None)
        if up is not None:
            self._up[host.number] = up
        if down is not None:
            self._down[host.number] = down
        self._set_rates(host.number)

    def slow(self, source: Host, target: Host, rate: int | None) -> None:
        """Limit what one machine sends to one other, in bits per second (IPv4 only); None is without a limit."""
        self._slow.pop((source.number, target.number), None)
        if rate is not None:
            self._slow[source.number, target.number] = rate
        self._set_rates(target.number)

    def heal(self) -> None:
        """Take all faults away."""
        self._losses.clear()
        self._set_rules()
        limited = {*self._up, *self._down, *(target for _, target in self._slow)}
        self._up.clear()
        self._down.clear()
        self._slow.clear()
        for number in limited:
            self._set_rates(number)
        unplugged = sorted(self._unplugged)
        self._unplugged.clear()
        for number in unplugged:
            self._set_port(number)
        for pid in self._machines.values():
            self._run(pid, ["ip", "link", "set", "eth0", "up"])

    def ledger(self) -> list[str]:
        """What is wrong now, as the kernel has it: dropping rules, limits, ports that are down."""
        found = []
        listed = self._run(self._switch, ["nft", "list", "chain", "bridge", "faults", "forward"])
        found += [line.strip() for line in listed.splitlines() if "drop" in line]
        for pid, interface in self._interfaces():
            for line in self._run(pid, ["tc", "qdisc", "show", "dev", interface]).splitlines():
                if "htb" in line or "tbf" in line:
                    found.append(f"{interface}: {line.strip()}")
            link = json.loads(self._run(pid, ["ip", "-j", "link", "show", "dev", interface]))[0]
            if "UP" not in link["flags"]:
                found.append(f"{interface} is down")
        return found

    def dropped(self, source: Host) -> int:
        """How many packets of a machine the rules have dropped since the network began."""
        listed = self._run(self._switch, ["nft", "-j", "list", "counters", "table", "bridge", "faults"])
        counters = [each["counter"] for each in json.loads(listed)["nftables"] if "counter" in each]
        return sum(each["packets"] for each in counters if each["name"] == f"from{source.number}")

    # The network makes these calls.

    def open(self, switch: int) -> None:
        """Make the switch, in the network of this process."""
        self._switch = switch
        # Ports forward at once: without the spanning tree protocol there is nothing to learn first.
        self._batch(switch, ["link add br0 type bridge stp_state 0 forward_delay 0", "link set br0 up"])
        self._set_rules()

    def attach(self, host: Host, machine: int) -> None:
        """Plug a machine in that has just been booted, with the faults that its links have."""
        number, port = host.number, f"p{host.number}"
        self._machines[number] = machine
        # The same hardware address after a reboot; the others would look for the old one for many seconds.
        peer = f"peer name eth0 address 02:4d:45:53:{number >> 8:02x}:{number & 255:02x} netns {machine}"
        self._batch(self._switch, [f"link add {port} type veth {peer}", f"link set {port} master br0"])
        self._batch(
            machine,
            [
                "link set lo up",
                f"address add {host.address}/16 dev eth0",
                f"address add {host.address6}/64 dev eth0 nodad",
                "link set eth0 up",
            ],
        )
        if number in self._up or number in self._down or any(to == number for _, to in self._slow):
            self._set_rates(number)
        self._set_port(number)

    def detach(self, host: Host) -> None:
        """Take a machine off the network; nothing that it still sends arrives."""
        self._machines.pop(host.number)
        self._batch(self._switch, [f"link del p{host.number}"])

    def close(self) -> None:
        """Forget the machines; the kernel takes the links with them."""
        self._switch = 0
        self._machines.clear()

    # How it is done.

    def _set_port(self, number: int) -> None:
        if number in self._machines:
            state = "down" if number in self._unplugged else "up"
            self._batch(self._switch, [f"link set p{number} {state}"])

    def _set_rules(self) -> None:
        # One rule for all that a machine loses in the same way: few rules also where a large network falls apart.
        targets: defaultdict[tuple[int, float], list[int]] = defaultdict(list)
        for (source, target), fraction in self._losses.items():
            targets[source, fraction].append(target)
        lines = [
            "add table bridge faults",
            "add chain bridge faults forward { type filter hook forward priority 0; policy accept; }",
            "flush chain bridge faults forward",
        ]
        lines += [f"add counter bridge faults from{source}" for source in sorted({key[0] for key in targets})]
        for (source, fraction), to in sorted(targets.items()):
            ports = ", ".join(f'"p{target}"' for target in sorted(to))
            dice = f"numgen random mod {WHOLE} < {round(fraction * WHOLE)} " if fraction < 1 else ""
            rule = f'iifname "p{source}" oifname {{ {ports} }} {dice}counter name "from{source}" drop'
            lines.append(f"add rule bridge faults forward {rule}")
        # All or nothing, at one moment.
        self._run(self._switch, ["nft", "-f", "-"], "\n".join(lines) + "\n")

    def _set_rates(self, number: int) -> None:
        if number not in self._machines:
            return
        self._clear_rates(self._machines[number], "eth0")
        self._clear_rates(self._switch, f"p{number}")
        if number in self._up:
            rate = self._up[number]
            self._run(
                self._machines[number],
                ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{rate}bit", "burst", f"{BURST}",
                 "latency", f"{QUEUE_S * 1000:g}ms"],
            )  # fmt: skip
        slow = {source: rate for (source, target), rate in self._slow.items() if target == number}
        if not slow and number not in self._down:
            return
        down = self._down.get(number, UNLIMITED)
        port = f"dev p{number}"
        lines = [f"qdisc add {port} root handle 1: htb default 1", *_htb_class(port, "1:", "1:fff", down)]
        lines += [*_htb_class(port, "1:fff", "1:1", down), _queue(port, 1, down)]
        for source, rate in slow.items():
            minor = source + 2
            lines += _htb_class(port, "1:fff", f"1:{minor:x}", min(rate, down))
            lines += [_queue(port, minor, min(rate, down))]
            address = self._hosts[source].address
            lines += [
                f"filter add {port} parent 1: protocol ip prio 1 u32 match ip src {address}/32 flowid 1:{minor:x}"
            ]
        self._run(self._switch, ["tc", "-batch", "-"], "\n".join(lines) + "\n")

    def _clear_rates(self, pid: int, interface: str) -> None:
        listed = self._run(pid, ["tc", "qdisc", "show", "dev", interface])
        if "htb" in listed or "tbf" in listed:
            self._run(pid, ["tc", "qdisc", "del", "dev", interface, "root"])

    def _interfaces(self) -> list[tuple[int, str]]:
        return [
            each
            for number, machine in self._machines.items()
            for each in ((machine, "eth0"), (self._switch, f"p{number}"))
        ]

    def _batch(self, pid: int, lines: list[str]) -> None:
        self._run(pid, ["ip", "-batch", "-"], "\n".join(lines) + "\n")

    def _run(self, pid: int, command: list[str], text: str = "") -> str:
        if not pid:
            raise RuntimeError("the network is not there: use it in its `with`, and machines that are on")
        with inside_network(pid):
            done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}\n{text}".rstrip())
        return done.stdout


def _htb_class(port: str, parent: str, name: str, rate: int) -> list[str]:
    # The quantum only orders who borrows first; computed from a large rate the kernel complains of it.
    limits = f"rate {rate}bit ceil {rate}bit burst {BURST} cburst {BURST} quantum 65536"
    return [f"class add {port} parent {parent} classid {name} htb {limits}"]


def _queue(port: str, minor: int, rate: int) -> str:
    held = max(2 * BURST, round(rate / 8 * QUEUE_S))
    return f"qdisc add {port} parent 1:{minor:x} handle {minor + 0x1000:x}: bfifo limit {min(held, 1 << 28)}"
