"""Servers for the router to be measured and tested against: real gRPC, and the times of a device
that is not there.
"""
