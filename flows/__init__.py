"""Who goes next. What holds for every program of this room stands here, before its imports."""

import gc
import os
import signal
import sys

os.environ.setdefault("DO_NOT_TRACK", "1")
# Threads that wait by spinning take the cores from those that work: where anything else runs on
# the machine, a training step then takes four times as long. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A library that takes fewer threads under load adds in another order, and equal runs part.
os.environ.setdefault("MKL_DYNAMIC", "FALSE")
os.environ.setdefault("OMP_DYNAMIC", "FALSE")
if sys.argv[0] == "-m":  # python -m flows.<program>; its main() undoes both (stage.arrive)
    gc.disable()  # the imports make a million objects that stay: two seconds of collections
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports without a traceback
