"""What the scheduler keeps on disk, and how it goes on from that."""
