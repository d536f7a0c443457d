"""No property test is a timed test: an example takes as long as the machine lets it."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
