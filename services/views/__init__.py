"""Every picture and live view."""
