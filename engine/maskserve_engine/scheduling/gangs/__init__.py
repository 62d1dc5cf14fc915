"""Policies for a worker of several devices: which devices step which edits."""
