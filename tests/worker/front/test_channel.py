"""The channel between front and engine."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from conditions import until

from worker.channel import ChannelError, EngineChannel, FrontChannel
from worker.messages import (
    Abort,
    Decision,
    Progress,
    SamplingParams,
    Shutdown,
    StepOutput,
    Submit,
    ToEngine,
    ToFront,
)


class Pair:
    """Both ends; the engine's is used from threads, as a blocking loop would."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.received: list[ToFront] = []
        self.lost: list[Exception | None] = []
        self.opened = asyncio.Event()
        self.front = FrontChannel(
            lambda _: self.opened.set(), self.received.append, self.lost.append
        )

    async def connect(self) -> EngineChannel:
        """The engine's end, once the front has accepted it."""
        engine = await asyncio.to_thread(EngineChannel, self.path)
        await asyncio.wait_for(self.opened.wait(), 10)
        return engine


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """A front that listens."""
    made = Pair(str(tmp_path / "engine.sock"))
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: made.front, made.path)
    yield made
    made.front.close()
    server.close()


def output(row: int, num_tokens: int = 1) -> StepOutput:
    """One row's step."""
    ids = struct.pack(f"<{num_tokens}i", *range(num_tokens))
    return StepOutput(request_ids=[row], num_tokens=[num_tokens], token_ids=ids, finished=[])


async def test_messages_arrive_whole_and_in_order_both_ways(pair: Pair) -> None:
    """Whatever the frames' sizes, each message equals what was sent."""
    engine = await pair.connect()
    sent: list[ToFront] = [output(i, num_tokens=i * 97) for i in range(100)]
    for message in sent:
        engine.send(message)
    flushing = asyncio.create_task(asyncio.to_thread(engine.flush, 10))
    assert await flushing
    await until(lambda: len(pair.received) == 100, "all arrived")
    assert pair.received == sent
    sampling = SamplingParams(seed=2**64 - 1, max_tokens=5, stop=("é",))
    down: list[ToEngine] = [
        Submit(request_id=i, prompt_token_ids=list(range(2000)), sampling=sampling)
        for i in range(50)
    ]
    down.append(
        Decision(
            decision_id="d",
            policy_version="v",
            batch_size_edges=(1, 2),
            kv_token_edges=(),
            table={0: (1, 1)},
            bucket=0,
            hold_steps=1,
            explored=True,
            session=b"\0",
        )
    )
    for each in down:
        pair.front.send(each)
    got: list[ToEngine] = []
    while len(got) < len(down):
        got += await asyncio.to_thread(engine.poll, 1.0)
    assert got == down
    engine.close()


async def test_poll_waits_no_longer_than_it_is_told(pair: Pair) -> None:
    """Zero returns at once; a message ends a wait early."""
    engine = await pair.connect()
    assert engine.poll(0) == []
    waiting = asyncio.create_task(asyncio.to_thread(engine.poll, 60))
    pair.front.send(Abort(request_id=1))
    assert await asyncio.wait_for(waiting, 10) == [Abort(request_id=1)]
    assert await asyncio.to_thread(engine.poll, 0.01) == []
    engine.close()


async def test_a_front_that_reads_nothing_never_blocks_the_engine(tmp_path: Path) -> None:
    """Sends return at once while the buffer has room, raise past its bound, and lose nothing."""
    path = str(tmp_path / "engine.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        engine = EngineChannel(path, max_unsent_bytes=1_000_000)
        front, _ = listener.accept()
        longest, sent = 0.0, 0
        with pytest.raises(ChannelError, match="unread"):  # noqa: PT012, the loop is the point
            while True:
                begin = time.monotonic()
                engine.send(output(sent, 1000))
                longest = max(longest, time.monotonic() - begin)
                sent += 1
        assert longest < 0.5
        assert sent * 4000 > 900_000
        engine.close(timeout_s=0.05)
        front.close()


async def test_a_slow_front_still_gets_everything(pair: Pair) -> None:
    """What the socket did not take is sent by later polls, while the engine waits for messages."""
    engine = await pair.connect()
    for i in range(300):  # the event loop reads nothing meanwhile
        engine.send(output(i, 2000))
    waiting = threading.Thread(target=engine.poll, args=(5,))
    waiting.start()
    await until(lambda: len(pair.received) == 300, "all arrived")
    pair.front.send(Abort(request_id=1))
    await asyncio.to_thread(waiting.join)
    engine.close()


async def test_a_front_that_is_gone_ends_the_engine(pair: Pair) -> None:
    """Every poll from then on says Shutdown, and sends are dropped."""
    engine = await pair.connect()
    pair.front.send(Abort(request_id=1))
    pair.front.close()
    await until(lambda: bool(pair.lost), "closed")
    assert engine.poll(0) == [Abort(request_id=1)]
    assert [engine.poll(0), engine.poll(9)] == [[Shutdown()]] * 2
    engine.send(Progress(stage="late"))
    engine.close()


async def test_an_engine_that_is_gone_is_told(pair: Pair) -> None:
    """What it had sent arrives first."""
    engine = await pair.connect()
    engine.send(Progress(stage="last"))
    engine.close()
    await until(lambda: bool(pair.lost), "told")
    assert pair.received == [Progress(stage="last")]
    assert pair.lost == [None]
    pair.front.send(Shutdown())  # dropped


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("<I", 2**31),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 12) + b"\x81\xa4type\xa5never",
    ],
)
async def test_a_broken_frame_ends_the_channel(pair: Pair, garbage: bytes) -> None:
    """Too long, no msgpack, or of no known kind: the connection ends with a reason."""
    _, writer = await asyncio.open_unix_connection(pair.path)
    writer.write(garbage)
    await until(lambda: bool(pair.lost), "ended")
    assert isinstance(pair.lost[0], ChannelError)
    writer.close()
