"""Train a model: `python train.py model=50m optim=adamw_b2_099`.

Every argument is a choice of a group (`model=50m`) or the value of a key (`optim.lr=1e-3`); docs/configuration.md has
them all. With `-m`, commas sweep and each job is a run of its own; `--help`, `--cfg job` and `--info` are Hydra's.

Exit codes: 0 finished, 1 the run failed, 2 a mistake in the command or its data, 75 stopped by SIGTERM, SIGUSR2 or a
deadline with a state to go on from, 130 the same for SIGINT.
"""

import sys

from llama_c4.cli import train_main

if __name__ == "__main__":
    sys.exit(train_main(sys.argv[1:]))
