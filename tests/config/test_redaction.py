"""Secrets of a configuration reach no file, logger or message."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_dta.config.composed import ConfigError
from areal_dta.config.redaction import (
    REDACTED,
    redact_text,
    redacted,
    redacted_keys,
    secret_values,
)
from areal_dta.config.schema import to_structured
from areal_dta.startup.check_values import check_values
from areal_dta.startup.compose import compose, find_config
from areal_dta.startup.dry_run import dry_run_text
from areal_dta.startup.prepare import prepare
from areal_dta.startup.train_process import save_config

SECRETS = {
    "rollout.agent.admin_api_key": "PROXY-SENTINEL",
    "stats_logger.wandb.wandb_api_key": "WANDB-SENTINEL",
    "stats_logger.swanlab.api_key": "SWAN-SENTINEL",
    "actor.scheduling_spec.0.env_vars.HF_TOKEN": "HF-SENTINEL",
    "actor.scheduling_spec.0.env_vars.MY_PASSWORD": "PASSWORD-SENTINEL",
    "stats_logger.wandb.wandb_base_url": "https://me:URL-SENTINEL@wandb.example",
}
# OmegaConf's ++key=value cannot name the entry of a list.
SPEC = "actor.scheduling_spec.0."


def overrides() -> list[str]:
    listed = [f"{k}='{v}'" for k, v in SECRETS.items() if not k.startswith(SPEC)]
    spec = "{cpu: 1, gpu: 0, mem: 1, port_count: 2, env_vars: {HF_TOKEN: HF-SENTINEL, "
    spec += "MY_PASSWORD: PASSWORD-SENTINEL}}"
    return [*listed, f"actor.scheduling_spec=[{spec}]"]


def load() -> Any:
    return to_structured(compose(find_config("gsm8k_grpo"), ["hardware=cpu"]))


def test_nothing_secret_in_files_and_dry_run(tmp_path: Path) -> None:
    run = prepare("gsm8k_grpo", ["hardware=cpu", *overrides()])
    assert run.config.stats_logger.wandb.wandb_api_key == "WANDB-SENTINEL"
    save_config(run.config, tmp_path / "config.yaml")
    for text in ((tmp_path / "config.yaml").read_text(), dry_run_text(run)):
        assert "SENTINEL" not in text
        assert text.count(REDACTED) >= len(SECRETS)
        assert "wandb.example" in text


def test_nothing_secret_at_experiment_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    from areal.utils import stats_logger

    from areal_dta.areal_fixes.loggers import secrets_redacted

    config = load()
    config.stats_logger.wandb.wandb_api_key = "WANDB-SENTINEL"
    config.rollout.agent.admin_api_key = "PROXY-SENTINEL"
    before = stats_logger.asdict
    with secrets_redacted():
        sent = stats_logger.asdict(config)
    assert "SENTINEL" not in str(sent)
    assert sent["actor"]["optimizer"] == dataclasses.asdict(config.actor.optimizer)
    assert stats_logger.asdict is before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "cannot read 'tau2.user.api_key=abc d'",
            f"cannot read 'tau2.user.api_key={REDACTED} d'",
        ),
        (
            "GET https://user:pass@host/v1 failed",
            f"GET https://{REDACTED}@host/v1 failed",
        ),
        ("HF_TOKEN: hf_123", f"HF_TOKEN: {REDACTED}"),
        ("unknown key 'a'; expected key=value", "unknown key 'a'; expected key=value"),
        ("max_tokens=5 of http://host/v1", "max_tokens=5 of http://host/v1"),
        ("the value hunter2 is bad", f"the value {REDACTED} is bad"),
    ],
)
def test_texts(text: str, expected: str) -> None:
    assert redact_text(text, {"hunter2"}) == expected


def test_which_values_are_secret() -> None:
    values = {
        "api_key": "k-1234",
        "max_tokens": 8,
        "tokenizer_path": "p",
        "user": {"api_key": "none", "Password": "hunter2"},
        "list": [{"hf_token": "t-1234"}],
    }
    assert secret_values(values) == {"k-1234", "hunter2", "t-1234"}
    hidden = redacted(values)
    assert hidden["user"]["api_key"] == "none"
    assert redacted_keys(hidden) == ["api_key", "user.Password", "list.0.hf_token"]
    assert values["api_key"] == "k-1234"


def test_a_saved_secret_is_asked_for() -> None:
    config = load()
    config.stats_logger.wandb.wandb_api_key = REDACTED
    with pytest.raises(ConfigError, match=r"wandb_api_key is hidden .*\$\{oc\.env:"):
        check_values(config)


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_WANDB", "from-outside")
    override = "stats_logger.wandb.wandb_api_key='${oc.env:MY_WANDB}'"
    composed = compose(find_config("gsm8k_grpo"), ["hardware=cpu", override])
    assert to_structured(composed).stats_logger.wandb.wandb_api_key == "from-outside"


def test_messages_to_the_launcher_hold_no_secret() -> None:
    import json
    import os

    from areal_dta.startup.train_process import EventWriter

    read_fd, write_fd = os.pipe()
    events = EventWriter(write_fd)
    events.secrets = {"hunter2"}
    events.send("error", text="no access with hunter2")
    event = SimpleNamespace(**json.loads(os.read(read_fd, 1000)))
    os.close(read_fd), os.close(write_fd)
    assert event.text == f"no access with {REDACTED}"
