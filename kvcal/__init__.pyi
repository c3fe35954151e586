"""Types of what `kvcal.__getattr__` gives."""

from .commands.api import cache as cache
from .commands.api import check_codec as check_codec
from .commands.api import evaluate as evaluate
from .commands.api import fit as fit
from .commands.api import plan as plan
from .commands.api import register as register

__version__: str
