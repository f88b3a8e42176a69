"""Settings of the property tests."""

from hypothesis import settings

# The machine may be busy, and a property that holds slowly holds.
settings.register_profile("data", deadline=None)
settings.load_profile("data")
