"""Environments in processes of their own behave as those of this process."""

import asyncio
import os
from importlib.util import find_spec

import pytest

if not find_spec("tau2"):
    pytest.skip("needs the extra tau2", allow_module_level=True)

from recipes.tau2.api import ToolCall
from recipes.tau2.domains import find_domain, find_task, task_ids
from recipes.tau2.options import Tau2Options
from recipes.tau2.play.episode import run_episode
from recipes.tau2.play.policies import GoldPolicy, GoldScript
from recipes.tau2.play.users import GoldUser
from recipes.tau2.workers.environments import (
    EnvironmentLostError,
    EnvironmentPool,
    build_environment,
)
from recipes.tau2.workers.scoring import score

RETAIL = find_domain("retail")


@pytest.fixture(scope="module")
def pool():
    with EnvironmentPool(1) as pool:
        yield pool


def play(task_id, environments):
    script = GoldScript(find_task("retail", task_id))
    return asyncio.run(
        run_episode(
            RETAIL,
            task_id,
            GoldPolicy(script, solo=False),
            lambda task: GoldUser(script),
            Tau2Options(),
            environments,
        )
    )


def test_the_reference_solution_in_either_place(pool):
    task_id = task_ids("retail", "test")[0]
    remote, local = play(task_id, pool), play(task_id, None)
    assert [(m.role, m.content) for m in remote.messages] == [
        (m.role, m.content) for m in local.messages
    ]
    messages = [m.model_dump() for m in remote.messages]
    assert score("retail", task_id, remote.termination, messages) == 1.0


def test_answers_and_errors_of_tools_are_the_same(pool):
    local = build_environment(RETAIL)
    remote = pool.make(RETAIL, task_ids("retail", "test")[0])
    remote.set_state()
    for name, arguments in (
        ("list_all_product_types", {}),
        ("get_user_details", {"user_id": "nobody"}),
        ("no_such_tool", {}),
    ):
        call = ToolCall(id="1", name=name, arguments=arguments)
        assert remote.get_response(call) == local.get_response(call)
    remote.close()


def test_environments_do_not_share_a_state(pool):
    task_id = task_ids("retail", "test")[0]
    first, second = pool.make(RETAIL, task_id), pool.make(RETAIL, task_id)
    for environment in (first, second):
        environment.set_state()
    order = next(iter(build_environment(RETAIL).tools.db.orders.values()))
    look = ToolCall(
        id="1", name="get_order_details", arguments={"order_id": order.order_id}
    )
    before = second.get_response(look).content
    cancel = ToolCall(
        id="2",
        name="modify_pending_order_address",
        arguments={
            "order_id": order.order_id,
            **{"address1": "1", "address2": "2", "city": "c", "state": "s"},
            **{"country": "x", "zip": "0"},
        },
    )
    changed = not first.get_response(cancel).error
    assert (first.get_response(look).content != before) is changed
    assert second.get_response(look).content == before


def test_a_lost_process_is_an_error_and_the_next_environment_is_fresh(pool):
    task_id = task_ids("retail", "test")[0]
    lost = pool.make(RETAIL, task_id)
    lost.set_state()
    os.kill(pool._processes[0]._process.pid, 9)
    call = ToolCall(id="1", name="list_all_product_types", arguments={})
    with pytest.raises(EnvironmentLostError, match="process of retail environments"):
        lost.get_response(call)
    with pytest.raises(EnvironmentLostError, match="was lost"):
        lost.get_response(call)
    lost.close()
    fresh = pool.make(RETAIL, task_id)
    fresh.set_state()
    assert not fresh.get_response(call).error


def test_a_pool_needs_a_process():
    with pytest.raises(ValueError, match="num_processes=0"):
        EnvironmentPool(0)
