"""Unit tests of the dispatcher."""
