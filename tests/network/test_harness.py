"""The machines, links and faults that the other tests here rely on do what they say."""

import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cluster import HERE, Network, missing, stopped, wait_until

pytestmark = [pytest.mark.network, pytest.mark.slow]

RCVBUFFORCE = 33
"""Root may have more than the kernel's limit; Python has no name for it."""
QUICK = 0.3
"""Longer than anything takes on a link that is in order, and shorter than what waits for a repetition of TCP's."""


def pair(source, target):
    """Both ends of a TCP connection between two machines."""
    with target.listen() as listener:
        one = source.connect(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(20)
    return one, other


def arrives(one, other, limit=5.0):
    """Whether a byte that one end sends is at the other end in time."""
    one.sendall(b"x")
    return bool(select.select([other], [], [], limit)[0]) and other.recv(1000) != b""


def refusal(host, address):
    """The number of the error that a connection from a machine ends with."""
    with host.network(), socket.socket() as link:
        link.settimeout(5)
        return link.connect_ex(address)


def listen6(host):
    """A listening socket at the machine's other address."""
    with host.network():
        return socket.create_server((host.address6, 0), family=socket.AF_INET6)


def carry(one, other, size):
    """Seconds until the other end has so many bytes."""
    sender = threading.Thread(target=one.sendall, args=(bytes(size),))
    began = time.monotonic()
    sender.start()
    left = size
    while left:
        left -= len(other.recv(1 << 20))
    took = time.monotonic() - began
    sender.join()
    return took


# Where it cannot be.


def test_if_networks_cannot_be_made_the_reason_is_given(monkeypatch):
    look = missing.__wrapped__
    assert look() is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert look() == "networks are made by root only"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda tool: None if tool == "nft" else f"/sbin/{tool}")
        assert look() == "there is no nft here; it is in the package nftables"


def test_a_root_without_its_rights_is_told_which_one_it_lacks():
    program = "import sys; sys.path.insert(0, sys.argv[1]); import cluster; print(cluster.missing())"
    # A container's root, for example.
    command = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program, str(HERE)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("this machine makes no networks: ")
    assert "Operation not permitted" in done.stdout
    assert done.stderr == ""


# Machines.


def test_a_machine_has_an_address_a_name_and_processes_of_its_own(network):
    one, other = network(2).hosts
    said = one.run(["sh", "-c", "hostname; echo $$; ls /dev/shm; getent hosts host1; echo $XDG_RUNTIME_DIR"])
    name, pid, address, folder = said.stdout.splitlines()
    assert name == "host0"
    # Its own numbers: the first process is the keeper's.
    assert int(pid) < 10
    assert address.split() == [other.address, "host1"]
    assert folder == "/run/user/0"


def test_machines_reach_each_other_and_nothing_else(network):
    one, other = network(2).hosts
    near, far = pair(one, other)
    with near, far:
        assert arrives(near, far) and arrives(far, near)
        assert far.getpeername()[0] == one.address
    assert refusal(one, ("192.0.2.1", 80)) == errno.ENETUNREACH
    with listen6(one) as listener:
        other.connect(listener.getsockname()[:2]).close()
    # The test itself is not on it.
    with other.listen() as listener, pytest.raises((TimeoutError, ConnectionError)):
        socket.create_connection(listener.getsockname(), 0.2)


def test_a_process_ends_as_its_command_does(network):
    (host,) = network(1).hosts
    assert host.run(["sh", "-c", "exit 7"], check=False).returncode == 7
    assert host.run(["sh", "-c", "kill -SEGV $$"], check=False).returncode == -signal.SIGSEGV
    assert host.run(["sh", "-c", "kill -KILL $$"], check=False).returncode == -signal.SIGKILL
    gone = host.run(["no-such-command"], check=False)
    assert gone.returncode == 127
    assert "no-such-command could not be run" in gone.stderr
    with pytest.raises(RuntimeError, match="ended with 3: sorry"):
        host.run(["sh", "-c", "echo sorry >&2; exit 3"])


