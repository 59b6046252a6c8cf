"""A service may have as many connections as the system lets it, not as many as shells usually do."""

from __future__ import annotations

import resource
import subprocess
import sys

_LOWERED_THEN_RAISED = """
import resource
from workers.open_files import allow_open_files
_soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
allow_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_the_usual_limit_is_raised_to_what_is_allowed():
    said = subprocess.run(
        [sys.executable, "-c", _LOWERED_THEN_RAISED], capture_output=True, text=True, check=True
    )
    assert int(said.stdout) == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
