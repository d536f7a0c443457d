"""No property test is a timed test: how long an example takes depends on what else the machine does."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
