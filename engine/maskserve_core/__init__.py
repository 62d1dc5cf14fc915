"""What every part of maskserve shares: numpy and pillow only, no IO beyond what a name says."""
