"""The child process that runs calls: `python -m callyard.executor`.

It holds one bundle, many contexts (pooled greenlets) and one link to its worker, and knows nothing of scheduling. Its
design, invariants and failures: docs/design/executor.md.
"""
