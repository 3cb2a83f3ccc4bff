"""What the engine controller keeps on disk, and how it comes back."""
