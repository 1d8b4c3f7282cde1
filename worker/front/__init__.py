"""The asyncio side of a worker: streams, status, and the channel to the engine."""
