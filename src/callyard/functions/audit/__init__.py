"""Who may run: policies that accept or refuse a bundle before it is sent to an executor or described.

A policy sees bytes; nothing of a bundle is run to judge it. Source: call-execution X41.
"""
