"""Everything the servicers, the clients and `main` share about this worker."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nightjar.errors import InvalidRequest, Unavailable
from nightjar.validation import Limits
from worker.config import WorkerConfig, resolved
from worker.front.admission import Admission
from worker.front.engine_client import EngineClient
from worker.text.chat_template import Chat
from worker.text.tokenizer import Tokenizer

# Shorter prompts are tokenized in less time than a thread takes to start on them.
LONG_PROMPT_CHARACTERS = 4096


class WorkerState:
    """One worker: its engine, who is let in, and, once the engine is ready, how to read prompts."""

    def __init__(self, config: WorkerConfig, engine: EngineClient) -> None:
        self.config = config
        self.engine = engine
        self.admission = Admission(
            resolved(config).max_num_seqs, config.max_waiting, config.max_waiting_tokens
        )
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.model_name = served_name(config)
        self.tokenizer: Tokenizer | None = None
        self.planner_connected: Callable[[], bool] = lambda: False
        self.agent_attached: Callable[[], bool] = lambda: False
        self.planner_reason: Callable[[], str] = str  # why there is none, if one is configured
        self.agent_reason: Callable[[], str] = str
        self._longest_token = 0  # characters
        self._threads = ThreadPoolExecutor(2, "tokenize")

    @property
    def serving(self) -> bool:
        """Whether a request that came now would be answered."""
        return self.engine.responsive and self.tokenizer is not None and not self.admission.draining

    def limits(self) -> tuple[Limits, Tokenizer]:
        """What a request may hold, and the tokenizer that turns its answer into text.

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

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """From now on prompts can be read."""
        self._longest_token = max(map(len, tokenizer.vocabulary().values()))
        self.tokenizer = tokenizer

    async def encode(self, prompt: str | Chat, limits: Limits) -> list[int]:
        """Token ids of a text, or of a chat under the model's own template.

        A long prompt is tokenized beside the event loop, and not at all if it is longer than
        as many of the longest token as the context holds.

        Raises:
            InvalidRequest: It is that long, is no valid text, or has no place in the template.
        """
        assert self.tokenizer is not None
        most = limits.max_model_len * self._longest_token
        encode: Callable[[], list[int]]
        if isinstance(prompt, str):
            field, size, more = "text", len(prompt), 0
            encode = functools.partial(self.tokenizer.encode, prompt)
        else:
            field, size, more = "chat.messages", prompt.num_characters, prompt.num_json_characters
            encode = functools.partial(self.tokenizer.encode_chat, prompt, most)
        if size > most:
            raise InvalidRequest(
                field,
                f"{size} characters can never fit the context of {limits.max_model_len} tokens",
            )
        if size + more < LONG_PROMPT_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode)


def served_name(config: WorkerConfig) -> str:
    """Name that requests may use: the one given, else the alias, Hub id or folder's name."""
    if config.served_model_name:
        return config.served_model_name
    folder = Path(config.model).expanduser()
    return folder.resolve().name if folder.is_dir() else config.model
