"""The errors that a user can meet. Each is one clear message: dotted key or file, value, rule, way out."""


class UserError(Exception):
    """Something that the user can put right. The command line prints the message alone and exits with 2."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration that cannot be run: unknown key, wrong value, impossible combination.

    Attributes:
        faults: Every fault found, one message each; `str(error)` joins them.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        head = "" if len(faults) == 1 else f"{len(faults)} faults in the configuration:\n"
        super().__init__(head + "\n".join(faults))


class DataError(UserError):
    """A corpus, tokenizer or token cache that is missing, damaged or not the one asked for."""


class CheckpointError(UserError):
    """A checkpoint or run folder that is missing, damaged, busy or belongs to something else."""


class TrainingError(Exception):
    """A run that cannot go on: non-finite loss, full disk, loss below the entropy floor. Exit code 1."""

    exit_code = 1


class DivergedError(TrainingError):
    """A loss or gradient that is not finite: the recipe failed, not the machine."""
