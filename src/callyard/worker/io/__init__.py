"""IO for user functions, done by the worker: providers, and the hub that every request goes through."""
