"""The first bytes of a request's prompt, for routing; the work is bounded, however long it is."""

from __future__ import annotations

import struct

from gateway.routing.facts import RequestFacts
from gateway.routing.prefix_affinity import KEY_BYTES
from nightjar.v1 import generation_pb2 as pb

MOST = max(KEY_BYTES)


def request_facts(request: pb.GenerateRequest) -> RequestFacts:
    """What routing may know of a request, valid or not.

    Token ids count as 4 bytes each; a chat as its messages' roles and texts in turn.
    """
    form = request.WhichOneof("prompt")
    if form == "tokens":
        ids = request.tokens.token_ids[: MOST // 4]
        return RequestFacts(beginning=struct.pack(f"<{len(ids)}i", *ids))
    if form != "chat":
        return RequestFacts(beginning=request.text[:MOST].encode()[:MOST])
    beginning = bytearray()
    for message in request.chat.messages:
        beginning += f"{message.role[:MOST]}\0{message.content[:MOST]}\0".encode()
        if len(beginning) >= MOST:
            break
    return RequestFacts(beginning=bytes(beginning[:MOST]))
