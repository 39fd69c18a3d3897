"""A laboratory for scheduling policies: simulations from Python, as frames and charts.

>>> from roommate import lab                                             # doctest: +SKIP
>>> run = lab.simulate("tiresias", cluster="4x8", seed=7)                # doctest: +SKIP
>>> run.metrics["avg_jct_s"], run.jobs.jct_s.max()                       # doctest: +SKIP
>>> lab.compare(["fifo", "tiresias", my_policy], cluster="4x8").metrics  # doctest: +SKIP

The program ``roommate`` simulates; it is looked for in the variable ``ROOMMATE``, beside Python and
in ``PATH``. Frames need pandas and charts matplotlib: ``pip install roommate-gpu[lab]``. A policy
can be a function of a plan (``roommate.lab.policy``), for a first try.
"""

from __future__ import annotations

from .experiment import Comparison, Run, compare, simulate
from .policy import Job, Plan, Refused
from .program import LabError

__all__ = [
    "Comparison",
    "Job",
    "LabError",
    "Plan",
    "Refused",
    "Run",
    "compare",
    "simulate",
]
