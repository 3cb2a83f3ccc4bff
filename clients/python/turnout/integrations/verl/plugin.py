"""Registers the trainer: `VERL_USE_EXTERNAL_MODULES=turnout.integrations.verl.plugin` in the environment of verl."""

from turnout.integrations.verl import _trainer as _trainer
