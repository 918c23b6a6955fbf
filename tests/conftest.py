"""What all tests need of the process that they run in."""

import signal
import threading

from fx100_lmcache.counters import Tally

# a shell starts background jobs with Ctrl-C ignored, and so would everything started from here
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

Tally.strict = True  # a counter that is not in the table fails the test that counts it
