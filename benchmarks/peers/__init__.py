"""Forebay beside its peers: the same batch over the same simulated engines, through each of them.

    python -m benchmarks.peers [--scenario mixed ...] [--requests 2000] [--seeds 1 2 3] [--list]

One module a subject: what goes wrong (``scenarios``), what is asked (``workload``), who is compared
(``systems``), how each is started (``environments``, ``routers``, ``ready``), one run (``runs``, ``engines``,
``traffic``, ``processes``), what is told (``record``, ``page``). Programs of their own are ``client`` and
``interactive``. The fleet and the bound are those of the other benchmarks.
"""

import sys
from pathlib import Path

# The other benchmarks are scripts that import each other by bare names.
sys.path.append(str(Path(__file__).resolve().parent.parent))
