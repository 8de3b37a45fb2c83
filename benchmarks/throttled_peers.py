"""One replica of a benchmark on throttled links; `throttled_round.py` starts it. A line of JSON says how it went.

Schemes: `store` (this project's round), `leader` (everyone uploads, one downloads all, averages, uploads the mean,
everyone downloads it), `gloo` (torch.distributed's all-reduce of the same bytes), `torchft` (torchft's DiLoCo over its
gloo).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def noise(elements: int, seed: int) -> torch.Tensor:
    """Values as a contribution has them, cheaply: a million drawn, repeated."""
    drawn = torch.randn(min(elements, 1 << 20), generator=torch.Generator().manual_seed(seed))
    return drawn.repeat(-(-elements // drawn.numel()))[:elements].mul_(1e-3)


class Meeting:
    """Files in a folder, where all begin at the same moment. Costs nothing of the link."""

    def __init__(self, folder: Path, replica: int, count: int) -> None:
        self._folder, self._replica, self._count, self._times = folder, replica, count, 0

    def wait(self) -> None:
        self._times += 1
        (self._folder / f"{self._times}.{self._replica}").touch()
        while len(list(self._folder.glob(f"{self._times}.*"))) < self._count:
            time.sleep(0.01)


def store_rounds(options: argparse.Namespace, meeting: Meeting) -> Iterator[dict[str, Any]]:
    from composer_replication.collective.base import Contribution, Report, RoundOutcome, Snapshot
    from composer_replication.collective.layout import Layout, Slot
    from composer_replication.collective.object_store import ObjectStoreCollective

    collective = ObjectStoreCollective(
        f"s3://{options.bucket}/store-{options.codec}?endpoint_url={options.endpoint}",
        replica=options.replica,
        replicas=options.replicas,
        codec=options.codec,
        heartbeat_seconds=5.0,
    )
    small = Layout((Slot("w", (1,), "torch.float32"),))
    layout = Layout((Slot("w", (options.elements,), "torch.float32"),), options.chunk_elements)
    values = noise(options.chunk_elements, options.replica)
    state = Snapshot(
        round=0, layout=small, anchor=[torch.zeros(1)], momentum=(), state={}, digest=hashlib.sha256(b"0").hexdigest()
    )
    base = collective.start(state, settings={}, resumed=False).digest
    mean = torch.empty(options.chunk_elements)
    for number in range(options.rounds):
        report = Report(
            replica=options.replica,
            steps=1,
            tokens=None,
            mass=1.0,
            square_norm=1.0,
            finite=True,
            leaving=number == options.rounds - 1,
            next_lr=1.0,
            preview=(1.0,),
            remaining=None,
            base=base,
            layout=layout.fingerprint,
        )

        def chunk(index: int) -> torch.Tensor:
            return values[: layout.chunks[index].elements]

        requests = dict(collective.requests)
        meeting.wait()
        began, used = time.monotonic(), time.process_time()
        outcome: RoundOutcome = collective.average(Contribution(number, report, layout, chunk))
        ended = time.monotonic()
        content = hashlib.sha256()
        for index, part in enumerate(layout.chunks):
            outcome.mean(index, mean[: part.elements])
            content.update(mean[: part.elements].numpy().tobytes())
        base = hashlib.sha256(base.encode() + content.digest()).hexdigest()
        yield {
            "began": began,
            "ended": ended,
            "cpu_seconds": time.process_time() - used,
            "digest": content.hexdigest()[:16],
            "sent": outcome.bytes_sent,
            "received": outcome.bytes_received,
            "requests": {kind: count - requests.get(kind, 0) for kind, count in collective.requests.items()},
            "phases": {name: round(seconds, 2) for name, seconds in outcome.phase_seconds.items()},
            "waited": round(outcome.wait_seconds, 2),
        }
        after = Snapshot(
            round=number + 1, layout=small, anchor=state.anchor, momentum=state.anchor, state={}, digest=base
        )
        collective.applied(lambda after=after: after)
    meeting.wait()
    collective.close()


def leader_rounds(options: argparse.Namespace, meeting: Meeting) -> Iterator[dict[str, Any]]:
    import s3fs

    fs = s3fs.S3FileSystem(endpoint_url=options.endpoint, use_listings_cache=False)
    root = f"{options.bucket}/leader"
    tensor = noise(options.elements, options.replica).to(DTYPES[options.codec])

    def there(path: str) -> bool:
        fs.invalidate_cache()
        return fs.exists(path)

    def await_all(paths: list[str]) -> None:
        while not all(there(path) for path in paths):
            time.sleep(0.1)

    def read(path: str) -> torch.Tensor:
        return torch.load(io.BytesIO(fs.cat_file(path)), weights_only=True)

    def write(path: str, value: torch.Tensor) -> int:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        fs.pipe_file(path, buffer.getvalue())
        return buffer.tell()

    for number in range(options.rounds):
        mine = [f"{root}/round-{number}/replica-{i}.pt" for i in range(options.replicas)]
        mean_path = f"{root}/round-{number}/avg.pt"
        meeting.wait()
        began, used = time.monotonic(), time.process_time()
        sent = write(mine[options.replica], tensor)
        await_all(mine)
        if options.replica == 0:
            mean = torch.stack([read(path) for path in mine]).mean(dim=0)
            sent += write(mean_path, mean)
        await_all([mean_path])
        mean = read(mean_path)
        ended = time.monotonic()
        yield {"began": began, "ended": ended, "cpu_seconds": time.process_time() - used, "sent": sent, "received": 0}


def _interface(options: argparse.Namespace) -> None:
    """Tell gloo which of the namespace's interfaces is the throttled one."""
    os.environ["GLOO_SOCKET_IFNAME"] = next(n for n in os.listdir("/sys/class/net") if n != "lo")


