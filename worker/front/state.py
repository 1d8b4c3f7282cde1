"""Everything the servicers, the clients and `main` share about this worker."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nightjar.errors import Unavailable
from nightjar.validation import Limits
from worker.config import WorkerConfig
from worker.front.admission import Admission
from worker.front.engine_client import EngineClient
from worker.text.tokenizer import Tokenizer

# Shorter prompts are tokenized in less time than a thread takes to start on them.
LONG_PROMPT_CHARACTERS = 4096


class WorkerState:
    """One worker: its engine, who is let in, and, once the engine is ready, how to read prompts."""

    def __init__(self, config: WorkerConfig, engine: EngineClient) -> None:
        self.config = config
        self.engine = engine
        self.admission = Admission(config.max_num_seqs, config.max_waiting)
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.model_name = served_name(config)
        self.tokenizer: Tokenizer | None = None
        self.planner_connected: Callable[[], bool] = lambda: False
        self.agent_attached: Callable[[], bool] = lambda: False
        self._threads = ThreadPoolExecutor(2, "tokenize")

    @property
    def serving(self) -> bool:
        """Whether a request that came now would be answered."""
        return self.engine.responsive and self.tokenizer is not None and not self.admission.draining

    def limits(self) -> tuple[Limits, Tokenizer]:
        """What a request may hold, and the tokenizer to read it with.

        Raises:
            Unavailable: The engine is not ready yet, or gone.
        """
        ready = self.engine.ready
        if ready is None or self.tokenizer is None:
            raise Unavailable("the worker is starting")
        limits = Limits(
            model=self.model_name, vocab_size=ready.vocab_size, max_model_len=ready.max_model_len
        )
        return limits, self.tokenizer

    async def encode_text(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Token ids of a plain prompt; long ones leave the event loop free."""
        if len(text) < LONG_PROMPT_CHARACTERS:
            return tokenizer.encode(text)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, tokenizer.encode, text)

    async def encode_chat(self, tokenizer: Tokenizer, messages: list[tuple[str, str]]) -> list[int]:
        """Token ids of (role, content) messages under the model's own template."""
        if sum(len(content) for _, content in messages) < LONG_PROMPT_CHARACTERS:
            return tokenizer.encode_chat(messages)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, tokenizer.encode_chat, messages)


def served_name(config: WorkerConfig) -> str:
    """Name that requests may use: the one given, else the alias, Hub id or folder's name."""
    if config.served_model_name:
        return config.served_model_name
    folder = Path(config.model).expanduser()
    return folder.resolve().name if folder.is_dir() else config.model
