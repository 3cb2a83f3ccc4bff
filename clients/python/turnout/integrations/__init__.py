"""Adapters to trainers that exist. Each needs the trainer it is for, and nothing else imports it."""
