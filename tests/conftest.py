"""For all tests: property tests draw the same examples, and are not timed; gateways' state is the run's.

There are some thousand gateways in one process. FastAPI would remember functions of hundreds of them, and
each collection of garbage look through all that belongs to these. Clients of HTTP, two for each gateway,
share what is read from the file of certificates, which takes 20 ms.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile

import httpx._transports.default as transports
from fastapi.dependencies import models
from hypothesis import settings

settings.register_profile("tokenflow", deadline=None, derandomize=True)
settings.load_profile("tokenflow")

transports.create_ssl_context = functools.cache(transports.create_ssl_context)
for name in ("_is_gen_callable_cached", "_is_async_gen_callable_cached", "_is_coroutine_callable_cached"):
    setattr(models, name, getattr(models, name).__wrapped__)

if "TOKENFLOW_STATE_DIR" not in os.environ:
    os.environ["TOKENFLOW_STATE_DIR"] = tempfile.mkdtemp(prefix="tokenflow-state-")
    atexit.register(shutil.rmtree, os.environ["TOKENFLOW_STATE_DIR"], ignore_errors=True)
