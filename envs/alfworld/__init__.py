"""ALFWorld: text games of household tasks, played in the real TextWorld engine."""

import os
from importlib.util import find_spec

# Else importing alfworld makes a folder in the user's home; the data that it looks for there are not read by us.
if (_spec := find_spec("alfworld")) is not None and _spec.submodule_search_locations:
    os.environ.setdefault("ALFWORLD_DATA", _spec.submodule_search_locations[0])
