"""The just-in-time policy: predict the rest of the step from every running request, and take the GPUs back in time."""

from services.scheduler.policies.jit.policy import JitPolicy

__all__ = ["JitPolicy"]
