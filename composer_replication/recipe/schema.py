"""What a recipe may say: one frozen dataclass a section. Values and defaults only; nothing is built or read here.

Invariant: every key that a recipe file may hold is a field below, with the same name (`class` is the field `class_`).
Reading and checking a file is `load.py`; building models, data and trainers from these values is the launchers' work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "AutoLoCoSection",
    "DataSection",
    "ExecutorSection",
    "FleetSection",
    "GroupSection",
    "LoggingSection",
    "ModelSection",
    "OptimizerSection",
    "Recipe",
    "SchedulerSection",
    "StoreSection",
    "TrainingSection",
]


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    name: str | None = None  # a built-in model, e.g. byte_gpt
    class_: str | None = None  # or the import path of your own (see docs/recipes.md): my_package.my_module.MyModel
    args: dict[str, Any] = field(default_factory=dict)  # its keyword arguments


@dataclass(frozen=True, kw_only=True)
class DataSection:
    name: str | None = None  # built-in data, e.g. text_bytes
    class_: str | None = None  # or the import path of your own data: my_package.my_module.MyData
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """The inner optimizer. Your own LightningModule configures its own; a ComposerModel takes this."""

    name: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.0
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments, e.g. betas


@dataclass(frozen=True, kw_only=True)
class SchedulerSection:
    """The inner learning-rate schedule, over training.steps; used where `optimizer` is."""

    name: str = "cosine"  # cosine, linear or constant, after a linear warm-up
    warmup_steps: int = 0
    final_fraction: float = 0.0  # of the peak, at the last step


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    steps: int = 1000  # inner optimizer steps of each replica
    seed: int = 1  # the same for the fleet: shards of the data are cut with it
    precision: str = "32-true"
    accumulate: int = 1  # micro-batches in an optimizer step
    gradient_clip: float | None = None  # by norm
    log_every: int = 10  # steps
    validate_every: int | None = None  # steps; null: only at the end
    accelerator: str = "auto"
    devices: int = 1  # of each replica
    threads: int | None = None  # torch threads of each replica; null: leave as it is
    trainer_args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the Trainer


@dataclass(frozen=True, kw_only=True)
class AutoLoCoSection:
    """Policy, horizons and outer step; what each means is docs/method.md."""

    policy: str = "autoloco"  # autoloco, fixed (DiLoCo), qsr, linear or staircase
    base_horizon: int = 500
    min_horizon: int | None = None
    max_horizon: int | None = None
    horizon_step: int | None = None
    warmup_steps: int | None = None  # null: the scheduler's
    growth_cap: float = 1.15
    retire_ratio: float = 0.90
    moderate_cut: float = 1.20
    severe_cut: float = 1.50
    history: int = 16
    supporting_threshold: float = 1.0
    consistent_threshold: float = 2.5
    moderate_threshold: float = 5.0
    scale_floor: float = 0.15
    reference_weight: float = 0.1
    token_decay: float = 0.9
    alpha: float | None = None  # qsr only; null: sqrt(base_horizon) times the highest learning rate
    increment: int = 10  # linear only
    outer_lr: float | None = None  # null: 0.7; 1 where the policy averages (qsr, linear)
    outer_momentum: float | None = None  # null: 0.9 for fixed, 0.7 for autoloco
    momentum_min: float = 0.5
    momentum_max: float = 0.95
    max_scale: float | None = 1.5
    normalize: bool = False
    adapt_momentum: bool = True
    adapt_lr: bool = True
    outer_device: str = "cpu"  # cpu, or model
    buffers: str = "average"  # or local
    weighting: str = "equal"  # or tokens
    validate_with: str = "local"  # or shared


@dataclass(frozen=True, kw_only=True)
class StoreSection:
    uri: str | None = None  # null: a folder of the run's own
    signing_key_file: str | None = None  # sign all objects with the key in this file; null: or that of the environment
    control: str | None = None  # a second store for all but the blobs, where the first can't create an object only once


@dataclass(frozen=True, kw_only=True)
class GroupSection:
    """Replicas of a fleet that run in one place."""

    executor: str = "local"  # as executor.name
    count: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # put over executor.options


@dataclass(frozen=True, kw_only=True)
class FleetSection:
    replicas: int = 2  # with groups: their sum
    groups: list[GroupSection] = field(default_factory=list)  # a fleet in several places; none: all at executor.name
    failure_policy: str = "strict"  # or skip
    min_replicas: int | None = None  # skip only; null: more than half
    timeout_seconds: float = 600.0  # how long a round waits for a missing replica
    # the same for the start, which ends with round 0, and a resume's first round; null: 900 or a longer timeout_seconds
    start_timeout_seconds: float | None = None
    outliers: str = "warn"  # of a pseudo-gradient whose norm sticks out: warn, clip, exclude or off
    outlier_threshold: float = 3.5  # its robust z-score
    aggregation: str = "mean"  # or median, trimmed_mean: for fleets that can't trust all replicas
    trim_fraction: float = 0.1  # trimmed_mean only: cut away at each end
    deadline: str = (
        "adaptive"  # skip only: wait for the late as long as past rounds have taught; or fixed: timeout_seconds
    )
    checkpoint_every_rounds: int = 1  # each replica's own checkpoints, in its folder
    shared_checkpoint_every_rounds: int = 10  # the fleet's state in the store, for replicas that come in later


@dataclass(frozen=True, kw_only=True)
class ExecutorSection:
    """Where replicas run. A string, `executor: modal`, is its name."""

    name: str = "local"  # or modal, hf_jobs, sagemaker, vertex, azure_ml, volcano, kuberay, runpod
    options: dict[str, Any] = field(
        default_factory=dict
    )  # that executor's own, e.g. gpu, flavor, image (docs/launchers.md)
    code: str | None = None  # a folder that is sent along: the replicas' working directory
    requirements: list[str] = field(default_factory=list)  # what pip installs there first
    restarts: int = 3  # of each replica, after a preemption, a kill or a store's failure
    error_restarts: int = 0  # and after an exception in its own code
    backoff_seconds: float | None = None  # before the first restart; doubles with each. null: 1 here, 10 elsewhere
    grace_seconds: float = 20.0  # between asking a replica to stop and killing it; elsewhere the service's
    env: dict[str, str] = field(default_factory=dict)  # further environment variables


@dataclass(frozen=True, kw_only=True)
class LoggingSection:
    """The trainers' own loggers, one run for each replica, grouped by fleet (docs/logging.md). Keys stay outside."""

    loggers: list[str] = field(default_factory=list)  # csv, tensorboard, wandb, mlflow
    group: str | None = None  # of the run's replicas; null: its folder's name
    project: str | None = None  # of W&B, and MLflow's experiment; null: composer-replication
    entity: str | None = None  # W&B's team; null: one's own
    tracking_uri: str | None = None  # MLflow's; null: MLFLOW_TRACKING_URI
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. `output` is its folder; launching again takes the next free number beside it."""

    name: str = "run"
    trainer: str = "lightning"  # or composer, MosaicML's
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    autoloco: AutoLoCoSection = field(default_factory=AutoLoCoSection)
    store: StoreSection = field(default_factory=StoreSection)
    codec: str = "float32"  # bfloat16, int8
    fleet: FleetSection = field(default_factory=FleetSection)
    executor: ExecutorSection = field(default_factory=ExecutorSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    output: str | None = None  # null: runs/<name>

    @property
    def folder(self) -> str:
        return self.output or f"runs/{self.name}"
