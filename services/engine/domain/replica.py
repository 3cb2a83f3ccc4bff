"""One replica as a state machine: what is believed of it, and every transition that is allowed.

Invariant: no transition lets it serve with a tag asleep, without intact weights, or with caches of older weights.
"""

from services.engine.domain.lend_plans import LendPlans
from services.engine.domain.update_plans import UpdatePlans


class Replica(LendPlans, UpdatePlans):
    """The state of one replica, and what may be done with it."""
