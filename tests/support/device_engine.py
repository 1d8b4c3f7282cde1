"""A whole engine over built models, driven by hand: submit, run, read answers."""

from __future__ import annotations

from array import array

from engine_rig import Answer

from worker.config import WorkerConfig
from worker.engine.assembly import assemble
from worker.messages import (
    AgentLink,
    Grant,
    GrantAnswer,
    SamplingParams,
    Status,
    StepOutput,
    Submit,
    ToEngine,
    ToFront,
    TransitionRequest,
)
from worker.model.build import Models


class ListChannel:
    """What the engine is told and says, as lists."""

    def __init__(self) -> None:
        self.inbox: list[ToEngine] = []
        self.outbox: list[ToFront] = []

    def poll(self, timeout_s: float) -> list[ToEngine]:
        """All that is there; waiting would be for nobody."""
        taken, self.inbox = self.inbox, []
        return taken

    def send(self, message: ToFront) -> None:
        """Keep all but the status."""
        if not isinstance(message, Status):
            self.outbox.append(message)


class DeviceEngine:
    """An engine over models that outlive it; `gamma` may be changed between steps."""

    def __init__(
        self, config: WorkerConfig, models: Models, *, vocab_size: int, eos: tuple[int, ...] = ()
    ) -> None:
        self.channel = ListChannel()
        self.engine = assemble(
            config,
            models,
            self.channel,
            vocab_size=vocab_size,
            eos_token_ids=eos,
            stop_detector=lambda stop, least: None,  # type: ignore[arg-type, return-value]
            num_threads=1,
        )

    def set_gamma(self, gamma: int, num_extra_drafts: int = 0) -> None:
        """Use another gamma from the next step on, and draft so many more of each row."""
        from worker.engine.decisions import NO_BUCKET, Choice, Decisions

        decisions = Decisions(planned=False, fixed_gamma=gamma)
        decisions._fallback = Choice(gamma, gamma, NO_BUCKET, num_extra_drafts=num_extra_drafts)
        self.engine.planner._decisions = decisions

    def submit(
        self,
        request_id: int,
        prompt: list[int],
        sampling: SamplingParams,
        prior: tuple[int, ...] = (),
    ) -> None:
        """Queue a request, or one whose answer has begun elsewhere with `prior`."""
        self.channel.inbox.append(
            Submit(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=sampling,
                prior_token_ids=list(prior),
            )
        )

    def preempt(self, num_rows: int, max_turns: int = 500) -> None:
        """Turn until `num_rows` run at once, then with no block left until one is preempted."""
        scheduler = self.engine.scheduler
        turns = iter(range(max_turns))
        while scheduler.num_running < num_rows:
            next(turns)
            self.engine.turn()
        taken = scheduler.blocks.reserve(scheduler.blocks.num_free)
        assert taken is not None
        while scheduler.num_preemptions == 0:
            next(turns)
            self.engine.turn()
        scheduler.blocks.release_reserved(taken)

    def run(self, max_turns: int = 2000, *, check: bool = True) -> dict[int, Answer]:
        """Turn until nothing is left; answers by request, of all that was said so far."""
        for _ in range(max_turns):
            self.engine.turn()
            if check:
                self.engine.scheduler.check_integrity()
            if not self.channel.inbox and not self.engine.scheduler.has_work:
                self.engine.turn()  # what is in flight retires
                return self.answers()
        raise AssertionError("requests are left")

    def answers(self) -> dict[int, Answer]:
        """What the engine said, by request."""
        answers: dict[int, Answer] = {}
        for message in self.channel.outbox:
            assert isinstance(message, StepOutput)
            token_ids, start = array("i", message.token_ids), 0
            for request_id, count in zip(message.request_ids, message.num_tokens, strict=True):
                answers.setdefault(request_id, Answer()).token_ids += token_ids[
                    start : start + count
                ]
                start += count
            for columns in message.prompt_logprobs:
                answers.setdefault(columns.request_id, Answer()).prompt_logprobs.take(columns)
            for columns in message.logprobs:
                answers[columns.request_id].logprobs.take(columns)
            for finished in message.finished:
                answers.setdefault(finished.request_id, Answer()).finished = finished
        return answers


class InProcessAgent:
    """Does what grants allow, at once, on the arena itself; asks for expansion and contraction."""

    def __init__(self, engine: DeviceEngine, models: Models) -> None:
        layout = models.layout
        self._engine, self._layout, self._memory = engine, layout, models.arena.memory
        start = layout.image_offset
        self._image_span = slice(start, start + layout.image_bytes)
        self._image = self._memory[self._image_span].clone()
        self._num_requests = 0
        self.num_copied = 0
        engine.channel.inbox.append(AgentLink(connected=True, stream=1))

    def ask(self, kind: str) -> None:
        """Request "expand" or "contract"."""
        self._num_requests += 1
        self._engine.channel.inbox.append(
            TransitionRequest(request_id=self._num_requests, kind=kind)
        )

    def work(self) -> None:
        """Answer the grants that were said since the last call, and forget other memory talk."""
        outbox = self._engine.channel.outbox
        for message in [m for m in outbox if not isinstance(m, StepOutput)]:
            outbox.remove(message)
            if isinstance(message, Grant):
                self._do(message)
                self._engine.channel.inbox.append(GrantAnswer(grant_id=message.grant_id, ok=True))

    def _do(self, grant: Grant) -> None:
        if grant.kind == "load":
            self._memory[self._image_span].copy_(self._image)
            return
        size = self._layout.block_bytes
        for source, destination in zip(grant.source_ids, grant.destination_ids, strict=True):
            at, to = self._layout.block_offset(source), self._layout.block_offset(destination)
            self._memory[to : to + size].copy_(self._memory[at : at + size])
            self.num_copied += 1
