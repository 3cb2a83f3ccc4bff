"""Turnout on Ray: services and engine agents as processes of named, restartable actors.

Needs `pip install 'turnout[ray]'`, and `turnout-services` in the environment of Ray's workers.
"""

from turnout.ray._deployment import Deployment, MemberStatus, connect, down, status, up
from turnout.ray._errors import DeploymentError
from turnout.ray._member import MemberState
from turnout.ray._spec import ClusterSpec, load, parse

__all__ = [
    "ClusterSpec",
    "Deployment",
    "DeploymentError",
    "MemberState",
    "MemberStatus",
    "connect",
    "down",
    "load",
    "parse",
    "status",
    "up",
]
