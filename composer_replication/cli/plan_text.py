"""`plan` in words.

Invariant: says what the values say and nothing else; the same values go out with --json.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from composer_replication.readable import amount, byte_count, duration

__all__ = ["plan_lines"]


def plan_lines(values: Mapping[str, Any]) -> list[str]:
    return [*_head(values), *_places(values), *_exchange(values), *_money(values), *_end(values)]


def _head(values: Mapping[str, Any]) -> Iterator[str]:
    yield f"{values['name']}: {values['intention']}"
    yield f"store {values['store'] or 'a folder of the run on this machine'}"
    for text in values["warnings"]:
        yield f"mind: {text}"


def _places(values: Mapping[str, Any]) -> Iterator[str]:
    for group in values["groups"]:
        ids, limits = group["replicas"], group["limits"]
        named = f"replica {ids[0]}" if len(ids) == 1 else f"replicas {ids[0]} to {ids[-1]}"
        yield f"\n{named} on {group['back_end']}"
        if "hours_of_a_job" in limits:
            image = limits["image"] or "none"
            yield f"  image         {image}"
            longest = f"at most {limits['longest_hours']:g} h there"
            more = f"up to {limits['restarts']} more of them"
            yield f"  time          {limits['hours_of_a_job']:g} h a job ({longest}), {more}"
            yield f"  launching     {limits['submissions_at_once']} at once; names of up to {limits['name_characters']}"
            if group["jobs"]:
                yield f"  jobs          {', '.join(group['jobs'])}"
            if limits["code_bytes"] is not None:
                yield f"  code          {byte_count(limits['code_bytes'])}, through the store"
            if limits["requirements"]:
                yield f"  pip installs  {', '.join(limits['requirements'])}"
            yield f"  logs          {limits['logs']}"
        else:
            yield f"  restarts      {limits['restarts']}, after errors of its own {limits['error_restarts']}"
        if group["command"]:
            yield f"  runs          {shlex.join(group['command'])}"
        for one in group["credentials"]:
            state = "" if one["name"].startswith("nothing") else " (set)" if one["set"] else " (not set)"
            yield f"  credential    {one['who']}: {one['name']}{state}"
        price = group["price"]
        if price is not None:
            about = "about " if price["approximate"] else ""
            what = f"{price['gpus']} {price['gpu']}" if price["gpus"] > 1 or price["gpu"] != "*" else price["name"]
            yield (
                f"  price         {about}${price['usd_per_hour']:.2f} an hour each, {price['name']} ({what}; "
                f"{price['dated']}, {price['source']})"
            )
        else:
            yield "  price         not in the table; say it with --prices"
        if group["refused"]:
            yield f"  REFUSED       {group['refused']}"


def _exchange(values: Mapping[str, Any]) -> Iterator[str]:
    rounds, found = values["rounds"], values["round"]
    yield ""
    if rounds["least"] is not None:
        yield f"rounds        {rounds['least']} at least; {rounds['fixed']} with a fixed interval"
    else:
        yield f"rounds        {rounds['fixed']} with a fixed interval (your model's learning rate isn't in the recipe)"
    if found is None:
        yield "a round       not known: say how large the model is, --parameters 1.3B"
        return
    yield (
        f"a round       {byte_count(found['up_bytes'])} up and {byte_count(found['down_bytes'])} down for each replica "
        f"({amount(found['parameters'])} parameters, {found['codec']}), in some {found['requests']} requests"
    )
    yield f"              about {duration(found['seconds'])} at {found['bandwidth_mbit']:g} Mbit/s (--bandwidth)"


def _money(values: Mapping[str, Any]) -> Iterator[str]:
    costs = values["costs"]
    if costs["usd_per_hour"] is None:
        yield "cost          not known: there is no price for where it runs"
        return
    about = "about " if costs["approximate"] else ""
    rest = f", and {', '.join(costs['unknown'])}, whose price isn't known" if costs["unknown"] else ""
    yield f"cost          {about}${costs['usd_per_hour']:.2f} an hour{rest} (list prices of {costs['dated']})"
    if costs["usd"] is not None:
        hours = duration(costs["hours"] * 3600)
        yield f"              {about}${costs['usd']:.2f} for the run's {hours}, if nothing waits and nothing is lost"
    else:
        yield "              for the run: give --step-seconds, what an optimizer step takes on one replica"
    found = values["break_even"]
    if found is None:
        yield "one big node  no machine of that many GPUs of one kind is in the table (--node NAME, --prices FILE)"
        return
    node = f"{found['node']}, ${found['node_usd_per_gpu_hour']:.2f} for a GPU-hour"
    own = f"${found['fleet_usd_per_gpu_hour']:.2f}"
    if not found["share"] > 0:
        yield f"one big node  cheaper in any case: {node}, against {own}"
        return
    yield f"one big node  {node}, against {own}: the fleet is the cheaper one while it spends less than"
    text = f"              {100 * found['share']:.0f} % of its time on exchanging"
    if found["step_seconds"] is not None:
        text += f", which is so if a step takes more than {found['step_seconds']:.3g} s"
    yield text


def _end(values: Mapping[str, Any]) -> Iterator[str]:
    told: dict[str, list[str]] = {}
    for one in values.get("access", ()):
        policy = "" if one["policy"] is None else json.dumps(one["policy"], indent=1) + "\n"
        told.setdefault(f"{policy}# {one['why']}", []).append(f"# {one['back_end']}: access for {one['identity']}")
    for policy, whose in told.items():
        yield "\n" + "\n".join([*whose, policy])
    refused = [one["back_end"] for one in values["groups"] if one["refused"]]
    yield f"\n{', '.join(refused)} would refuse it." if refused else "\nNothing was started."
