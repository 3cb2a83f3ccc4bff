"""A workload from what a real run logged, so that its owner learns the gain before adopting anything.

Invariant: what a log tells replaces the workload's own; what it cannot tell is listed as assumed, and widens the band.
"""

from services.simulator.fitting.calibrate import SEARCH_STEPS, Fit, FitError, fit
from services.simulator.fitting.variants import NAMES, variants
from services.simulator.fitting.verl_log import LogError, RunLog, Step, read

__all__ = ["NAMES", "SEARCH_STEPS", "Fit", "FitError", "LogError", "RunLog", "Step", "fit", "read", "variants"]
