"""What the three services share: life cycle, configuration, errors, health, metrics, waits and repeatable calls."""
