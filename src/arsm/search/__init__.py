"""Search for the best point of a black box over discrete variables.

- `maximize`: the whole search in one call.
- `Search`: the same search for a loop of your own, by `ask` and `tell`.
- `When`: a variable that exists for some values of another only.
"""

from arsm.search.loop import maximize
from arsm.search.result import Maximum
from arsm.search.rounds import Search
from arsm.search.space import When

__all__ = ["Maximum", "Search", "When", "maximize"]
