"""The faults of AReaL's agent proxy and loggers; see test_faults.py."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from areal.api.io_struct import ModelResponse
from areal.utils import logging as areal_logging
from areal.utils import stats_logger
from pydantic import TypeAdapter

from areal_dta.areal_fixes import agent_proxy
from areal_dta.areal_fixes.loggers import skip_disabled_swanlab

pytestmark = pytest.mark.timeout(120)


def test_without_alias_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    for name in [name for name in sys.modules if name.startswith(agent_proxy._OLD)]:
        monkeypatch.delitem(sys.modules, name)
    spec = find_spec(agent_proxy.AREAL_MODULE)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ModuleNotFoundError, match=agent_proxy._OLD):
        spec.loader.exec_module(module_from_spec(spec))


@pytest.fixture
def server() -> Any:
    agent_proxy.alias_litellm()
    from areal.experimental.openai.proxy import proxy_rollout_server

    return proxy_rollout_server


def test_without_pass_template_kwargs(server: Any) -> None:
    """Parsing drops the field, so that the handler cannot see it."""
    body = {
        "messages": [{"role": "user", "content": "1+1?"}],
        "model": "-",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    parsed = TypeAdapter(server.CompletionCreateParams).validate_python(body)
    assert parsed["model"] == "-"
    assert "chat_template_kwargs" not in parsed


def test_without_mark_trajectory_starts(server: Any) -> None:
    interaction: Any = MagicMock()
    interaction.has_tensor_data = True
    interaction.to_tensor_dict.return_value = {"input_ids": torch.ones(1, 2)}
    interaction.reward, interaction.interaction_id = 1.0, "i"
    serialized = server.serialize_interactions({"i": interaction})
    assert "input_ids" in str(serialized)
    assert "begin_of_trajectory" not in str(serialized)


def test_without_accept_empty_replies() -> None:
    tokenizer: Any = SimpleNamespace(eos_token_id=7, pad_token_id=7)
    reply = ModelResponse(
        input_tokens=[1], output_tokens=[7], stop_reason="stop", tokenizer=tokenizer
    )
    with pytest.raises(ValueError, match="All output_tokens are EOS or PAD"):
        reply.output_tokens_without_stop  # noqa: B018
    undo = agent_proxy.accept_empty_replies()
    try:
        assert reply.output_tokens_without_stop == []
    finally:
        undo()


def test_without_skip_disabled_swanlab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``log`` is called whatever its mode is."""
    swanlab = MagicMock()
    monkeypatch.setattr(stats_logger, "swanlab", swanlab)
    monkeypatch.setattr(stats_logger, "wandb", MagicMock())
    logger: Any = stats_logger.StatsLogger.__new__(stats_logger.StatsLogger)
    logger.ft_spec, logger.summary_writer = MagicMock(), None
    logger._last_commit_step = -1

    logger.commit(0, 0, 0, {"loss": 1.0})
    assert swanlab.log.call_count == 1
    undo = skip_disabled_swanlab("disabled")
    logger.commit(0, 1, 1, {"loss": 1.0})
    undo()
    assert swanlab.log.call_count == 1
    skip_disabled_swanlab("online")
    logger.commit(0, 2, 2, {"loss": 1.0})
    assert swanlab.log.call_count == 2


def test_without_task_logger() -> None:
    """A logger that was made before is not the one that has the handlers."""
    before = logging.getLogger("before")
    areal_logging.getLogger("another")
    assert logging.getLogger("before") is not before


def test_without_secrets_redacted() -> None:
    config = stats_logger.StatsLoggerConfig(experiment_name="e", trial_name="t")
    config.wandb.wandb_api_key = "sentinel"
    assert "sentinel" in str(stats_logger.asdict(config))
