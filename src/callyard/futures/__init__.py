"""`PoolExecutor`: `concurrent.futures` on a worker and its executors."""
