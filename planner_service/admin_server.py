"""The operator's calls of PlannerService: policies, versions and what was learned."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from nightjar import log
from nightjar.errors import InvalidRequest, UnknownName
from nightjar.v1 import planner_pb2 as pb
from nightjar.v1 import planner_pb2_grpc
from planner_service import admin_messages as read
from planner_service.planner import Planner
from planner_service.sync import Sync
from planner_service.versions import Book, Scope, Version


class AdminServicer(planner_pb2_grpc.PlannerServiceServicer):
    """The part of the service that operators call."""

    def __init__(self, planner: Planner, sync: Sync) -> None:
        self._planner = planner
        self._sync = sync

    async def ListPolicies(
        self, request: pb.ListPoliciesRequest, context: Any
    ) -> pb.ListPoliciesResponse:
        """Policies, and the versions that touch a scope."""
        scope, book = read.scope(request.scope), self._planner.book
        versions = [
            self._shown(version)
            for version in reversed(book.versions)
            if version.scope.includes(scope) or scope.includes(version.scope)
        ]
        policies = [read.policy_message(spec) for spec in self._planner.registry.values()]
        return pb.ListPoliciesResponse(policies=policies, versions=versions)

    async def ActivatePolicy(
        self, request: pb.ActivatePolicyRequest, context: Any
    ) -> pb.ActivatePolicyResponse:
        """Try a policy out and make it the one that decides in a scope."""
        scope = self.known(read.scope(request.scope))
        given, floor = read.parameters(request.parameters), read.floor(request)
        if floor is not None and not self._planner.probes.share:
            raise InvalidRequest(
                "floor", "this planner measures no baseline: it runs with --probe-share 0"
            )
        # In a thread: decisions go on while the policy is tried out.
        parameters = await asyncio.to_thread(self._planner.prepare, request.name, given, scope)
        now_ms, made = wall_ms(), list[Version]()

        def change(book: Book) -> Book:
            book = book.activate(request.name, parameters, scope, now_ms, "operator", floor=floor)
            made[:] = book.versions[-1:]
            return book

        await self._sync.change(change)
        log.get().info(
            "version activated", version=made[0].id, parameters=parameters, scope=str(scope)
        )
        return pb.ActivatePolicyResponse(version=self._shown(made[0]))

    async def RollbackPolicy(
        self, request: pb.RollbackPolicyRequest, context: Any
    ) -> pb.RollbackPolicyResponse:
        """Go back to the version before."""
        scope = self.known(read.scope(request.scope))
        now_ms, restored = wall_ms(), list[Version]()

        def change(book: Book) -> Book:
            book, version = book.rollback(scope, now_ms)
            restored[:] = [version]
            return book

        await self._sync.change(change)
        log.get().info("version rolled back", version=restored[0].id, scope=str(scope))
        return pb.RollbackPolicyResponse(version=self._shown(restored[0]))

    async def GetPolicyState(
        self, request: pb.GetPolicyStateRequest, context: Any
    ) -> pb.GetPolicyStateResponse:
        """The version that decides, what was learned, and how the store is."""
        planner, key = self._planner, request.profile_key
        self.known(Scope(profile_key=key))
        deciding = planner.deciding_version(key, "")
        versions = [version for version in planner.book.versions if version.id == deciding]
        known = [p for p in planner.profiles.values() if key in ("", p.key)]
        oldest = planner.ledger.oldest()
        return pb.GetPolicyStateResponse(
            version=self._shown(versions[0]) if versions else pb.PolicyVersion(version=deciding),
            profiles=[read.profile_state(p, planner.stats(p)) for p in known],
            num_policy_faults=planner.num_policy_faults,
            store_connected=self._sync.connected,
            num_dropped_updates=planner.ledger.num_dropped,
            store_lag_ms=0 if oldest is None else int((time.monotonic() - oldest) * 1000),
        )

    def known(self, scope: Scope) -> Scope:
        """The scope, refused if it names a profile that nobody heard of."""
        if scope.profile_key and scope.profile_key not in self._planner.profiles:
            raise UnknownName(
                f"no profile {scope.profile_key[:64]!r}; `nightjar policy state` lists them"
            )
        return scope

    def _shown(self, version: Version) -> pb.PolicyVersion:
        benefit = self._planner.net_benefit(version.id)
        return read.version_message(version, benefit, active=self._planner.book.is_active(version))


def wall_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
