"""The ids, accounts and order of the prompts that are issued."""

import threading

import pytest

from areal_dta.collector.prompt_issuer import MAX_TRIES, PROMPT_ID_KEY
from tests.collector.rollouts import prompt_loader


def test_issued_prompts_name_their_id_and_try():
    """The embedded server's draws follow from them."""
    loader = prompt_loader(add_ids=True)
    (first,) = next(iter(loader))
    assert first == {"index": 0, PROMPT_ID_KEY: "0/0"}
    loader.issue_again(first)
    (again,), (second,) = next(iter(loader)), next(iter(loader))
    assert [again[PROMPT_ID_KEY], second[PROMPT_ID_KEY]] == ["0/1", "1/0"]
    resumed = prompt_loader(add_ids=True)
    resumed.load_state_dict(loader.state_dict())
    issued = [next(iter(resumed))[0][PROMPT_ID_KEY] for _ in range(3)]
    assert issued == ["0/0", "1/0", "2/0"]
    assert PROMPT_ID_KEY not in next(iter(prompt_loader()))[0]


def test_the_accounts_do_not_wait_for_the_data_set():
    """The event loop of all rollouts waited for a slow data set in 0.1.0."""
    loader = prompt_loader()
    first = next(iter(loader))[0]
    reading, go_on = threading.Event(), threading.Event()

    class Slow:
        def __getitem__(self, index):
            reading.set()
            assert go_on.wait(timeout=30)
            return {"index": index}

    loader._dataset = Slow()
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    assert reading.wait(timeout=30)
    finished = []
    finishing = threading.Thread(target=lambda: finished.append(loader.finish(first)))
    finishing.start()
    finishing.join(timeout=10)
    was_finished = finished == [0]
    go_on.set()
    for waiting in (thread, finishing):
        waiting.join(timeout=30)
    assert was_finished


def test_a_prompt_is_never_given_up_for_its_age():
    loader = prompt_loader()
    prompts = iter(loader)
    prompt_id = None
    for _ in range(2 * MAX_TRIES):
        (prompt,) = next(prompts)
        prompt_id = loader.issue_again(prompt, has_failed=False)
        assert prompt_id == 0
    assert 0 in loader.state_dict()["unsettled"]


def test_prompts_follow_the_shuffle_of_their_epoch():
    def epochs(loader, num):
        prompts = iter(loader)
        return [[next(prompts)[0]["index"] for _ in range(12)] for _ in range(num)]

    first, second, third = epochs(prompt_loader(shuffle=True), 3)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != third
    # a restart within the second epoch, with nothing in flight
    loader = prompt_loader(shuffle=True)
    prompts = iter(loader)
    for _ in range(17):
        loader.finish(next(prompts)[0])
    again = prompt_loader(shuffle=True)
    again.load_state_dict(loader.state_dict())
    prompts = iter(again)
    rest = [next(prompts)[0]["index"] for _ in range(19)]
    assert rest == second[5:] + third


@pytest.mark.parametrize(
    "state, message",
    [
        ({"_snapshot": {}}, "another version"),
        (
            {
                "format": "areal_dta.prompts/1",
                "num_prompts": 7,
                "next": 0,
                "unsettled": [],
            },
            "7 prompts per epoch",
        ),
    ],
)
def test_a_state_of_something_else_is_refused(state, message):
    with pytest.raises(ValueError, match=message):
        prompt_loader().load_state_dict(state)
