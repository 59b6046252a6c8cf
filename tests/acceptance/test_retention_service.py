"""A dispatcher removes what was to be kept no longer."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import rows

pytestmark = pytest.mark.acceptance


async def test_a_batch_goes_some_time_after_its_end_and_one_that_runs_stays(rig):
    await rig.engine()
    rig.monitor()
    rig.dispatcher("d1", sweep_interval_s=0.2)
    running = await rig.submit(rows(1, model="nobody serves it"), keep_s=0.1)
    batch = await rig.submit(rows(3), keep_s=0.1)

    async def gone():
        return await rig.ledger.entry(batch) is None

    await rig.until(gone, "the batch goes")
    assert rig.storage.batch_ids() == [running]
    assert [entry.id for entry in await rig.ledger.recent()] == [running]
