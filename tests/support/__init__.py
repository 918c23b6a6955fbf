"""What tests share: rigs, child processes, stand-ins.

Child processes find this package too: the root `conftest.py` puts `tests` on their path. Run what
is a program with ``python -m support.NAME``.
"""

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
