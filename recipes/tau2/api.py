"""The one module that imports tau2's names, so that all is quiet and without network.

Importing this takes about ten seconds where tau2 is not loaded yet.

Raises on import:
    MissingTau2Error: tau2 is not installed.
"""

# ruff: noqa: E402, F401

from __future__ import annotations

from recipes.tau2.domains import import_tau2

import_tau2()

from tau2.agent.base import AgentError
from tau2.agent.llm_agent import LLMAgent, LLMSoloAgent
from tau2.data_model.message import (
    AssistantMessage,
    MultiToolMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from tau2.data_model.simulation import SimulationRun, TerminationReason
from tau2.data_model.tasks import Action, Task
from tau2.environment.environment import Environment
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.metrics.agent_metrics import pass_hat_k
from tau2.orchestrator.orchestrator import Orchestrator, Role
from tau2.registry import registry
from tau2.user.base import STOP, BaseUser, UserState
from tau2.user.user_simulator import DummyUser, UserSimulator
