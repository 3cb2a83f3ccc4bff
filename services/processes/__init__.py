"""Child processes of the command: started together, watched, and never left behind."""
