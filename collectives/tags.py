"""Tags of messages: every user has a range of its own, since a receive takes the message of any user of its tag.

MPI guarantees tags up to 32767. All communicators of this library are duplicates, on which nobody else sends.
"""

from __future__ import annotations

LARGEST = 32_767
LARGEST_OF_USERS = 300  # argument `tag` of `Communicator.send`: each takes two tags, and few are left

ABOUT_MISSING_RANKS = range(1)
OF_LONG_LIVED_USERS = range(1, 16_000)
OF_SINGLE_CALLS = range(16_000, 32_000)
BETWEEN_TWO_RANKS = range(32_000, 32_000 + 2 * (LARGEST_OF_USERS + 1))
CHECKS_OF_CALLS = range(32_700, 32_709)  # one for each check under way, and one for sums within calls
DESCRIPTIONS_OF_CALLS = range(32_710, 32_718)
CLOCKS = range(32_720, 32_721)
END_OF_PROGRAM = range(LARGEST, LARGEST + 1)
