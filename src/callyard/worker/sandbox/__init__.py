"""How strongly executors are confined: levels, what this machine allows, and the spawner that does it (X46)."""
