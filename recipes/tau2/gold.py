"""The reference solution of a task, played by an agent and a user together."""

from __future__ import annotations

from recipes.tau2.api import Action, Task


class GoldScript:
    """A cursor in the task's reference actions, shared by both who play them."""

    def __init__(self, task: Task) -> None:
        criteria = task.evaluation_criteria
        self._actions: list[Action] = list(criteria.actions or []) if criteria else []
        self._facts: list[str] = (
            list(criteria.communicate_info or []) if criteria else []
        )
        self._next = 0

    @property
    def done(self) -> bool:
        return self._next == len(self._actions)

    @property
    def next_is_users(self) -> bool:
        return not self.done and self._actions[self._next].requestor == "user"

    def next_agent_action(self, solo: bool) -> Action | None:
        """The next action if it is the agent's; alone it performs the user's too."""
        if self.done or (self.next_is_users and not solo):
            return None
        return self._take()

    def next_user_action(self) -> Action | None:
        """The next action if it is the user's."""
        return self._take() if self.next_is_users else None

    def closing_words(self) -> str:
        """Everything that the agent is expected to tell the user."""
        return "; ".join(["That is done", *self._facts]) + "."

    def _take(self) -> Action:
        action = self._actions[self._next]
        self._next += 1
        return action
