"""Answers never depend on drafts, gamma, neighbours, preemption, prefix hits or moved memory."""

from __future__ import annotations

import random

import pytest
from engine_rig import Rig, fakes, oracle, params, prompt
from fake_forward import Kind

DRAFTS: list[Kind] = ["target", "noisy", "random"]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_gamma_gives_the_same_answer(draft: Kind, temperature: float, depth: int) -> None:
    """Alone in the batch, gamma 0 to 8 give the target's own answer."""
    length = 50 if temperature else 200
    sampling = params(temperature=temperature, seed=5, max_tokens=length)
    text = prompt(random.Random(1), 21)
    expected, _ = oracle(fakes(None)[0], text, sampling)
    for gamma in range(9):
        rig = Rig(*fakes(draft), gamma=gamma, depth=depth)
        rig.submit(1, text, sampling)
        rig.run()
        assert rig.tokens(1) == expected
        usage = rig.end(1).usage
        assert usage.num_completion_tokens == length
        if draft == "target":
            assert usage.num_accepted_tokens == usage.num_draft_tokens
            # The last drafts are fewer where it is not known how far the row in flight gets.
            least = -(-(length - 1) // (gamma + 1))
            assert least <= usage.num_steps <= (min(length - 1, least + 4) if depth else least)
        assert usage.num_draft_tokens >= usage.num_accepted_tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft", [*DRAFTS, None])
def test_random_mix(draft: Kind | None, depth: int) -> None:
    """Random gammas, extra drafts, arrivals, aborts, shared prefixes, a tight pool that moves."""
    totals = {"preemptions": 0, "cached": 0, "accepted": 0, "expansions": 0, "moved": 0}
    for seed in range(12):
        rng = random.Random(f"{seed} {draft} {depth}")
        mix = Mix(rng, draft, depth)
        mix.run()
        for key, value in mix.totals.items():
            totals[key] += value
    assert totals["preemptions"] > 0
    assert totals["cached"] > 0
    assert totals["expansions"] > 0
    assert totals["moved"] > 0
    assert draft in (None, "random") or totals["accepted"] > 100


def processors(rng: random.Random) -> dict[str, object]:
    """None for most requests; any and all of them for others."""
    if rng.random() < 0.6:
        return {}
    return {
        "repetition_penalty": rng.choice([1.0, 1.0, 0.5, 1.3]),
        "presence_penalty": rng.choice([0.0, 0.0, 1.0]),
        "frequency_penalty": rng.choice([0.0, -1.5, 0.8]),
        "logit_bias": tuple(
            (token, rng.uniform(-4, 4)) for token in sorted(rng.sample(range(40), 3))
        ),
        "min_tokens": rng.choice([0, 0, 3, 12]),
    }


class Mix:
    """One random run, compared with the oracle request by request."""

    def __init__(self, rng: random.Random, draft: Kind | None, depth: int) -> None:
        self.rng = rng
        num_base, num_extra = rng.randint(10, 11), rng.randint(2, 5)
        self.target, self.draft = fakes(
            draft,
            num_base_blocks=num_base,
            num_extra_blocks=num_extra,
            draft_model_len=rng.choice([60, 512]),
        )
        self.rig = Rig(
            self.target,
            self.draft,
            gamma=lambda: rng.choice([0, 0, 1, 2, 3, 4, 5, 8]),
            extra=lambda: rng.choice([0, 0, 1, 2, 3]),
            num_base_blocks=num_base,
            num_extra_blocks=num_extra,
            max_num_seqs=rng.randint(3, 6),
            max_num_batched_tokens=rng.choice([8, 20, 64]),
            max_catchup_tokens=rng.choice([4, 16, 64]),
            max_model_len=rng.choice([100, 150]),
            depth=depth,
            eager=rng.random() < 0.5,
            ngram=draft is None and depth == 0,
            eos_token_ids=(7,),
        )
        self.totals = {"preemptions": 0, "cached": 0, "accepted": 0, "expansions": 0, "moved": 0}

    def run(self) -> None:
        """Serve a random set of requests and compare every answer."""
        rng, rig = self.rng, self.rig
        stems = [prompt(rng, rng.randint(20, 50)) for _ in range(2)]
        requests = {}
        aborted = set()
        for request_id in range(rng.randint(8, 16)):
            stem = rng.choice(stems)
            text = stem[: rng.randint(1, len(stem))] + prompt(rng, rng.randint(0, 10))
            sampling = params(
                **processors(rng),
                temperature=rng.choice([0.0, 0.7, 1.0]),
                seed=rng.getrandbits(63),
                max_tokens=rng.randint(1, 60),
                max_gamma=rng.choice([None, None, 0, 1, 3]),
                ignore_eos=rng.random() < 0.7,
                stop_token_ids=tuple(prompt(rng, rng.choice([0, 0, 1]))),
            )
            requests[request_id] = text, sampling
            rig.submit(request_id, text, sampling)
            for _ in range(rng.choice([0, 0, 1, 3, 10])):
                self.turn()
            if rng.random() < 0.15:
                victim = rng.randrange(request_id + 1)
                rig.abort(victim)
                aborted.add(victim)
                rig.scheduler.check_integrity()
        for _ in range(5000):
            if not rig.scheduler.has_work:
                break
            self.turn()
        rig.drain()
        assert not rig.scheduler.has_work
        assert not any(result.draft_failed for done in rig.done for result in done.rows)
        for request_id, (text, sampling) in requests.items():
            expected, reason = oracle(
                self.target, text, sampling, max_model_len=rig.max_model_len, eos_token_ids=(7,)
            )
            finished = rig.end(request_id)
            if finished.reason == "abort":
                assert request_id in aborted
                got = rig.tokens(request_id)
                assert got == expected[: len(got)]
                continue
            assert rig.tokens(request_id) == expected
            assert finished.reason == reason
            usage = finished.usage
            assert usage.num_completion_tokens == len(expected)
            assert usage.num_accepted_tokens <= usage.num_draft_tokens
            assert sum(usage.gamma_histogram) == usage.num_steps
            if self.draft is not None and self.draft.kind == "target":
                assert usage.num_accepted_tokens == usage.num_draft_tokens
            self.totals["cached"] += usage.num_cached_tokens
            self.totals["accepted"] += usage.num_accepted_tokens
        self.totals["preemptions"] = rig.scheduler.num_preemptions
        blocks = rig.blocks
        assert blocks.num_free + blocks.num_granted == blocks.num_total

    def turn(self) -> None:
        """A step, and now and then a transition of the tail."""
        self.rig.step()
        if self.rng.random() < 0.05:
            self.rig.drain()  # transitions need nothing in flight
            if self.rig.blocks.expanded:
                self.contract()
            else:
                self.expand()
            self.rig.scheduler.check_integrity()

    def expand(self) -> None:
        """The tail becomes KV; what the draft kept in it is gone."""
        rig = self.rig
        rig.blocks.expand()
        rig.scheduler.drafting.set_resident(False)
        if self.draft is not None:
            self.draft.poison(range(len(self.draft.slots)))
        self.totals["expansions"] += 1

    def contract(self) -> None:
        """The tail goes back, with its blocks copied in two rounds while steps run."""
        rig = self.rig
        blocks = rig.blocks
        blocks.close_tail()
        live = blocks.live_tail_blocks()
        destinations = blocks.reserve(len(live))
        if destinations is None:
            blocks.reopen_tail()
            return
        moves = dict(zip(live, destinations, strict=True))
        filling = rig.scheduler.blocks_being_filled()
        self.target.copy_blocks({s: d for s, d in moves.items() if s not in filling})
        rig.scheduler.check_integrity()
        for _ in range(self.rng.randint(0, 3)):
            rig.step()
        rig.drain()
        if self.rng.random() < 0.2:
            blocks.reopen_tail()
            blocks.release_reserved(destinations)
            return
        still = blocks.live_tail_blocks()
        assert set(still) <= set(live)
        self.target.copy_blocks({s: moves[s] for s in still if s in filling})
        rig.scheduler.rename(moves)
        rig.scheduler.check_integrity()
        blocks.give_tail_to_draft()
        size = blocks.block_size
        self.target.poison(range(blocks.num_base_blocks * size, len(self.target.slots)))
        rig.scheduler.drafting.set_resident(True)
        self.totals["moved"] += len(still)
