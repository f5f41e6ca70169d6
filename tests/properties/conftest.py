"""Properties are tried on the same examples each time, and none has a time limit: chance decides about no change."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
