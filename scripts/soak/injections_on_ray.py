"""The injection of the soak of failures that needs Ray: a lost node."""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from scripts.soak.injections import STEPS, Inject, Wrong, check_end, expect, main_job, run_command
from tests.e2e import jobs
from tests.e2e.test_ray_nodes import SMALL, let_reward_wait, lose, ray_of_nodes

NODES = ("127.0.0.2", "127.0.0.3")


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
            words = main_job(folder, *on_ray)
            run = threading.Thread(
                target=lambda: ended.append(run_command(words, folder, RAY_ADDRESS=cluster.address)), daemon=True
            )
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
