"""The launcher's configuration with a section `tau2`."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import requests

from areal_dta.config.schema import DTAGRPOConfig
from recipes.tau2.domains import INSTALL_HINT, find_domain
from recipes.tau2.options import Tau2Options, UserOptions

_USER_CHECK_SECONDS = 10.0


@dataclass
class Tau2Config(DTAGRPOConfig):
    """A GRPO job on tau2; a YAML names it as its `schema`."""

    tau2: Tau2Options = field(default_factory=Tau2Options)
    workflow: str = "recipes.tau2.workflow.Tau2Workflow"
    dataset_fn: str = "recipes.tau2.dataset.load_dataset"

    def workflow_arguments(self, gconfig: Any) -> dict[str, Any]:
        from recipes.tau2.workflow import workflow_kwargs

        return workflow_kwargs(self.tau2, gconfig, self.enable_thinking)

    def check(self) -> None:
        if find_spec("tau2") is None:
            raise ValueError(f"tau2 is not installed; {INSTALL_HINT}")
        self.tau2.validate()
        if self.train_dataset.path != self.tau2.domain:
            raise ValueError(
                f"train_dataset.path={self.train_dataset.path}, but "
                f"tau2.domain={self.tau2.domain}; set it to ${{tau2.domain}}"
            )
        if self.tau2.user.kind == "llm" and not find_domain(self.tau2.domain).solo:
            check_user_server(self.tau2.user)


def check_user_server(options: UserOptions) -> None:
    """Check that the user model's server is up.

    Raises:
        ValueError: nothing answers at the user model's URL.
    """
    url = f"{options.base_url.rstrip('/')}/models"
    headers = {"Authorization": f"Bearer {options.api_key}"}
    try:
        requests.get(url, headers=headers, timeout=_USER_CHECK_SECONDS)
    except requests.RequestException as error:
        raise ValueError(
            f"the user model does not answer at {url} ({type(error).__name__}); start "
            "its server, set tau2.user.base_url, or use tau2.user.kind=rule"
        ) from error
