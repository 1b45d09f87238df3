"""What a person can mend, in one line: a layout that does not fit, a model folder that is not whole, a job that does not meet."""

from __future__ import annotations


class SetupError(ValueError):
    """The config, the machine or a folder does not fit the run; the command line ends with 2."""

    exit_code = 2


class JoinError(TimeoutError):
    """The ranks of the job did not come together within the limit."""

    exit_code = 1
