"""What can be called: `@function` and its promises, signatures, bundles of user code, the registry.

This package is imported by user files and by the worker, which never imports user code; so its own import stays light.
`signature` and `loading` are for the executor, `bundle` and `registry` for the worker.
"""
