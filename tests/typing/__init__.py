"""Code that type checkers read, and nobody runs: `right.py` has no fault, in `wrong.py` each marked line has one."""
