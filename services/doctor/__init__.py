"""What `turnout doctor` looks at: everything around the services that has kept them from working somewhere."""
