import asyncio
import threading
from concurrent.futures import Future

import pytest

from rllm.errors import StoreError
from rllm.gateway.core import DurableWrites


async def test_thousand_writes_finished_in_another_thread_wake_all_waiters():
    writes = DurableWrites()
    futures = [Future() for _ in range(1000)]

    def finish():
        for future in futures:
            future.set_result(None)

    waiting = asyncio.gather(*(writes.wait(future) for future in futures))
    await asyncio.sleep(0)
    assert writes.pending == 1000
    thread = threading.Thread(target=finish)
    thread.start()
    await asyncio.wait_for(waiting, 10)
    thread.join()
    assert writes.pending == 0


async def test_failed_and_cancelled_waits_affect_only_themselves():
    writes = DurableWrites()
    failing, fine, left = Future(), Future(), Future()
    leaver, *others = [writes.wait(future) for future in (left, failing, fine)]
    await asyncio.sleep(0)
    leaver.cancel()
    left.set_result(None)
    failing.set_exception(StoreError("disk full"))
    fine.set_result(None)
    with pytest.raises(StoreError, match="disk full"):
        await others[0]
    await others[1]


def test_write_after_the_end_of_its_loop_does_not_block():
    writes, left = DurableWrites(), Future()

    async def leave():
        leaver = writes.wait(left)
        await asyncio.sleep(0)
        assert not leaver.done()

    asyncio.run(leave())
    left.set_result(None)

    async def wait():
        later = Future()
        waiting = writes.wait(later)
        await asyncio.sleep(0)
        later.set_result(None)
        await asyncio.wait_for(waiting, 10)

    asyncio.run(wait())
