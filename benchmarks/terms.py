"""What overload is like, whether it is measured (`overload.py`) or simulated (`simulate.py`)."""

OURS = "ours"
# The seconds of work that plain queues hold: too much for the deadline, and half of it.
RIVALS = {"FIFO, 2 s": 2.0, "FIFO, 0.5 s": 0.5}
TIMEOUT_SECONDS = 1.0
# More than the deadline: by then a queue is as full as it gets.
FILL_SECONDS = 1.5