def test_signals_are_the_command_s_own(network):
    (host,) = network(1).hosts
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready')\n"
        "print(sys.stdin.readline())"
    )
    first, second = (
        host.python("-c", program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    )
    for each in (first, second):
        assert each.stdout.readline() == b"ready\n"
    assert sorted(host.pids()) == sorted([first.real_pid, second.real_pid])
    first.terminate()
    assert first.wait(10) == 5
    second.pause()
    assert stopped([second.real_pid])
    second.resume()
    assert second.communicate(b"go on\n", timeout=10)[0] == b"go on\n\n"


def test_a_reader_of_output_sees_when_the_command_closes_it(network):
    (host,) = network(1).hosts
    process = host.start(["sh", "-c", "exec >&-; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.read() == b""
    assert process.poll() is None


def test_a_paused_machine_does_nothing_and_goes_on(network):
    one, other = network(2).hosts
    with one.listen() as listener:
        program = (
            "import socket, sys, subprocess\n"
            "link = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
            "child = subprocess.Popen(['cat'], stdin=link, stdout=link)\n"
            "child.wait()"
        )
        other.python("-c", program, one.address, str(listener.getsockname()[1]))
        link, _ = listener.accept()
    with link:
        link.settimeout(10)
        assert arrives(link, link, 5)
        other.pause()
        assert len(other.pids()) == 2
        assert stopped(other.pids())
        assert not arrives(link, link, QUICK)
        other.resume()
        assert link.recv(10) == b"x"


def test_all_processes_of_a_machine_are_killed_at_once_and_their_ends_are_seen(network):
    one, other = network(2).hosts
    with one.listen() as listener:
        program = (
            "import socket, os, sys\n"
            "link = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
            "os.fork(); os.fork(); os.setsid() if os.fork() == 0 else None\n"
            "os.write(1, b'ready\\n'); link.recv(1)"
        )
        port = str(listener.getsockname()[1])
        process = other.python("-c", program, one.address, port, stdout=subprocess.PIPE)
        link, _ = listener.accept()
    with link:
        link.settimeout(10)
        for _ in range(8):
            assert process.stdout.readline() == b"ready\n"
        assert len(other.pids()) == 8
        other.kill_all()
        assert link.recv(1) == b""
    assert process.wait(10) == -signal.SIGKILL
    assert other.run(["echo", "alive"]).stdout == "alive\n"


def test_a_machine_without_power_is_silent_and_boots_empty(network):
    one, other = network(2).hosts
    near, far = pair(one, other)
    process = other.start(["sleep", "1000"])
    with near:
        # The machine's end of the connection is gone with it, and says nothing.
        other.power_off()
        far.close()
        assert process.returncode == -signal.SIGKILL
        assert other.pids() == []
        assert not select.select([near], [], [], QUICK)[0]
        with pytest.raises(RuntimeError, match="host1 is off"):
            other.run(["true"])
        other.boot()
        assert other.pids() == []
        # It knows nothing of the connection, and says so.
        near.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            near.recv(1)
    near, far = pair(one, other)
    with near, far:
        assert arrives(near, far, 5)


# Links.


def test_an_unplugged_machine_hears_nothing_and_its_connections_live(network):
    net = network(3)
    one, other, third = net.hosts
    near, far = pair(one, other)
    with near, far:
        net.wire.unplug(other)
        assert "p1 is down" in net.wire.ledger()
        assert not arrives(near, far, QUICK) and not arrives(far, near, QUICK)
        left, right = pair(one, third)
        with left, right:
            assert arrives(left, right)
        net.wire.plug(other)
        assert far.recv(10) == b"x" and near.recv(10) == b"x"
    assert net.wire.ledger() == []


def test_a_machine_whose_interface_is_down_gets_an_error(network):
    net = network(2)
    one, other = net.hosts
    with other.listen() as listener:
        net.wire.interface_down(one)
        assert refusal(one, listener.getsockname()) == errno.ENETUNREACH
        net.wire.interface_up(one)
        one.connect(listener.getsockname(), 5).close()
    with listen6(other) as listener:
        one.connect(listener.getsockname()[:2]).close()


def test_a_cut_drops_one_direction_only(network):
    net = network(2)
    one, other = net.hosts
    with one.network():
        here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with other.network():
        there = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with here, there:
        here.bind((one.address, 0))
        there.bind((other.address, 0))
        here.connect(there.getsockname())
        there.connect(here.getsockname())
        assert arrives(here, there) and arrives(there, here)
        net.wire.cut([one], [other])
        assert not arrives(here, there, QUICK)
        assert arrives(there, here)
        dropped = net.wire.dropped(one)
        # The kernel sends some packets of its own accord.
        assert dropped >= 1
        assert net.wire.dropped(other) == 0
        net.heal()
        assert arrives(here, there)
        # What was dropped stays counted.
        assert net.wire.dropped(one) >= dropped


def test_a_partition_separates_groups(network):
    net = network(4)
    first, second = net.hosts[:2], net.hosts[2:]
    links = {(a, b): pair(net.hosts[a], net.hosts[b]) for a in range(4) for b in range(4) if a < b}
    try:
        net.wire.partition(first, second)
        reached = {ends for ends, (near, far) in links.items() if arrives(near, far, 1.0)}
        assert reached == {(0, 1), (2, 3)}
    finally:
        for near, far in links.values():
            near.close()
            far.close()


def test_a_fraction_of_the_packets_is_lost_and_tcp_makes_up_for_it(network):
    net = network(2)
    one, other = net.hosts
    net.wire.lose([one], [other], 0.25)
    with one.network():
        here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with other.network():
        there = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with here, there:
        there.bind((other.address, 0))
        there.setsockopt(socket.SOL_SOCKET, RCVBUFFORCE, 1 << 24)
        here.connect(there.getsockname())
        here.send(b"x")  # finds the other's hardware address, whatever that takes
        wait_until(lambda: here.send(b"x") and select.select([there], [], [], 0.01)[0], "nothing arrives")
        for _ in range(4000):
            here.send(b"x" * 100)
        received = 0
        while select.select([there], [], [], QUICK)[0]:
            received += len(there.recv(1000)) == 100
    # Seven standard deviations of a fair die.
    assert abs(received / 4000 - 0.75) < 0.05
    net.wire.lose([one], [other], 0.05)
    near, far = pair(one, other)
    with near, far:
        carry(near, far, 1 << 20)
    assert net.wire.dropped(one) > 0


@pytest.mark.slow
def test_rates_are_limited_for_a_machine_and_for_a_pair(network):
    net = network(3)
    one, other, third = net.hosts
    near, far = pair(one, other)
    left, right = pair(third, other)
    megabyte, bits = 1 << 20, 8 << 20
    with near, far, left, right:
        carry(near, far, megabyte)
        net.wire.limit(one, up=2 * bits)
        assert carry(near, far, megabyte) > 0.35
        # The other direction, and the others, are not held up.
        carry(far, near, megabyte)
        carry(left, right, megabyte)
        net.wire.limit(one)
        net.wire.limit(other, down=2 * bits)
        assert carry(near, far, megabyte) > 0.35
        assert carry(left, right, megabyte) > 0.35
        net.wire.limit(other)
        net.wire.slow(one, other, 2 * bits)
        assert carry(near, far, megabyte) > 0.35
        carry(left, right, megabyte)
        net.heal()
        assert net.wire.ledger() == []
        carry(near, far, megabyte)


def test_the_kernel_resets_connections_with_one_peer_or_with_all(network):
    net = network(3)
    one, other, third = net.hosts
    near, far = pair(one, other)
    left, right = pair(one, third)
    with near, far, left, right:
        assert one.reset_connections(other) == 1
        with pytest.raises(ConnectionResetError):
            far.recv(1)
        with pytest.raises(ConnectionError):
            near.recv(1)
        assert arrives(left, right)
        assert one.reset_connections() == 1
        with pytest.raises(ConnectionResetError):
            right.recv(1)


def test_faults_outlive_a_reboot_and_are_all_healed(network):
    net = network(3)
    one, other, third = net.hosts
    net.wire.cut([one], [other])
    net.wire.limit(one, up=1_000_000, down=1_000_000)
    net.wire.slow(one, third, 500_000)
    net.wire.unplug(one)
    net.wire.interface_down(other)
    before = len(net.wire.ledger())
    one.power_off()
    one.boot()
    assert len(net.wire.ledger()) == before == 6
    third.start(["sleep", "1000"])
    third.pause()
    net.heal()
    assert net.wire.ledger() == []
    assert not stopped(third.pids())
    near, far = pair(one, other)
    with near, far:
        assert arrives(near, far)


def test_a_large_network_falls_apart_quickly(network):
    net = network(24)
    net.wire.partition(net.hosts[:12], net.hosts[12:])
    with net.hosts[3].listen() as listener:
        net.hosts[4].connect(listener.getsockname(), 5).close()
        with pytest.raises(TimeoutError):
            net.hosts[20].connect(listener.getsockname(), QUICK)


# What is left.

OWNER = """
import subprocess, sys, threading
sys.path.insert(0, sys.argv[1])
from cluster import Network
with Network(2) as network:
    host = network.hosts[1]
    process = host.python("-c", "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
                          "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); os.setsid(); signal.pause()")
    network.wire.cut([network.hosts[0]], [host])
    while len(host.pids()) < 2:
        pass
    print("up", flush=True)
    if sys.argv[2] == "raise":
        sys.stdin.readline()  # Not before it was looked at.
        raise RuntimeError("the test fails")
    threading.Event().wait()
"""


@pytest.mark.parametrize("ending", ["SIGKILL", "SIGINT", "SIGTERM", "raise"])
def test_nothing_is_left_of_a_network_whatever_ends_its_owner(ending, alive):
    command = [sys.executable, "-c", OWNER, str(HERE), ending]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as owner:
        assert owner.stdout.readline() == "up\n"
        assert len(set(alive().values())) == 4
        if ending != "raise":
            owner.send_signal(getattr(signal, ending))
        _, errors = owner.communicate(timeout=20)
    assert owner.returncode != 0
    assert {"SIGINT": "KeyboardInterrupt", "raise": "the test fails"}.get(ending, "") in errors
    wait_until(lambda: not alive(), lambda: f"processes are left: {alive()}", 10)


def test_a_network_is_gone_with_its_context_and_needs_it(alive):
    net = Network(2)
    with pytest.raises(RuntimeError, match="use it in its `with`"):
        net.hosts[0].boot()
    with net:
        near, far = pair(*net.hosts)
        process = net.hosts[0].start(["sleep", "1000"])
        assert len(set(alive().values())) == 4
    with near, far:
        assert process.returncode == -signal.SIGKILL
        assert alive() == {}
        with pytest.raises(RuntimeError, match="host0 is off"):
            net.hosts[0].run(["true"])


def test_what_breaks_while_a_network_is_made_leaves_nothing(alive, monkeypatch):
    net = Network(3)
    monkeypatch.setattr(net.hosts[2], "address", "no address")
    with pytest.raises(RuntimeError, match="no address"):
        net.__enter__()
    assert alive() == {}


def test_networks_of_several_runs_do_not_meet(network):
    first, second = network(2), network(2)
    first.wire.cut(first.hosts, first.hosts)
    near, far = pair(*second.hosts)
    with near, far:
        assert arrives(near, far)
    assert second.wire.ledger() == []


def test_threads_use_machines_at_the_same_time(network):
    net = network(4)
    failed = []

    def work(host):
        try:
            for _ in range(10):
                assert host.run(["hostname"]).stdout == f"{host.name}\n"
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(host,)) for host in net.hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_the_keeper_s_end_is_the_end_of_its_machines(network, alive):
    net = network(2)
    process = net.hosts[0].start(["sleep", "1000"])
    keeper = int(Path(f"/proc/{net.hosts[0]._pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    wait_until(lambda: not alive(), lambda: f"processes are left: {alive()}", 10)
    with pytest.raises(RuntimeError, match="keeper of the machines has ended"):
        net.hosts[0].pause()
