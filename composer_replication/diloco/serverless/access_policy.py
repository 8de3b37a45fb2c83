"""Access to one run's rendezvous, for the tools that set it up: boto3, gcloud, az.

Invariant: as `store/access.py`, which renders it: nothing beside the run's prefix is reached.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.store import access

__all__ = ["RendezvousAccessPolicy"]


@dataclass(frozen=True)
class RendezvousAccessPolicy:
    """What the replicas of the run at `rendezvous_uri` need, and no more: to read, write, delete and list below it.

    The bucket is to be private, and this is to be given to nobody but the replicas' identity: who can write there can
    change the weights. With `read_only` it is for those who only look on. Raises ValueError for a URI without a prefix
    of the run's own, and for stores whose access isn't by prefix (a folder, `hf://`).
    """

    rendezvous_uri: str
    read_only: bool = False

    def __post_init__(self) -> None:
        access.run_place(self.rendezvous_uri)

    @property
    def cloud(self) -> str:
        """Whose the store is: s3, gs or az."""
        return access.run_place(self.rendezvous_uri)[0].kind

    def to_boto3(self, *, partition: str = "aws", kms_key_arn: str | None = None) -> dict[str, Any]:
        """The policy document that boto3's `iam.put_role_policy(PolicyDocument=json.dumps(...))` takes, and
        `sts.assume_role(Policy=...)`."""
        bucket, prefix = self._place("s3")
        return access.s3_policy(bucket, prefix, partition=partition, kms_key_arn=kms_key_arn, read_only=self.read_only)

    def to_gcloud(self, members: Sequence[str]) -> dict[str, Any]:
        """The policy that `gcloud storage managed-folders set-iam-policy gs://BUCKET/PREFIX FILE` takes.

        `members` are like `serviceAccount:trainer@project.iam.gserviceaccount.com`.
        """
        bucket, prefix = self._place("gs")
        return access.gcs_access(bucket, prefix, members, read_only=self.read_only)["managed_folder"]["policy"]

    def to_az(self, account: str, principal: str) -> dict[str, Any]:
        """The properties of a role assignment on the container, as Azure's REST interface takes them (with `az`: the
        arguments of `az role assignment create`).

        `account` is the storage account's resource id, `principal` the replicas' object id.
        """
        container, prefix = self._place("az")
        return access.azure_assignment(account, container, prefix, principal, read_only=self.read_only)

    def to_json(self, **details: Any) -> str:
        """The one of these that goes with the URI, as JSON; `details` are its arguments."""
        emit = {"s3": self.to_boto3, "gs": self.to_gcloud, "az": self.to_az}[self.cloud]
        return json.dumps(emit(**details), indent=2)

    def _place(self, kind: str) -> tuple[str, str]:
        location, bucket, prefix = access.run_place(self.rendezvous_uri)
        if location.kind != kind:
            raise ValueError(f"{self.rendezvous_uri} is on {location.kind}://, and this is for {kind}://")
        return bucket, prefix
