"""For all tests: property tests draw the same examples, and are not timed; gateways' state is the run's."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

settings.register_profile("tokenflow", deadline=None, derandomize=True)
settings.load_profile("tokenflow")

if "TOKENFLOW_STATE_DIR" not in os.environ:
    os.environ["TOKENFLOW_STATE_DIR"] = tempfile.mkdtemp(prefix="tokenflow-state-")
    atexit.register(shutil.rmtree, os.environ["TOKENFLOW_STATE_DIR"], ignore_errors=True)
