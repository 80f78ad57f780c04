"""How property tests run everywhere: the same examples each time, and no clock.

``--hypothesis-profile=explore`` looks further, at other examples on each run.
"""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("steady")
