"""The choice of a worker for an edit (FlashPS §4.4, Algorithm 2): pure functions of the known
state.

pricing       a row's cost on a worker: a few linear coefficients
view          a worker's known state: its rows, its queue, its templates
adapters      tiers of LoRAs, and their load times
predict       the time at which an edit would be done on a worker
policies      the rules that choose
worker_table  many workers' views as columns, for the rule that predicts
"""

from maskserve_common.contracts.pricing import Pricing
from maskserve_common.routing.adapters import AdapterView
from maskserve_common.routing.policies import (
    POLICIES,
    LeastRequests,
    LeastTokens,
    MaskAware,
    NoWorkerAvailable,
    Policy,
    RoundRobin,
    make_policy,
)
from maskserve_common.routing.predict import assign, predicted_seconds
from maskserve_common.routing.profile import RowLoad
from maskserve_common.routing.view import Edit, EncodingPlace, WorkerView
from maskserve_common.routing.worker_table import WorkerTable

__all__ = [
    "POLICIES",
    "AdapterView",
    "Edit",
    "EncodingPlace",
    "LeastRequests",
    "LeastTokens",
    "MaskAware",
    "NoWorkerAvailable",
    "Policy",
    "Pricing",
    "RoundRobin",
    "RowLoad",
    "WorkerTable",
    "WorkerView",
    "assign",
    "make_policy",
    "predicted_seconds",
]
