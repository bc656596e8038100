"""A rollout controller with a collector at work on it, without processes.

Only the workers are stood in for: a scheduler that answers with ready-made results.
"""

import asyncio
import random
import time

import torch
from areal.api import Worker
from areal.api.cli_args import InferenceEngineConfig
from areal.infra.controller.rollout_controller import RolloutController
from areal.infra.rpc.rtensor import RTensor, TensorShardInfo
from areal.infra.staleness_manager import StalenessManager
from areal.infra.workflow_executor import BatchTaskDispatcher
from areal.utils import logging
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from areal_dta.collector.collector import Collector
from areal_dta.collector.planner import BatchPlanner
from areal_dta.collector.prompt_issuer import PromptIssuer
from areal_dta.collector.rejections import RejectionWatch
from areal_dta.collector.rollout_hook import CollectorHook
from tests.engine.dispatch_scenarios import make_items

BATCH = 4


class Workers:
    """Answers in place of rollout workers, in any order.

    Args:
        fates: index of a prompt -> what becomes of its rollouts.
        wait: awaited with an index before its rollout ends.
    """

    def __init__(self, fates, wait=None):
        self.fates, self.wait = fates, wait
        self.controller = None
        self.results = {}
        self.prompts = []  # indices, as they were submitted
        self._random = random.Random(0)

    async def async_call_engine(self, worker_id, method, *args, **kwargs):
        number = kwargs["task_id"]
        if method == "submit":
            index = kwargs["data"]["index"]
            self.prompts.append(index)
            # with the version that generates its first token
            self.results[number] = index, self.controller._version
            if self.wait is None:
                await asyncio.sleep(self._random.random() / 50)
            else:
                await self.wait(index)
            fate = self.fates.get(index)
            if fate == "slow":  # AReaL issues more after a second
                await asyncio.sleep(1.3)
            if fate == "unreachable once":
                del self.fates[index]
            if fate in ("unreachable", "unreachable once"):
                raise ConnectionError("worker is gone")
            self.controller._resolve_task_future(number)
            return number
        assert method == "wait_for_task"
        return self._result(*self.results[number])

    def _result(self, index, version):
        if self.fates.get(index) == "filtered":
            return None
        (item,) = make_items((3,), seed=index)
        item["index"] = torch.full((3,), index)
        item["versions"][item["versions"] >= 0] = version
        if self.fates.get(index) == "nan":
            item["rewards"][0] = torch.nan
        if self.fates.get(index) == "images":
            item["multi_modal_input"] = [{"pixel_values": torch.ones(2)}] * 3
        if self.fates.get(index, "").startswith("lost"):
            # on a worker that is gone
            shard = TensorShardInfo(f"shard {index}", "127.0.0.1:9")
            item["input_ids"] = RTensor(shard, item["input_ids"].to("meta"))
        if self.fates.get(index) == "lost once":
            del self.fates[index]
        return item


def prompt_loader(num=12, batch_size=BATCH, shuffle=False, **options):
    data = [{"index": i} for i in range(num)]
    sampler = DistributedSampler(data, 1, 0, shuffle=shuffle, drop_last=True)
    return PromptIssuer(
        StatefulDataLoader(
            data, batch_size, sampler=sampler, drop_last=True, collate_fn=lambda x: x
        ),
        **options,
    )


class Rollout:
    """A controller with a collection, without processes."""

    def __init__(
        self,
        fates=None,
        staleness=1,
        loader=None,
        wait=None,
        max_staleness=None,
        is_collected=True,
        **limits,
    ):
        self.workers = Workers(fates or {}, wait)
        config = InferenceEngineConfig(
            backend="sglang:d1",
            consumer_batch_size=BATCH,
            max_concurrent_rollouts=2 * BATCH,
            max_head_offpolicyness=staleness,
            request_timeout=20,
        )
        self.controller = controller = RolloutController(None, config, self.workers)
        self.workers.controller = controller
        controller.workers = [Worker(id="rollout/0", ip="127.0.0.1")]
        controller._worker_role = "rollout"
        controller._callback_host, controller._callback_port = "127.0.0.1", 1
        controller._staleness_manager = StalenessManager(
            controller, 2 * BATCH, BATCH, staleness
        )
        controller._dispatcher = BatchTaskDispatcher(
            64, controller._create_submit_callback, controller._staleness_manager
        )
        controller._dispatcher.initialize(logger=logging.getLogger("test"))
        self.loader = loader or prompt_loader(100)
        self.collector = Collector(
            max_staleness=max_staleness,
            watch=RejectionWatch(BATCH, **limits),
            takes_images=False,
        )
        self.hook = None
        if is_collected:
            self.hook = CollectorHook(
                controller, self.collector, self.loader, fetch_timeout_seconds=1.0
            )
        self.planner = BatchPlanner()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.hook is not None:
            self.hook.close()
        self.controller._dispatcher.destroy()

    def batch(self, **kwargs):
        def prepare():
            return self.controller.prepare_batch(
                self.loader, workflow="any", group_size=3, **kwargs
            )

        if self.hook is None:
            return prepare()
        return self.hook.next_batch(
            prepare, lambda batch: batch.plan_now(self.planner, 2, 1)
        )

    def set_version(self, version):
        self.controller._version = version
        dispatcher = self.controller._dispatcher
        with dispatcher._input_cv:
            dispatcher._input_cv.notify()

    def wait_until(self, condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def indices(batch):
    return [int(item["index"][0]) for item in batch]
