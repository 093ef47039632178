"""The asyncio shell around the scheduler: actor, links, pool, builders, outputs."""
