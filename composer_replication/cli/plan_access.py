"""`plan`: which credentials a launch rests on, by name, and what the replicas' identity must be allowed to do.

Invariant: names of variables, and whether they are set; never a value.
"""

from __future__ import annotations

import os
from typing import Any

from composer_replication.diloco.serverless.groups import Group
from composer_replication.recipe import Recipe
from composer_replication.store import access
from composer_replication.store.location import kind_of
from composer_replication.store.signing_key import SIGNING_KEY

__all__ = ["access_of", "credentials_of"]

_AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
# What clients look for first; each can also use a login of its own, or an identity of the machine.
_SERVICES = {
    "modal": ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
    "hf_jobs": ("HF_TOKEN",),
    "sagemaker": _AWS,
    "vertex": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "azure_ml": ("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET"),
    "volcano": ("KUBECONFIG",),
    "kuberay": ("KUBECONFIG",),
    "runpod": ("RUNPOD_API_KEY",),
}
_STORES = {
    "s3": _AWS,
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME",),
    "hf": ("HF_TOKEN",),
}
# The option that gives a job an identity of its own.
_IDENTITY = {
    "modal": "bucket_role",
    "sagemaker": "role_arn",
    "vertex": "service_account",
    "azure_ml": "identity",
    "volcano": "service_account",
    "kuberay": "service_account",
}


def credentials_of(group: Group, recipe: Recipe) -> list[dict[str, Any]]:
    """Rows of {who, name, set}: who needs what for what."""
    scheme = kind_of(recipe.store.uri or "file://")
    rows = [("the launcher, to reach the store", name) for name in _STORES.get(scheme, ())]
    if group.remote:
        rows += [(f"the launcher, to reach {group.backend}", name) for name in _SERVICES.get(group.backend, ())]
        rows += [("the replicas, handed over", name) for name in group.options.get("secrets", ())]
        if recipe.store.signing_key_file or os.environ.get(SIGNING_KEY):
            rows.append(("the replicas, handed over", SIGNING_KEY))
    held = {SIGNING_KEY} if recipe.store.signing_key_file else set[str]()
    found = [{"who": who, "name": name, "set": name in held or bool(os.environ.get(name))} for who, name in rows]
    option = _IDENTITY.get(group.backend, "")
    identity = group.options.get(option)
    if identity:
        found.append({"who": "the replicas, by their job's identity", "name": f"{option}: {identity}", "set": True})
    elif group.remote and scheme in _STORES and not group.options.get("secrets"):
        hint = "name variables in options.secrets" + (f", or give options.{option}" if option else "")
        name = f"nothing is handed over: {hint}"
        found.append({"who": "the replicas, to reach the store", "name": name, "set": False})
    return found


def access_of(group: Group, recipe: Recipe) -> dict[str, Any]:
    """What the identity of a group's replicas is to be allowed: below the run's prefix, and nothing beside it."""
    option = _IDENTITY.get(group.backend, "")
    identity = group.options.get(option) if option else None
    values: dict[str, Any] = {"back_end": group.backend, "identity": identity or _whose(group, option)}
    if recipe.store.uri is None:
        return {**values, "policy": None, "why": "the store is a folder of the run's own on this machine"}
    try:
        location, bucket, prefix = access.run_place(recipe.store.uri)
    except ValueError as error:
        return {**values, "policy": None, "why": str(error)}
    if location.kind == "s3":
        policy: Any = access.s3_policy(bucket, prefix)
    elif location.kind == "gs":
        member = identity if group.backend == "vertex" and identity else "NAME@PROJECT.iam.gserviceaccount.com"
        policy = access.gcs_access(bucket, prefix, [f"serviceAccount:{member}"])["managed_folder"]
    else:
        account = "/subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Storage/storageAccounts/ACCOUNT"
        policy = access.azure_assignment(account, bucket, prefix, "PRINCIPAL")
    why = f"other ways, and how to attach it: composer-replication policy {recipe.store.uri}"
    return {**values, "policy": policy, "why": why}


def _whose(group: Group, option: str) -> str:
    if not group.remote:
        return "whoever runs the launcher"
    secrets = ", ".join(group.options.get("secrets", ()))
    if secrets:
        return f"the one that {secrets} belong to"
    return f"that of options.{option}" if option else "none is given"
