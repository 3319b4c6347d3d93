"""The process: device, precision, threads, determinism, random numbers, signals."""
