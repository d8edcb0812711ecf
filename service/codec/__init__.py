"""Wire format <-> request, both halves, one file per API, the checks that both share in `sequences.py`.

Everything a caller can get wrong is found here, before the queue, in whole-array operations: a token id below zero
reads the vocabulary's last row on a CPU and any memory on a GPU, so no engine ever sees an unchecked one. Clocks are
passed in.
"""
