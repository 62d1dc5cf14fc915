"""The parts of a router that serves workflows, or masks of node servers.

Only a router that is configured for them imports this module.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from maskserve_common.config import ConfigError
from maskserve_common.files.values import Values
from maskserve_router.api.openai.form import ModelForm
from maskserve_router.api.openai.workflow_form import WorkflowForm
from maskserve_router.config import RouterConfig
from maskserve_router.fair_share import FairShare
from maskserve_router.nodes.node_pool import NodePool
from maskserve_router.nodes.segmenter import segment
from maskserve_router.scheduling.admission import Admission
from maskserve_router.scheduling.dispatch import Dispatcher
from maskserve_router.scheduling.edits import Edits
from maskserve_router.workers.pool import Pool
from maskserve_router.workflows.run_driver import RunServices
from maskserve_router.workflows.run_times import RunTimes
from maskserve_router.workflows.workflows import Workflows
from maskserve_workflows.folder import read_plans
from maskserve_workflows.nodes import NODE_FILES
from maskserve_workflows.plan import WorkflowPlan
from maskserve_workflows.ports import WorkflowError

log = logging.getLogger("maskserve.router")


class WorkflowParts:
    """Makes the parts.

    Args:
        config: configuration of the router.
        fair_share: threads of the router.
        values: this host's folder of values.

    Raises:
        ConfigError: a plan cannot be read.
    """

    def __init__(self, config: RouterConfig, fair_share: FairShare, values: Values) -> None:
        self._config, self._fair_share, self._values = config, fair_share, values
        self._plans = _plans(config)
        self._nodes = NodePool(config.workflows, fair_share, config.routing.order, values)
        self.segment = partial(segment, self._nodes)
        """Finds masks (`mask_finder.Segment`)."""

    @property
    def forms(self) -> dict[str, ModelForm]:
        """The forms of the workflows, by name."""
        return {plan.name: WorkflowForm(plan, self._config.limits) for plan in self._plans}

    def workflows(
        self, edits: Edits, pool: Pool, dispatcher: Dispatcher, admission: Admission
    ) -> Workflows:
        """Return the workflows.

        Args:
            edits: answers their edits.
            pool: the workers.
            dispatcher: knows how far edits are.
            admission: counts their runs and bytes.
        """
        config, nodes = self._config, self._nodes
        times = RunTimes(config, nodes.seconds, pool.running_s, dispatcher.share_left)
        services = RunServices(edits, nodes, admission, self._fair_share, times)
        return Workflows(self._plans, services, pool.ready, config.limits, self._values)


def _plans(config: RouterConfig) -> list[WorkflowPlan]:
    """Return the plans of the configured folder.

    Raises:
        ConfigError: naming the file.
    """
    problems = NODE_FILES.read(config.workflows.node_path)
    for problem in problems:
        log.error("%s", problem)
    if not config.workflows.folder:
        return []
    try:  # a plan that needs a file with an error is left out; all others are served
        return read_plans(Path(config.workflows.folder), log.error if problems else None)
    except WorkflowError as error:
        raise ConfigError(f"[workflows] folder: {error}") from None
