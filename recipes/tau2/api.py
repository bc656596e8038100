"""The parts of tau2 that the recipe uses, imported quietly and without the network.

Importing this takes about ten seconds where tau2 is not loaded yet.

Raises on import:
    MissingTau2Error: tau2 is not installed.
"""

from __future__ import annotations

from recipes.tau2.domains import import_tau2

import_tau2()

from tau2.agent.base import AgentError  # noqa: E402
from tau2.agent.llm_agent import LLMAgent, LLMSoloAgent  # noqa: E402
from tau2.data_model.message import (  # noqa: E402
    AssistantMessage,
    MultiToolMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from tau2.data_model.simulation import SimulationRun, TerminationReason  # noqa: E402
from tau2.data_model.tasks import Action, Task  # noqa: E402
from tau2.environment.environment import Environment  # noqa: E402
from tau2.evaluator.evaluator import (  # noqa: E402
    EvaluationType,
    evaluate_simulation,
)
from tau2.metrics.agent_metrics import pass_hat_k  # noqa: E402
from tau2.orchestrator.orchestrator import Orchestrator, Role  # noqa: E402
from tau2.registry import registry  # noqa: E402
from tau2.user.base import STOP, BaseUser, UserState  # noqa: E402
from tau2.user.user_simulator import DummyUser, UserSimulator  # noqa: E402

__all__ = [
    "STOP",
    "Action",
    "AgentError",
    "AssistantMessage",
    "BaseUser",
    "DummyUser",
    "Environment",
    "EvaluationType",
    "LLMAgent",
    "LLMSoloAgent",
    "MultiToolMessage",
    "Orchestrator",
    "Role",
    "SimulationRun",
    "Task",
    "TerminationReason",
    "ToolCall",
    "ToolMessage",
    "UserMessage",
    "UserSimulator",
    "UserState",
    "evaluate_simulation",
    "pass_hat_k",
    "registry",
]
