"""A workload from what a real run logged, so that its owner learns the gain before adopting anything.

Invariant: what a log tells replaces the workload's own; what it cannot tell is listed as assumed, and widens the band.
"""

from services.simulator.fitting.calibrate import SEARCH_STEPS, Fit, FitError, fit
from services.simulator.fitting.own_run import fit_run
from services.simulator.fitting.run_facts import RunFacts, facts_of
from services.simulator.fitting.variants import NAMES, variants
from services.simulator.fitting.verl_log import LogError, RunLog, Step, read

__all__ = [
    "NAMES",
    "SEARCH_STEPS",
    "Fit",
    "FitError",
    "LogError",
    "RunFacts",
    "RunLog",
    "Step",
    "facts_of",
    "fit",
    "fit_run",
    "read",
    "variants",
]
