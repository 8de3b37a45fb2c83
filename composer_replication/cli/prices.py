"""What hardware costs, from a dated table that users can put their own over, and when a fleet is the cheaper way.

Invariant: a price that isn't in a table is None, never a guess. Nothing is asked of any service.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__ = ["Break", "Price", "Prices", "break_even"]


@dataclass(frozen=True)
class Price:
    """Of one job's hardware, for an hour."""

    name: str  # the option's value: a GPU, a flavor, a machine
    usd_per_hour: float
    gpu: str  # one kind of GPU under one name, whoever rents it out
    gpus: int
    approximate: bool
    dated: str
    source: str

    @property
    def usd_per_gpu_hour(self) -> float:
        return self.usd_per_hour / self.gpus


class Prices:
    """The table of this package, with the user's over it. Raises ValueError for a file that isn't one."""

    def __init__(self, path: str | Path | None = None) -> None:
        own = json.loads(files("composer_replication").joinpath("prices.json").read_text(encoding="utf-8"))
        self.dated = own["dated"]
        self._tables: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
        layers = [own] if path is None else [_read(Path(path)), own]
        for layer in layers:
            for backend, table in layer["back_ends"].items():
                self._tables.setdefault(backend, []).append((table, str(layer.get("dated", "undated"))))

    def of(self, backend: str, options: Mapping[str, Any]) -> Price | None:
        """Of one replica with these options (defaults filled in)."""
        layers = self._tables.get(backend, [])
        option = next((table["option"] for table, _ in layers if "option" in table), "")
        counted_by = next((table["count_option"] for table, _ in layers if "count_option" in table), "")
        value, count = str(options.get(option)), _count(options.get(counted_by))
        name, colon, times = value.rpartition(":")
        if colon and times.isdigit():  # "H100:8"
            value, count = name, int(times) * count
        for table, dated in layers:
            for name in (value, "*"):
                if name in table.get("prices", {}):
                    return _price(value, table["prices"][name], table, dated, count)
        return None

    def nodes(self, gpu: str, gpus: int) -> dict[str, Price]:
        """Single machines with at least so many GPUs of a kind, by 'back end/name'."""
        return {name: one for name, one in self._machines().items() if one.gpu == gpu and one.gpus >= max(2, gpus)}

    def node(self, name: str) -> dict[str, Price]:
        """That one machine. Raises ValueError for one that isn't in the table."""
        machines = {one: price for one, price in self._machines().items() if price.gpus > 1}
        if name not in machines:
            close = get_close_matches(name, machines, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(sorted(machines))}."
            raise ValueError(f"--node {name}: no such machine of several GPUs is in the prices. {hint}")
        return {name: machines[name]}

    def _machines(self) -> dict[str, Price]:
        found: dict[str, Price] = {}
        for backend, layers in self._tables.items():
            for table, dated in layers:
                for name, entry in table.get("prices", {}).items():
                    found.setdefault(f"{backend}/{name}", _price(name, entry, table, dated, 1))
        return found


@dataclass(frozen=True)
class Break:
    """When the fleet is the cheaper way, against one node.

    With g GPUs of which the fleet spends the share s of its time on exchanging, an hour of it holds g (1 - s) GPU-hours
    of training; the node's, all of them. So the fleet is the cheaper one while
    its price per GPU-hour / (1 - s) < the node's price per GPU-hour.
    """

    node: str
    node_usd_per_gpu_hour: float
    fleet_usd_per_gpu_hour: float
    step_seconds: float | None  # an optimizer step that takes longer is cheaper on the fleet

    @property
    def share(self) -> float:
        """The largest s at which the fleet is the cheaper one; 0 or less: it never is."""
        return 1.0 - self.fleet_usd_per_gpu_hour / self.node_usd_per_gpu_hour


def break_even(
    prices: list[Price], nodes: Mapping[str, Price], *, round_seconds: float | None, horizon: int
) -> Break | None:
    """Against the node that is cheapest per GPU; `prices` are the replicas', `horizon` the steps between exchanges."""
    if not nodes or not prices:
        return None
    name = min(nodes, key=lambda one: (nodes[one].usd_per_gpu_hour, nodes[one].usd_per_hour, one))
    fleet = sum(price.usd_per_hour for price in prices) / sum(price.gpus for price in prices)
    found = Break(name, nodes[name].usd_per_gpu_hour, fleet, None)
    if round_seconds is None or not found.share > 0:
        return found
    # s = R / (R + h t) = share, solved for the step's time t.
    step = round_seconds * (1.0 / found.share - 1.0) / horizon
    return Break(found.node, found.node_usd_per_gpu_hour, fleet, step)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def _price(name: str, entry: Mapping[str, Any], table: Mapping[str, Any], dated: str, count: int) -> Price:
    return Price(
        name=name,
        usd_per_hour=float(entry["usd_per_hour"]) * count,
        gpu=str(entry.get("gpu", name)),
        gpus=int(entry.get("gpus", 1)) * count,
        approximate=bool(entry.get("approximate", False)),
        dated=dated,
        source=str(table.get("source", "yours")),
    )


def _read(path: Path) -> dict[str, Any]:
    """A user's table, as JSON or YAML; `{modal: {H100: 3.5}}` will do."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prices {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    import yaml  # comes with OmegaConf, without which there is no recipe

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--prices {path} is neither JSON nor YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--prices {path} must hold back ends with their prices, like modal: {{H100: 3.5}}")
    if "back_ends" not in values:
        values = {"back_ends": {name: one for name, one in values.items() if name != "dated"}, **_dated(values)}
    for backend, table in values["back_ends"].items():
        if isinstance(table, dict) and "prices" not in table:
            table = values["back_ends"][backend] = {"prices": table}
        if not isinstance(table, dict) or not isinstance(table["prices"], dict):
            raise ValueError(f"--prices {path}: {backend} must hold prices, like {backend}: {{NAME: 3.5}}")
        for name, entry in table["prices"].items():
            if isinstance(entry, (int, float)) and not isinstance(entry, bool):
                entry = table["prices"][name] = {"usd_per_hour": entry}
            price = entry.get("usd_per_hour") if isinstance(entry, dict) else None
            if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 <= price < float("inf"):
                raise ValueError(f"--prices {path}: {backend}.{name} must be dollars an hour, not {entry!r}")
    return values


def _dated(values: Mapping[str, Any]) -> dict[str, str]:
    return {"dated": str(values["dated"])} if "dated" in values else {}
