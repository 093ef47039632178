"""Job permits, pressure, owner queues, turns. See `docs/design/host.md`."""
