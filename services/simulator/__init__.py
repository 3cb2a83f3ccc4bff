"""What lending would gain: a run simulated with the real policies, before anyone moves a GPU.

Invariants: of the services only `services.scheduler.policies` is used; importing this package loads no gRPC.
"""

from services.simulator.catalog import WorkloadError, load, names, parse
from services.simulator.result import Result
from services.simulator.simulate import simulate
from services.simulator.workload import Workload

__all__ = ["Result", "Workload", "WorkloadError", "load", "names", "parse", "simulate"]
