"""How the controller speaks to engines."""
