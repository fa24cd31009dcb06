"""The injections of the soak of failures that need Ray: a lost node, a full object store."""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import torch

from scripts.soak.injections import STEPS, Inject, Wrong, check_end, expect, main_job, run_command
from tests.e2e import jobs
from tests.e2e.test_ray_nodes import SMALL, let_reward_wait, lose, ray_of_nodes
from tests.runtime_workers import Keeper
from tests.small_ray import cpus, small_ray
from verl.data.batch import Batch
from verl.runtime.group import Layout
from verl.runtime.ray_group import RayGroup
from verl.utils.errors import VerlError

NODES = ("127.0.0.2", "127.0.0.3")
STORE, BATCH = 80 << 20, 15 << 20  # bytes; Ray's smallest store is of 75 MiB
FULL_DISK = {
    "_system_config": {"local_fs_capacity_threshold": 0.0001}
}  # Ray takes a disk of which this is used as full


@contextmanager
def lost_node() -> Iterator[Inject]:
    """One of two nodes is lost in some step of a run, and another one joins."""

    def inject(draw: Random) -> str:
        with tempfile.TemporaryDirectory() as name, ray_of_nodes(0, *NODES) as cluster:
            folder = Path(name)
            jobs.prepare(folder)
            saved, gone = folder / "run" / f"global_step_{draw.randrange(1, STEPS)}" / "trainer.json", folder / "gone"
            let_reward_wait(folder, saved, gone)
            lost = draw.randrange(2)
            on_ray = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.node_wait_s=120"]
            ended: list[tuple[int, str]] = []
            words, at = main_job(folder, *on_ray), {"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}
            run = threading.Thread(target=lambda: ended.append(run_command(words, folder, **at)), daemon=True)
            run.start()
            while not saved.exists() and run.is_alive():
                time.sleep(0.05)
            time.sleep(draw.uniform(0.0, 1.0))
            [node] = [node for node in cluster.worker_nodes if node.node_ip_address == NODES[lost]]
            lose(cluster, node)
            gone.touch()
            cluster.add_node(num_cpus=2, node_ip_address="127.0.0.4", **SMALL)
            run.join()
            if not ended:
                raise Wrong("the run did not end")
            code, said = ended[0]
            never = f"its actor on node {NODES[1 - lost]} has ended|restart 2"
            culprit = f"error: rank \\d failed in (.*\n)*.*its actor on node {NODES[lost]} has ended"
            return check_end(True, code, expect(said, culprit, "restart 1 of 3: all ranks, from step", never=never))

    yield inject


def fill_store(has_disk: bool, count: int) -> str:
    """What is said where two ranks keep `count` batches, each in Ray's store; their sums where all have room."""
    with small_ray(object_store_memory=STORE, **({} if has_disk else FULL_DISK)):
        group = RayGroup(Keeper, Layout.data_parallel(2), cpus())
        try:
            for number in range(count):
                tokens = torch.full((BATCH // 8,), number)
                group.broadcast("keep", Batch(torch.tensor([0, len(tokens)]), {"tokens": tokens}, {}))
            return str(group.broadcast("sums"))
        except VerlError as error:
            return f"error: {error}\nand afterwards: {group.broadcast('rank')}"
        finally:
            group.close()


@contextmanager
def full_store() -> Iterator[Inject]:
    """Ranks keep more than the object store of their node holds; the disk behind it has room, or has none."""

    def inject(draw: Random) -> str:
        has_disk, count = draw.random() < 0.4, draw.randrange(8, 12)
        said = fill_store(has_disk, count)
        if has_disk:
            sums = [number * (BATCH // 8) for number in range(count)]
            return said if said == str([sums, sums]) else expect(said, "what the ranks were given")
        named = (
            f"error: Ray's object store on this node .* holds {STORE / 1e6:.1f} MB, .* has room for 15.7 MB of a call"
        )
        return expect(said, named, "object_store_memory=BYTES", "and afterwards: \\[0, 1\\]")

    yield inject
