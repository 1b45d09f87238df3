"""The error of everything a user can mend in their data."""

from __future__ import annotations


class DataError(ValueError):
    """Wrong data: the text is one line that says what is wrong, where (FILE:LINE where there is one), and what to do."""

    exit_code = 2
