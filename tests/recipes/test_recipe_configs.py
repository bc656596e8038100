"""Every configuration of a recipe: loads, has a dense twin, fits its schema."""

from importlib.util import find_spec

import pytest

from areal_dta.config.composed import ConfigError
from areal_dta.config.resolved import resolve
from areal_dta.config.schema import DTAGRPOConfig, to_structured
from areal_dta.startup.checks import check_agent, check_group_norms
from areal_dta.startup.compose import compose, find_config
from recipes.gsm8k_calculator.agent import CalculatorAgent
from recipes.tau2.config import Tau2Config

USER = "tau2.user.base_url=http://127.0.0.1:9/v1"
TAU2 = {
    "tau2_smoke.yaml": ("mock", []),
    "tau2_telecom_solo_qwen3_1.7b.yaml": ("telecom_solo", []),
    "tau2_airline_qwen3_1.7b.yaml": ("airline", [USER]),
    "tau2_airline_qwen3_8b.yaml": ("airline", [USER]),
}


def load(name, *overrides):
    return to_structured(compose(find_config(name), ["hardware=cpu", *overrides]))


@pytest.mark.parametrize("name", TAU2)
def test_a_tau2_configuration_and_its_dense_twin(name):
    domain, overrides = TAU2[name]
    config = load(name, *overrides)
    assert isinstance(config, Tau2Config)
    config.tau2.validate()
    assert config.tau2.domain == config.train_dataset.path == domain
    backend = resolve(config).actor.backend
    assert backend.engine == "dta"
    twin = load(name, *overrides, f"actor.backend=fsdp:d{backend.num_ranks}")
    assert resolve(twin).actor.backend.engine == "fsdp"
    assert config.train_dataset.batch_size % backend.dp_size == 0
    check_group_norms(config)


@pytest.mark.parametrize("name", TAU2)
def test_the_workflow_can_be_made_from_it(name):
    if not find_spec("tau2"):
        pytest.skip("needs the extra tau2")
    from recipes.tau2.workflow import Tau2Workflow

    domain, overrides = TAU2[name]
    config = load(name, *overrides)
    workflow = Tau2Workflow(**config.workflow_arguments(config.gconfig))
    assert workflow.options == config.tau2


def test_a_user_model_must_be_named():
    with pytest.raises(ConfigError, match="needs tau2.user.base_url"):
        check_agent(load("tau2_airline_qwen3_1.7b.yaml"))


def test_the_calculator_agent_can_be_made_from_its_configuration():
    config = load("gsm8k_calculator.yaml")
    assert isinstance(config, DTAGRPOConfig)
    CalculatorAgent(**config.workflow_arguments(config.gconfig))
    check_agent(config)


@pytest.mark.parametrize(
    "override, message",
    [
        ("tau2.domian=mock", "unknown key 'tau2.domian' .*tau2.domain"),
        ("tau2.max_steps=many", "tau2.max_steps"),
        ("schema=recipes.tau2.config.Nope", "schema=.*Nope cannot be imported"),
        ("schema=recipes.tau2.options.Tau2Options", "not a subclass of DTAGRPOConfig"),
    ],
)
def test_keys_that_the_schema_does_not_have(override, message):
    with pytest.raises(ConfigError, match=message):
        load("tau2_smoke.yaml", override)


@pytest.mark.parametrize(
    "override, message",
    [
        ("rollout.agent.export_style=concat", "set rollout.agent.chat_template_type"),
        ("rollout.agent.chat_template_type=concat", "chat_template_type=hf"),
        ("tau2.domain=banking", "unknown tau2 domain"),
        ("train_dataset.path=airline", "tau2.domain=mock; set it to"),
        ("tau2.user.kind=llm", "needs tau2.user.base_url"),
    ],
)
def test_settings_that_cannot_work_together(override, message):
    if not find_spec("tau2"):
        pytest.skip("needs the extra tau2")
    with pytest.raises(ConfigError, match=message):
        check_agent(load("tau2_smoke.yaml", override))


def test_without_the_extra_it_says_so(monkeypatch):
    import recipes.tau2.config as config_module

    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[tau2\]"'):
        check_agent(load("tau2_smoke.yaml"))
