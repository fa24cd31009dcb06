"""A full object store of Ray: what does not fit goes to the disk, and where that is full too, an error says so."""

import pytest

from scripts.soak.injections_on_ray import BATCH, STORE, fill_store
from tests.conftest import import_or_skip

pytestmark = pytest.mark.ray
COUNT = STORE // BATCH + 3


def test_batches_that_ranks_keep_beyond_the_store_go_to_the_disk():
    import_or_skip("ray")
    sums = [number * (BATCH // 8) for number in range(COUNT)]
    assert fill_store(True, COUNT) == str([sums, sums])


def test_where_the_disk_is_full_too_the_error_names_the_store_its_size_and_the_key():
    import_or_skip("ray")
    said = fill_store(False, COUNT)
    assert said.startswith("error: Ray's object store on this node (") and f"holds {STORE / 1e6:.1f} MB" in said
    assert "has room for 15.7 MB of a call's arguments" in said and "ray_init.object_store_memory=BYTES" in said
    assert said.endswith("and afterwards: [0, 1]")