def gloo_rounds(options: argparse.Namespace, meeting: Meeting) -> Iterator[dict[str, Any]]:
    import torch.distributed as dist

    _interface(options)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options.first}:29511",
        rank=options.replica,
        world_size=options.replicas,
        timeout=timedelta(seconds=300),
    )
    tensor = noise(options.elements, options.replica).to(DTYPES[options.codec])
    dist.all_reduce(torch.zeros(1))
    for _ in range(options.rounds):
        meeting.wait()
        began, used = time.monotonic(), time.process_time()
        dist.all_reduce(tensor)
        tensor.div_(options.replicas)
        ended = time.monotonic()
        yield {"began": began, "ended": ended, "cpu_seconds": time.process_time() - used, "sent": 0, "received": 0}
    dist.destroy_process_group()


def torchft_rounds(options: argparse.Namespace, meeting: Meeting) -> Iterator[dict[str, Any]]:
    """torchft's own DiLoCo, manager and gloo process group; the lighthouse runs on the bridge."""
    from torch import nn
    from torch.distributed import TCPStore
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    _interface(options)
    rows = options.elements // 4096
    model = nn.ParameterList([nn.Parameter(torch.zeros(rows, 4096, dtype=DTYPES[options.codec]))])
    kept = TCPStore(options.address, 29600, is_master=True, wait_for_workers=False)  # it serves as long as it lives
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=300)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=options.replicas,
        use_async_quorum=False,
        timeout=timedelta(seconds=300),
        quorum_timeout=timedelta(seconds=300),
        rank=0,
        world_size=1,
        store_addr=options.address,
        store_port=29600,
        lighthouse_addr=options.endpoint,
        replica_id=f"replica{options.replica}",
        hostname=options.address,
        init_sync=False,
    )
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [model], inner, outer, sync_every=1) as _:
        for _ in range(options.rounds):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            meeting.wait()
            began, used = time.monotonic(), time.process_time()
            inner.step()
            ended = time.monotonic()
            yield {"began": began, "ended": ended, "cpu_seconds": time.process_time() - used, "sent": 0, "received": 0}
    meeting.wait()
    manager.shutdown()
    del kept


SCHEMES: dict[str, Callable[[argparse.Namespace, Meeting], Iterator[dict[str, Any]]]] = {
    "store": store_rounds,
    "leader": leader_rounds,
    "gloo": gloo_rounds,
    "torchft": torchft_rounds,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("scheme", choices=SCHEMES)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--chunk-elements", type=int, required=True)
    parser.add_argument("--codec", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--endpoint", required=True, help="of the S3 server, or of torchft's lighthouse")
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--address", required=True, help="this replica's")
    parser.add_argument("--first", required=True, help="replica 0's address")
    parser.add_argument("--folder", type=Path, required=True, help="where the replicas' processes meet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    meeting = Meeting(options.folder, options.replica, options.replicas)
    for result in SCHEMES[options.scheme](options, meeting):
        result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0)  # some clients' threads outlive their loops; all that was measured is written


if __name__ == "__main__":
    main()
