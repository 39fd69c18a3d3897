"""The SDK's own daemon for tests, as a thread of the test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SDK = Path(__file__).resolve().parents[2] / "python"
sys.path[:0] = [str(SDK), str(SDK / "tests")]

_spec = importlib.util.spec_from_file_location("sdk_conftest", SDK / "tests/conftest.py")
assert _spec is not None and _spec.loader is not None
sdk_conftest = importlib.util.module_from_spec(_spec)
sys.modules["sdk_conftest"] = sdk_conftest
_spec.loader.exec_module(sdk_conftest)

Machine, machine = sdk_conftest.Machine, sdk_conftest.machine
