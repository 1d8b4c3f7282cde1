"""A worker: a front process that speaks gRPC and an engine process that runs the steps."""

import os

# OpenMP's threads otherwise spin for milliseconds at the end of each loop; where another process
# needs the core, as the front does, every step then waits for whole time slices. It is read
# once, when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
