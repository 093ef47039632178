"""Sockets with byte accounting. The host knows `callyard.transport.port` of it, and nothing else."""
