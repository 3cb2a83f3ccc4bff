"""The report of one run: what happened, why, and what it was worth, as a page or as a picture.

Invariant: everything in it is folded from the run's events and from nothing else.
"""

from services.views.report.account import RunAccount, account_of
from services.views.report.page import render
from services.views.report.poster import draw

__all__ = ["RunAccount", "account_of", "draw", "render"]
