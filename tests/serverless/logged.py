"""What loggers have written, read back with their own libraries: {step: {metric: value}}."""

from __future__ import annotations

import csv
import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Table = dict[int, dict[str, float]]


def read_csv(path: Path) -> Table:
    found: Table = defaultdict(dict)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found[int(row.pop("step"))] |= {name: float(value) for name, value in row.items() if _is_number(value)}
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_tensorboard(folder: Path) -> Table:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Table = defaultdict(dict)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found[event.step][name] = event.value
    return found


def read_mlflow(uri: str, experiment: str) -> dict[str, tuple[dict[str, str], dict[str, str], Table]]:
    """By run name: (tags, params, metrics)."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    place = client.get_experiment_by_name(experiment)
    assert place is not None
    runs: dict[str, tuple[dict[str, str], dict[str, str], Table]] = {}
    for run in client.search_runs([place.experiment_id]):
        assert run.info.status == "FINISHED" and run.info.run_name not in runs
        found: Table = defaultdict(dict)
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                found[metric.step][name] = metric.value
        runs[run.info.run_name] = (dict(run.data.tags), dict(run.data.params), found)
    return runs


def read_wandb(folder: Path) -> tuple[Any, Table]:
    """(the run's record, metrics by fleet step) of the one offline run below a folder."""
    from wandb.proto import wandb_internal_pb2 as records

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    run: Any = None
    found: Table = defaultdict(dict)
    for data in _log_records(path.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        elif kind == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            step = row.get("trainer/global_step", record.history.step.num)
            found[step] |= {name: value for name, value in row.items() if isinstance(value, (int, float))}
    return run, found


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format (blocks of 32 KiB, each piece with checksum, length and kind)."""
    block, position, parts = 32768, 7, b""  # W&B's own seven bytes stand first
    while position + 7 <= len(data):
        if block - position % block < 7:  # too little for another piece: padding
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last of several
            yield parts
            parts = b""
