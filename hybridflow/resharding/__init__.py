"""Geometry of moving weights between the training and the generation layout: which rank sends which region to whom."""

from .grouping import (
    GenerationCoordinates,
    GenerationLayout,
    Grouping,
    Overhead,
    deepspeed_chat_overhead,
    hybridflow_overhead,
    vanilla_overhead,
)
from .plan import Bucket, Parameter, ReshardPlan, gathered_bytes, lower_bound, plan_reshard
from .region import Region

__all__ = [
    "Bucket",
    "GenerationCoordinates",
    "GenerationLayout",
    "Grouping",
    "Overhead",
    "Parameter",
    "Region",
    "ReshardPlan",
    "deepspeed_chat_overhead",
    "gathered_bytes",
    "hybridflow_overhead",
    "lower_bound",
    "plan_reshard",
    "vanilla_overhead",
]
